"""`dlm pieces`: words in pieces, from how often each is used."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.records import PublicKey

LONGEST = 512  # SentencePiece's bound on the characters of a piece


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
    from dlm.errors import ConfigError
    from dlm.federated.counts_file import read_counts, traces_of_users
    from dlm.federated.pieces import build_inventory
    from dlm.federated.provenance import Provenance, content_digest
    from dlm.federated.signature import require_signed
    from dlm.federated.words import PIECES_SUFFIX

    if output.suffix != PIECES_SUFFIX:
        raise ConfigError(
            f"--output is {output}; its name must end in {PIECES_SUFFIX}, by which dlm federate "
            "knows wordpieces"
        )
    if not 1 <= max_length <= LONGEST:
        raise ConfigError(f"--max-length is {max_length}; it must be from 1 to {LONGEST}")
    # Before the estimation, which takes long, and before anything of users is replaced.
    if not output.parent.is_dir():
        raise ConfigError(f"--output is {output}; its folder must be there, and is not: make it")
    if output.is_dir():
        raise ConfigError(f"--output is {output}, which is a folder; name a file in it")
    if output.exists() and counts.exists() and output.samefile(counts):
        raise ConfigError(
            f"--output is {output}, the counts themselves, which would be lost; give another name"
        )
    if public is not None and (beside := traces_of_users(counts)):
        raise ConfigError(
            f"--public, but {beside[0]} says that {counts} is of users; leave --public out"
        )
    if public is not None and public_key is not None:
        raise ConfigError("--public and --public-key were both given; public counts have no record")
    check_reads("COUNTS", counts)
    content = counts.read_bytes()  # once: what is verified is what pieces are made of
    found = read_counts(counts, content)
    if public_key is not None:
        signed = require_signed(counts, public_key, content)
        found = dataclasses.replace(found, provenance=signed)
    if public is not None:
        said = Provenance.public(public, f"the counts {counts.name}", content_digest(content))
        found = dataclasses.replace(found, provenance=said)
    inventory = build_inventory(found, size, max_piece_length=max_length)
    inventory.save(output)
    per_word = inventory.pieces_per_word(found)
    print(f"{inventory.size:,} pieces in {output}, {per_word:.2f} per word")
    print(inventory.provenance.statement())
