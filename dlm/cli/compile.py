"""`dlm compile`: compiles kernels now instead of at their first use."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated, Any

import typer

from dlm.cli.options import Json
from dlm.cli.output import compile_kernels, print_json
from dlm.units import counted


class _For(StrEnum):
    SERVE = "serve"
    SCORE = "score"
    SHARD = "shard"
    ESTIMATE = "estimate"


REST = "all others"


def compile_(
    commands: Annotated[
        list[_For] | None,
        typer.Argument(metavar="[COMMAND...]", help="Only these: serve, score, shard or estimate."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile all kernels now, so that no first use waits.

    Without it, each command compiles what it needs when it first runs: some 10 s for score, serve
    and demo, less for shard and estimate. The kernels are kept beside the package if its folder
    is writable, or else in ~/.cache/dlm; NUMBA_CACHE_DIR names another folder. Run it again after
    an upgrade.

    Examples:
        dlm compile
        dlm compile serve --json
    """
    from dlm.jit import declared_kernels, folders

    begun = time.monotonic()
    found: dict[str, list[Any]] = {name: _kernels_of(name) for name in commands or _For}
    if not commands:
        found[REST] = declared_kernels()
    did: dict[str, dict[str, float]] = {}
    for name, kernels in found.items():
        began = time.monotonic()
        did[name] = {"kernels": len(kernels), "compiled": compile_kernels(kernels)}
        did[name]["seconds"] = round(time.monotonic() - began, 3)
        if not as_json:
            of = did[name]
            print(f"{name}: {counted(len(kernels), 'kernel')}, {of['compiled']:,} compiled", end="")
            print(f" in {of['seconds']:.1f} s" if of["compiled"] else "", flush=True)
    folder = str(folders()[-1])
    if not as_json:
        print(f"The kernels are in {folder}")
        return
    total = {
        "kernels": len({kernel for kernels in found.values() for kernel in kernels}),
        "compiled": sum(of["compiled"] for of in did.values()),
        "seconds": round(time.monotonic() - begun, 3),
    }
    print_json({**total, "folder": folder, "commands": did})


def _kernels_of(command: _For) -> list[Any]:
    if command is _For.SERVE:
        from dlm.server.compiling import KERNELS as SERVING

        return list(SERVING)
    if command is _For.SCORE:
        from dlm.client.table import KERNELS as ASKING
        from dlm.index.search.shard import OPENING
        from dlm.index.search.text.score import KERNELS as SCORING

        return list(dict.fromkeys([*ASKING, *OPENING, *SCORING]))
    if command is _For.SHARD:
        from dlm.index.making.shard_set import KERNELS as BUILDING

        return list(BUILDING)
    from dlm.jit import declared_kernels

    own = ("dlm.estimate.", "dlm.spill.")
    return [one for one in declared_kernels() if one.py_func.__module__.startswith(own)]
