"""`dlm privacy sign` and `verify`: whether a record is the one that was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dlm.federated.provenance import Provenance

UNVERIFIED_STATUS = 3

File = Annotated[
    Path, typer.Argument(help="Counts, wordpieces, a report, an ARPA file; or a run's folder.")
]
PublicKey = Annotated[
    Path | None,
    typer.Option("--public-key", help="The Ed25519 key that must have signed, PEM."),
]


def sign(
    file: File,
    key: Annotated[Path, typer.Option(help="Ed25519 key, PEM, without a passphrase.")],
) -> None:
    """Sign a file with its privacy record, and with a shard set's manifest each of its files.

    What is signed is printed first: the SHA-256 of the file, and what its record says.
    The signature is written beside it (.signature.json). A key is made by
    openssl genpkey -algorithm ed25519 -out key.pem, and what others verify with is given by
    openssl pkey -in key.pem -pubout -out key.pub

    Example: dlm privacy sign runs/first --key key.pem
    """
    from datetime import UTC, datetime

    from dlm.federated.signature import Claim, read_private_key
    from dlm.federated.signature import sign as sign_claim

    signer, claim = read_private_key(key), Claim.of(_meant(file))
    for line in claim.lines():
        print(line, flush=True)
    print(f"signed: {sign_claim(claim, signer, at=datetime.now(UTC))}")


def verify(
    file: File,
    public_key: PublicKey = None,
) -> None:
    """Tell whether a file and its privacy record are those that were signed.

    Prints verified, unverified or wrong, why, and what the record says; then whether the epsilon it
    states follows from the noise it states, which is accounted for again. Exit status 0: signed by
    the trusted key. 3: unverified, for it is not signed, or by no key that is trusted. 1: wrong;
    the file, its record or its signature was changed, there is no record, or its epsilon does not
    follow.

    Example: dlm privacy verify runs/first --public-key key.pub
    """
    from dlm.federated.signature import look_at, read_public_key

    trusted = None if public_key is None else read_public_key(public_key)
    found = look_at(_meant(file), trusted)
    print(f"{found.standing}: {found.text}")
    if found.record is not None:
        print(found.record.statement())
        _refuse_other_numbers(found.record)
    if found.standing == "wrong":
        raise typer.Exit(1)
    if found.standing == "unverified":
        raise typer.Exit(UNVERIFIED_STATUS)


def _refuse_other_numbers(record: Provenance) -> None:
    """Prints what accounting for a record's stages gives; exit status 1 where it differs."""
    from dlm.federated.account.recheck import recheck

    found = recheck(record)
    print(f"wrong: {found.text}" if found.follows is False else f"record: {found.text}")
    if found.follows is False:
        raise typer.Exit(1)


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
