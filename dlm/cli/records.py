"""`dlm privacy sign` and `verify`: whether a record is the one that was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

UNVERIFIED_STATUS = 3
DELTA_OF_NOTHING = 1e-6  # where no record has a guarantee, and delta says nothing

File = Annotated[
    Path, typer.Argument(help="Counts, wordpieces, a report, an ARPA file; or a run's folder.")
]


def sign(
    file: File,
    key: Annotated[Path, typer.Option(help="Ed25519 key, PEM, without a passphrase.")],
) -> None:
    """Sign a file with its privacy record.

    The signature is written beside it (.signature.json). A key is made by
    openssl genpkey -algorithm ed25519 -out key.pem, and what others verify with is given by
    openssl pkey -in key.pem -pubout -out key.pub

    Example: dlm privacy sign runs/first --key key.pem
    """
    from datetime import UTC, datetime

    from dlm.federated.signature import read_private_key
    from dlm.federated.signature import sign as sign_file

    place = _meant(file)
    print(f"signed: {sign_file(place, read_private_key(key), at=datetime.now(UTC))}")


def verify(
    file: File,
    public_key: Annotated[
        Path | None, typer.Option("--public-key", help="The Ed25519 key that is trusted, PEM.")
    ] = None,
) -> None:
    """Tell whether a file and its privacy record are those that were signed.

    Prints verified, unverified or wrong, why, and what the record says. Exit status 0: signed by
    the trusted key. 3: unverified, for it is not signed, or by no key that is trusted. 1: wrong;
    the file, its record or its signature was changed, or there is no record.

    Example: dlm privacy verify runs/first --public-key key.pub
    """
    from dlm.federated.signature import look_at, read_public_key

    trusted = None if public_key is None else read_public_key(public_key)
    found = look_at(_meant(file), trusted)
    print(f"{found.standing}: {found.text}")
    if found.record is not None:
        print(found.record.statement())
    if found.standing == "wrong":
        raise typer.Exit(1)
    if found.standing == "unverified":
        raise typer.Exit(UNVERIFIED_STATUS)


def merged_record(
    comments: Mapping[str, Sequence[str]], others: Sequence[str], public: str, step: str = "merge"
) -> list[str]:
    """The privacy line of a model that is made from several; none where none of them has one.

    Args
        comments  of each model, by what it is
        others    what went in besides, without a record
        public    who says that what has no record is of no user's text; "" if nobody does
        step      what makes it of them
    Raises
        FormatError, PrivacyError  a record that cannot be read, or was changed
    """
    from dlm.federated.provenance import LINE_PREFIX, Provenance
    from dlm.federated.report import compose_records

    found: dict[str, Provenance | None] = {}
    for what, lines in comments.items():
        texts = [line for line in lines if line.startswith(LINE_PREFIX)]
        found[what] = Provenance.from_json(texts[0], what) if texts else None
        for more, text in enumerate(texts[1:], 2):  # which of them is true nobody can know
            found[f"{what}, record {more}"] = Provenance.from_json(text, what)
    if not any(found.values()):
        return []
    found |= dict.fromkeys(others)
    inputs = {
        what: Provenance.public(public, what) if record is None and public else record
        for what, record in found.items()
    }
    deltas = [r.guarantee.delta for r in inputs.values() if r is not None and r.guarantee]
    delta = max(deltas, default=0.0) or DELTA_OF_NOTHING
    return [compose_records(inputs, delta=delta, step=step).provenance.line]


def _meant(file: Path) -> Path:
    """A run's checkpoint and a shard set's manifest go by the name of their folder."""
    from dlm.cli.paths import check_reads
    from dlm.federated.run_folder import CHECKPOINT

    if file.is_dir():
        for name in (CHECKPOINT, "manifest.json"):
            if (file / name).exists():
                return file / name
    check_reads("FILE", file)
    return file
