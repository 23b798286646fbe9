"""`dlm pieces`: wordpieces, from word counts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import Json, option
from dlm.cli.records import PublicKey
from dlm.federated.pieces.settings import PieceSettings
from dlm.units import counted


def pieces(
    counts: Annotated[
        Path,
        typer.Argument(metavar="COUNTS", help="TSV of words and counts, as dlm unigrams writes."),
    ],
    size: Annotated[int, option(PieceSettings, "size")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Inventory to write, NAME.model.")
    ],
    public: Annotated[
        str | None,
        typer.Option(
            "--public-attested-by",
            metavar="NAME",
            help="Who vouches that the counts are of public text.",
        ),
    ] = None,
    public_key: PublicKey = None,
    max_length: Annotated[int, option(PieceSettings, "max_length")] = PieceSettings.max_length,
    as_json: Json = False,
) -> None:
    """Build wordpieces from word counts.

    No text is read. Every character of every word is a piece, so no word made of these characters
    is unknown. The inventory is a SentencePiece model. The privacy record of the
    counts is written beside it (.provenance.json); dlm federate composes it with its rounds. Counts
    without a record carry no guarantee, unless --public-attested-by NAME vouches that they are of
    public text.
    With --public-key, that key must have signed the counts (dlm privacy sign).

    Examples:
        dlm pieces counts.tsv --size 4000 --output pieces.model
    """
    from dlm.cli.paths import check_reads, check_writes
    from dlm.federated.pieces.make_pieces import make_pieces

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
