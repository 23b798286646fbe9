"""Compiles kernels before the work begins, and reports it if that takes long."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from dlm.jit import compile_ahead
from dlm.progress import compiling_notice


def compile_kernels(kernels: Sequence[Any]) -> int:
    """Compiles the kernels that the cache lacks, and returns how many; see `jit.compile_ahead`.

    Progress goes where the command reports its stages, or else to standard error.
    """
    if compiling_notice.is_logged:
        compiling_notice.use(_print)
    return compile_ahead(kernels)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
