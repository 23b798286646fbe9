"""Records the origin of figures: the command, the commit, the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlm import __version__
from dlm.errors import ConfigError
from loadtest.children import ROOT


def read_document(path: Path, kind: str, version: int) -> dict[str, Any]:
    """Reads a JSON file of loadtest; raises `ConfigError` if it has another format."""
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        name = f"{found['format']!r} of version {found['version']!r}"
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; expected a {kind}") from None
    except (ValueError, TypeError, KeyError) as exc:
        raise ConfigError(f"{path} is not a {kind}; name another file or folder") from exc
    if (found["format"], found["version"]) != (kind, version):
        raise ConfigError(f"{path} is {name}; expected {kind!r} of version {version}")
    return found


def provenance(seed: int) -> dict[str, Any]:
    """The facts of `provenance` in report.schema.json."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "loadtest", *sys.argv[1:]],
        "commit": commit(),
        "dlm": __version__,
        "python": platform.python_version(),
        "seed": seed,
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": f"{platform.system()} {platform.release()}",
        },
    }


def commit() -> str | None:
    """The commit of the checkout, with "+" if files differ from it; None without git."""
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(ROOT), *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=20,
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head + "+" * bool(changes)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
