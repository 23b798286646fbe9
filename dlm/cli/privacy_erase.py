"""`dlm privacy erase`: the end of a run that will not be finished."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import Json
from dlm.units import counted


def erase(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run of `dlm federate`.")],
    as_json: Json = False,
) -> None:
    """End a run: erase its noise, and the copy of users' text.

    Whoever has the noise can subtract it from the releases. A run that finishes erases it by
    itself; use this command for a run that you stopped. The model, its report and the ledger of who
    took part stay, and the run cannot resume. The noise is overwritten, then removed; the text is
    removed. Snapshots, backups, a journalling or copy-on-write file system and an SSD may keep what
    was there.

    Examples:
        dlm privacy erase runs/first
    """
    from dlm.cli.paths import check_reads
    from dlm.federated.run_folder import RunFolder

    check_reads("DIR", run, folders=True)
    with RunFolder(run) as folder:
        done = folder.end()
    if as_json:
        print_json({"run": str(run), "rounds": done.rounds, "erased": done.erased})
        return
    print(f"erased: {', '.join(done.erased) or 'nothing, since there was neither'}")
    print(
        f"{run} ended after {counted(done.rounds, 'round')}: it holds no noise and no users' text"
    )
