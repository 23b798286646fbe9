"""`dlm compile`: kernels are compiled now, and not at the first use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import Json
from dlm.units import counted


class _For(StrEnum):
    SERVE = "serve"
    SHARD = "shard"
    SCORE = "score"


def compile_(
    commands: Annotated[
        list[_For] | None,
        typer.Argument(metavar="[COMMAND...]", help="Only for serve, shard or score."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile all kernels now, so that no first use waits.

    Without it, each command compiles what it needs when it first runs, for 20 to 60 seconds. The
    kernels are kept beside the package if this user may write there, or else in ~/.cache/dlm;
    NUMBA_CACHE_DIR names another folder. Run it again after an upgrade.

    Examples:
        dlm compile
        dlm compile serve --json
    """
    from dlm.cli.compiling import compile_kernels
    from dlm.jit import declared_kernels, folders

    begun = time.monotonic()
    kernels = _kernels_of(commands) if commands else declared_kernels()
    compiled = compile_kernels(kernels)
    folder = folders()[-1]
    if as_json:
        seconds = round(time.monotonic() - begun, 3)
        facts = {"kernels": len(kernels), "compiled": compiled, "seconds": seconds}
        print_json({**facts, "folder": str(folder)})
        return
    print(f"{counted(len(kernels), 'kernel')}, {compiled:,} compiled now, in {folder}")


def _kernels_of(commands: Sequence[_For]) -> list[Any]:
    found: list[Any] = []
    for command in commands:
        if command is _For.SERVE:
            from dlm.server.compiling import KERNELS as SERVING

            found += SERVING
        elif command is _For.SHARD:
            from dlm.index.making.shard_set import KERNELS as BUILDING

            found += BUILDING
        else:
            from dlm.client.deliver.warm import KERNELS as ASKING
            from dlm.index.search.shard import OPENING
            from dlm.index.search.text.score import KERNELS as SCORING

            found += [*ASKING, *OPENING, *SCORING]
    return list(dict.fromkeys(found))
