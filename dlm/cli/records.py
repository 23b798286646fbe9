"""`dlm privacy sign` and `verify`: sign privacy records, and check them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dlm.cli.options import Json, PublicKey
from dlm.cli.output import print_answer, print_json

UNVERIFIED_STATUS = 3

_FILE = "Counts, wordpieces, a report or an ARPA file; or the folder of a run or shard set"
File = Annotated[Path, typer.Argument(metavar="FILE", help=f"{_FILE}.")]
Files = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help=f"{_FILE}, or of a finished pipeline.")
]


def sign(
    files: Files,
    key: Annotated[
        Path,
        typer.Option(metavar="FILE", help="PEM file of an Ed25519 key, without a passphrase."),
    ],
    as_json: Json = False,
) -> None:
    """Sign files together with their privacy records.

    For a shard set, the manifest and each of its files are signed; for a pipeline, the file of each
    stage. First prints what is signed: the SHA-256 of each file, and the statement of its record.
    The signature is written beside the file (.signature.json). To create a key, run `openssl
    genpkey -algorithm ed25519 -out key.pem`; to extract its public half, run `openssl pkey -in
    key.pem -pubout -out key.pub`.

    A record names the inputs whose own records were not verified. If you sign those files in the
    same call, the signature says that you saw them, and `verify` no longer calls them unverified.

    Examples:
        dlm privacy sign runs/first --key key.pem
        dlm privacy sign runs/pipeline --key key.pem
    """
    from datetime import UTC, datetime

    from dlm.federated.run.run_files import PIPELINE_JOURNAL
    from dlm.pipeline.journal import recorded_files
    from dlm.record.signature import claims_of, read_private_key, sign as sign_claim

    signer, paths = read_private_key(key), []
    for file in files:
        if (file / PIPELINE_JOURNAL).exists():
            paths += recorded_files(file)
        else:
            paths.append(file)
    signed = []
    for claim in claims_of(map(_meant, paths)):
        if not as_json:
            for line in claim.lines():
                print(line, flush=True)
        signature = sign_claim(claim, signer, at=datetime.now(UTC))
        if not as_json:
            print(f"signed: {signature}")
        signed.append(
            {
                "file": str(claim.path),
                "sha256": claim.sha256,
                "files": dict(claim.files),
                "record_sha256": claim.record.digest,
                "inputs": {record: str(one.path) for record, one in claim.inputs.items()},
                "privacy": claim.record.statement(),
                "signature": str(signature),
            }
        )
    if as_json:
        print_json({"signed": signed})


def verify(
    file: File,
    public_key: PublicKey = None,
    as_json: Json = False,
) -> None:
    """Check the signature of a file and its privacy record.

    Prints verified, unverified or wrong, the reason, and the statement of the record; then whether
    its epsilon follows from its noise, by accounting for the noise again.

    Exits with 0 if the trusted key signed the file. Exits with 3 if the file is unverified: not
    signed, or not by a trusted key. Exits with 1 if it is wrong: the file, its record or its
    signature was changed, there is no record, or its epsilon does not follow.

    Examples:
        dlm privacy verify runs/first --public-key key.pub
        dlm privacy verify shards/model --public-key key.pub --json
    """
    from dlm.federated.account.recheck import recheck
    from dlm.record.signature import look_at, read_public_key

    trusted = None if public_key is None else read_public_key(public_key)
    found = look_at(_meant(file), trusted)
    lines = [f"{found.standing}: {found.text}"]
    facts: dict[str, Any] = {
        "standing": found.standing,
        "reason": found.text,
        "privacy": None,
        "epsilon_follows": None,
        "epsilon_check": None,
    }
    follows = None
    if found.record is not None:
        checked = recheck(found.record)
        follows = checked.follows
        facts["privacy"] = found.record.statement()
        facts |= {"epsilon_follows": follows, "epsilon_check": checked.text}
        lines += [
            found.record.statement(with_standing=found.standing != "unverified"),
            f"wrong: {checked.text}" if follows is False else f"record: {checked.text}",
        ]
    print_answer(facts, lines, as_json=as_json)
    if found.standing == "wrong" or follows is False:
        raise typer.Exit(1)
    if found.standing == "unverified":
        raise typer.Exit(UNVERIFIED_STATUS)


def _meant(file: Path) -> Path:
    """The file that a path stands for: for a folder, its checkpoint, manifest or model."""
    from dlm.checkpoint import CHECKPOINT
    from dlm.cli.checks import check_reads
    from dlm.federated.run.run_files import refuse_secrets_left

    refuse_secrets_left(file if file.is_dir() else file.parent)
    if file.is_dir():
        for name in (CHECKPOINT, "manifest.json", "model.arpa.zst"):
            if (file / name).exists():
                return file / name
    check_reads("FILE", file)
    return file
