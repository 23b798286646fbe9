"""`dlm pieces`: wordpieces, from word counts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import Json
from dlm.cli.records import PublicKey
from dlm.units import counted


def pieces(
    counts: Annotated[
        Path,
        typer.Argument(metavar="COUNTS", help="TSV of words and counts, as dlm unigrams writes."),
    ],
    size: Annotated[
        int, typer.Option(help="Number of pieces with <unk>, <s> and </s>, such as 4000 or 16000.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Inventory to write, NAME.model.")
    ],
    public: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Who vouches that the counts are of public text."),
    ] = None,
    public_key: PublicKey = None,
    max_length: Annotated[int, typer.Option(help="Maximum characters per piece.")] = 16,
    as_json: Json = False,
) -> None:
    """Build wordpieces from word counts alone.

    No text is read. Every character of every word is a piece, so no word made of these characters
    is unknown. The inventory is a SentencePiece model. Beside it stands the privacy record of the
    counts (.provenance.json), which dlm federate composes with its rounds. Counts without a record
    carry no guarantee, unless --public NAME vouches that they are of public text. With
    --public-key, counts that this key has not signed (dlm privacy sign) are refused.

    Examples:
        dlm pieces counts.tsv --size 4000 --output pieces.model
    """
    from dlm.cli.paths import check_reads, check_writes
    from dlm.federated.make_pieces import make_pieces

    check_reads("COUNTS", counts)
    check_writes("--output", output)
    made = make_pieces(
        counts, size, output, max_length=max_length, public=public, public_key=public_key
    )
    if as_json:
        print_json(
            {
                "output": str(output),
                "pieces": made.inventory.size,
                "pieces_per_word": made.per_word,
                "privacy": made.inventory.provenance.statement(),
            }
        )
        return
    print(f"{counted(made.inventory.size, 'piece')} in {output}, {made.per_word:.2f} per word")
    print(made.inventory.provenance.statement())
