"""A signature finds what a digest does not: an edit by somebody who computes the digest anew."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="pip install -e '.[train]'")

from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.federated import checkpoint
from dlm.federated.counts_file import WordCounts, read_counts, write_counts
from dlm.federated.provenance import Guarantee, Provenance, digest_of
from dlm.federated.recorded import sidecar
from dlm.federated.signature import (
    Verdict,
    look_at,
    read_any_record,
    read_private_key,
    read_public_key,
    require_signed,
    sign,
    signature_of,
)

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
STAGE = {"stage": "unigrams", "mechanism": "gaussian", "noise_multiplier": 2.0, "rounds": 1}
GOOD = Provenance(Guarantee(2.12, 1e-6, 0.125), stages=(STAGE,), ledgers=("a" * 64,))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two pairs, as the page says to make them."""
    folder = tmp_path_factory.mktemp("keys")
    made = {}
    for name in ("mine", "theirs"):
        key, public = folder / f"{name}.pem", folder / f"{name}.pub"
        for command in (
            ["genpkey", "-algorithm", "ed25519", "-out", str(key)],
            ["pkey", "-in", str(key), "-pubout", "-out", str(public)],
        ):
            subprocess.run(["openssl", *command], check=True, capture_output=True)
        made[name], made[f"{name}.pub"] = key, public
    return made


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    """Counts with their record."""
    path = tmp_path / "counts.tsv"
    write_counts(path, WordCounts(("the", "of"), np.array([9.0, 4.0]), GOOD))
    return path


def verdict(path: Path, keys: dict[str, Path], trusted: str | None = "mine.pub") -> Verdict:
    """With this key."""
    return look_at(path, None if trusted is None else read_public_key(keys[trusted]))


def signed(path: Path, keys: dict[str, Path]) -> Path:
    """The same file, signed."""
    sign(path, read_private_key(keys["mine"]), at=NOW)
    return path


def forged(path: Path, epsilon: float) -> None:
    """The record beside a file, edited by somebody who computes its digest anew."""
    side = json.loads(sidecar(path).read_text())
    body = {k: v for k, v in side["provenance"].items() if k != "digest"}
    body["guarantee"] = {**body["guarantee"], "epsilon": epsilon}
    side["provenance"] = {**body, "digest": digest_of(body)}
    sidecar(path).write_text(json.dumps(side))


def test_what_the_trusted_key_signed_is_verified_and_all_else_unverified(
    counts: Path, keys: dict[str, Path]
) -> None:
    """Not signed, signed by another key, no key to trust."""
    assert verdict(counts, keys).standing == "unverified"
    assert "is not signed" in verdict(counts, keys).text
    signed(counts, keys)
    good = verdict(counts, keys)
    assert good.standing == "verified"
    assert good.record is not None
    assert "Verified: signed by the key" in good.record.statement()
    assert "Unverified" not in good.record.statement()
    assert "2026-11-22T12:00:00Z" in good.text
    assert "not by the trusted one" in verdict(counts, keys, "theirs.pub").text
    assert "no key was given" in verdict(counts, keys, None).text
    for trusted in ("theirs.pub", None):
        found = verdict(counts, keys, trusted)
        assert found.standing == "unverified"
        assert found.record == read_counts(counts).provenance
        assert "Unverified" in found.record.statement()
    assert require_signed(counts, keys["mine.pub"]) == good.record
    with pytest.raises(PrivacyError, match=r"unverified: .* not by the trusted one"):
        require_signed(counts, keys["theirs.pub"])


def test_an_edit_that_a_digest_does_not_find_is_found(counts: Path, keys: dict[str, Path]) -> None:
    """In the record, with its digest computed anew; in the signature."""
    forged(counts, 0.01)
    found = verdict(counts, keys)  # no digest tells
    assert found.standing == "unverified"
    assert found.record is not None
    assert found.record.guarantee == Guarantee(0.01, 1e-6, 0.125)
    forged(counts, 2.12)
    signed(counts, keys)
    forged(counts, 0.01)
    assert verdict(counts, keys).standing == "wrong"
    assert "another record" in verdict(counts, keys).text
    forged(counts, 2.12)
    place = signature_of(counts)
    text = place.read_text()
    for old, new in (("12:00:00Z", "13:00:00Z"), ('"version": 1', '"version": 2')):
        place.write_text(text.replace(old, new))
        assert verdict(counts, keys).standing == "wrong"
    for broken in ("{}", "[]", "no JSON", text.replace('"content"', '"contents"')):
        place.write_text(broken)
        assert verdict(counts, keys).standing == "wrong"
    place.write_text(text)
    assert verdict(counts, keys).standing == "verified"


def test_a_signature_is_of_one_file(counts: Path, keys: dict[str, Path], tmp_path: Path) -> None:
    """Beside another one, or beside this one as it was later, it is wrong."""
    signed(counts, keys)
    other = tmp_path / "other.tsv"
    write_counts(other, WordCounts(("the",), np.array([1.0]), GOOD))
    signature_of(other).write_bytes(signature_of(counts).read_bytes())
    assert verdict(other, keys).standing == "wrong"
    assert "another file" in verdict(other, keys).text
    counts.write_text(counts.read_text().replace("9", "8"))
    assert verdict(counts, keys).standing == "wrong"


def test_records_are_found_wherever_they_travel(tmp_path: Path, keys: dict[str, Path]) -> None:
    """In a checkpoint, in the header of an ARPA file, in the manifest of its shard set."""
    arrays = [np.arange(3.0)]
    record = GOOD.about(**{checkpoint.STATE_DIGEST: checkpoint.digest(arrays)})
    saved = tmp_path / "checkpoint.dlmfed"
    checkpoint.save(saved, arrays, {}, facts={"record": record.to_dict()})
    arpa, manifest = tmp_path / "model.arpa", tmp_path / "manifest.json"
    arpa.write_text(f"# made by dlm\n# {GOOD.line}\n\n\\data\\\nngram 1=1\n")
    manifest.write_text(json.dumps({"provenance": {"comments": ["made by dlm", GOOD.line]}}))
    for place, expected in ((saved, record), (arpa, GOOD), (manifest, GOOD)):
        assert read_any_record(place) == expected
        assert verdict(signed(place, keys), keys).standing == "verified"
        place.write_bytes(place.read_bytes() + b" ")
        with pytest.raises(PrivacyError, match="wrong"):
            require_signed(place, keys["mine.pub"])
    arpa.write_text("\\data\\\nngram 1=1\n")
    manifest.write_text(json.dumps({"provenance": {"comments": []}}))
    for place in (arpa, manifest):
        signature_of(place).unlink()
        with pytest.raises(FormatError, match="no privacy record"):
            read_any_record(place)


def test_what_is_no_key_is_told_with_how_to_make_one(tmp_path: Path, keys: dict[str, Path]) -> None:
    """A missing file, text, a key of another kind."""
    (tmp_path / "text").write_text("no key")
    rsa = tmp_path / "rsa.pem"
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "X25519", "-out", str(rsa)],
        check=True,
        capture_output=True,
    )
    for path in (tmp_path / "nothing", tmp_path / "text", rsa, keys["mine.pub"]):
        with pytest.raises(ConfigError, match="openssl genpkey -algorithm ed25519"):
            read_private_key(path)
    for path in (tmp_path / "nothing", tmp_path / "text", keys["mine"]):
        with pytest.raises(ConfigError, match="openssl pkey -in key"):
            read_public_key(path)
