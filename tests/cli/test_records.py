"""`dlm privacy sign` and `verify`, and what `dlm info` says of a record."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("cryptography", reason="pip install -e '.[train]'")

from dlm.cli.main import app
from dlm.errors import FormatError
from dlm.record.counts_file import WordCounts, read_counts, write_counts
from dlm.record.provenance import Guarantee, Provenance, file_digest

STAGE = {"stage": "unigrams", "mechanism": "gaussian", "noise_multiplier": 2.0, "rounds": 1}
EPSILON = 2.4190931768706756  # of any noise with this rho
GOOD = Provenance(Guarantee(EPSILON, 1e-6, 0.125), stages=(STAGE,), ledgers=("a" * 64,))


def privacy(*arguments: object) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(app, ["privacy", *map(str, arguments)])


@pytest.mark.promise("records")
def test_exit_statuses_tell_verified_unverified_and_wrong(tmp_path: Path) -> None:
    """0, 3, 1; and what the record says. Without a record there is nothing to sign."""
    key, public, counts = (tmp_path / name for name in ("key.pem", "key.pub", "counts.tsv"))
    for line in (
        f"openssl genpkey -algorithm ed25519 -out {key}",
        f"openssl pkey -in {key} -pubout -out {public}",
    ):
        subprocess.run(line.split(), check=True, capture_output=True)
    write_counts(counts, WordCounts(("the",), np.array([9.0]), GOOD))
    before = privacy("verify", counts, "--public-key", public)
    assert before.exit_code == 3
    assert before.stdout.startswith(f"unverified: {counts} is not signed")
    assert before.stdout.lower().count("unverified") == 1
    signed = privacy("sign", counts, "--key", key).stdout.splitlines()
    assert signed == [
        f"{counts}: SHA-256 {file_digest(counts)}",
        f"record: SHA-256 {read_counts(counts).provenance.digest}",
        read_counts(counts).provenance.statement(with_standing=False),
        f"signed: {counts}.signature.json",
    ]
    done = privacy("verify", counts, "--public-key", public)
    assert done.exit_code == 0, done.exception
    assert done.stdout.startswith(f"verified: {counts} is signed on ")
    assert "0.125-zCDP for each user who took part. Verified: signed by the key" in done.stdout
    assert privacy("verify", counts).exit_code == 3
    (claim,) = json.loads(privacy("sign", counts, "--key", key, "--json").stdout)["signed"]
    assert claim["sha256"] == file_digest(counts)
    assert claim["record_sha256"] == read_counts(counts).provenance.digest
    told = privacy("verify", counts, "--public-key", public, "--json")
    found = json.loads(told.stdout)
    assert (told.exit_code, found["standing"]) == (0, "verified")
    assert "0.125-zCDP" in found["privacy"] and "Verified" in found["privacy"]
    counts.write_text("the\t8\n")
    after = privacy("verify", counts, "--public-key", public)
    assert after.exit_code == 1
    assert after.stdout.startswith("wrong: ")
    assert "zCDP" not in after.stdout
    (tmp_path / "plain.txt").write_text("the\n")
    assert isinstance(privacy("sign", tmp_path / "plain.txt", "--key", key).exception, FormatError)
