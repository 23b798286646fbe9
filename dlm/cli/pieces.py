"""`dlm pieces`: words in pieces, from how often each is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.records import PublicKey


def pieces(
    counts: Annotated[
        Path, typer.Argument(help="TSV of words and counts, such as dlm unigrams writes.")
    ],
    size: Annotated[
        int, typer.Option(help="Pieces, <unk>, <s> and </s> among them; 4000, 16000, 30000.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The inventory, FILE.model.")],
    public: Annotated[
        str | None,
        typer.Option(help="Who says that the counts are of public text, of no user."),
    ] = None,
    public_key: PublicKey = None,
    max_length: Annotated[int, typer.Option(help="Characters of a piece at most.")] = 16,
) -> None:
    """Build wordpieces from word counts alone.

    Nobody's text is looked at again. Every character of every word is a piece, so that no word
    of these characters is unknown. The inventory is a SentencePiece model; beside it stands the
    record of what protects those whose words were counted (.provenance.json), which dlm federate
    composes with its rounds. Counts without a record promise nothing, unless somebody says by name
    that they are of public text (--public NAME). With --public-key, counts that this key has not
    signed (dlm privacy sign) are refused, and the pieces are of verified counts.

    Example: dlm pieces counts.tsv --size 4000 --output pieces.model
    """
    from dlm.cli.paths import check_reads
    from dlm.federated.make_pieces import make_pieces

    check_reads("COUNTS", counts)
    made = make_pieces(
        counts, size, output, max_length=max_length, public=public, public_key=public_key
    )
    print(f"{made.inventory.size:,} pieces in {output}, {made.per_word:.2f} per word")
    print(made.inventory.provenance.statement())
