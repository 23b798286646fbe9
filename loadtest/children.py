"""Starts processes that run a module of this package and end with this process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from dlm.server.child import command_of_child

ROOT = Path(__file__).resolve().parents[1]


def start_child(module: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Starts `python -m module arguments`, whose standard output is piped as text.

    Args  options  those of subprocess.Popen; `env` adds to this process's environment
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, **options.pop("env", {})}
    return subprocess.Popen(
        command_of_child(module, *arguments), stdout=subprocess.PIPE, text=True, env=env, **options
    )
