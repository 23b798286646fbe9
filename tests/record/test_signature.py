"""A signature finds what a digest does not: an edit by somebody who computes the digest anew."""

from __future__ import annotations

import gzip
import json
import lzma
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("cryptography", reason="pip install -e '.[train]'")

from dlm import checkpoint
from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.ngram.arpa.header import MAX_HEADER_BYTES
from dlm.record.counts_file import WordCounts, read_counts, write_counts
from dlm.record.lookup import STATE_DIGEST, FileSnapshot, record_of_file
from dlm.record.provenance import Guarantee, Provenance, content_digest, digest_of
from dlm.record.sidecar import sidecar
from dlm.record.signature import (
    Claim,
    Verdict,
    look_at,
    read_private_key,
    read_public_key,
    require_signed,
    sign,
    signature_of,
)

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
STAGE = {"stage": "unigrams", "mechanism": "gaussian", "noise_multiplier": 2.0, "rounds": 1}
GOOD = Provenance(Guarantee(2.12, 1e-6, 0.125), stages=(STAGE,), ledgers=("a" * 64,))
SET = {"format": "dlm shard set", "files": [{"name": "shard-0000.arrow"}]}


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
    sign(Claim.of(path), read_private_key(keys["mine"]), at=NOW)
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
    assert "no trusted key was given" in verdict(counts, keys, None).text
    for trusted in ("theirs.pub", None):
        found = verdict(counts, keys, trusted)
        assert found.standing == "unverified"
        assert found.record == read_counts(counts).provenance
        # It is signed, by a key that nobody trusts.
        assert "Unverified: this record was not verified with a" in found.record.statement()
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
    assert "a different record" in verdict(counts, keys).text
    forged(counts, 2.12)
    place = signature_of(counts)
    text = place.read_text()
    for old, new in (("12:00:00Z", "13:00:00Z"), ('"version": 2', '"version": 1')):
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
    record = GOOD.about(**{STATE_DIGEST: checkpoint.digest(arrays)})
    saved = tmp_path / "checkpoint.dlmfed"
    checkpoint.save(saved, arrays, {}, facts={"record": record.to_dict()})
    arpa, manifest = tmp_path / "model.arpa", tmp_path / "manifest.json"
    (tmp_path / "shard-0000.arrow").write_bytes(b"rows")
    arpa.write_text(f"# made by dlm\n# {GOOD.line}\n\n\\data\\\nngram 1=1\n")
    manifest.write_text(json.dumps({**SET, "provenance": {"comments": ["made by dlm", GOOD.line]}}))
    for place, expected in ((saved, record), (arpa, GOOD), (manifest, GOOD)):
        assert record_of_file(FileSnapshot.read(place)) == expected
        assert verdict(signed(place, keys), keys).standing == "verified"
        place.write_bytes(place.read_bytes() + b" ")
        with pytest.raises(PrivacyError, match="wrong"):
            require_signed(place, keys["mine.pub"])
    arpa.write_text("\\data\\\nngram 1=1\n")
    manifest.write_text(json.dumps({**SET, "provenance": {"comments": []}}))
    for place in (arpa, manifest):
        signature_of(place).unlink()
        with pytest.raises(FormatError, match="no privacy record"):
            record_of_file(FileSnapshot.read(place))


def test_a_second_record_is_wrong_and_both_are_named(tmp_path: Path, keys: dict[str, Path]) -> None:
    """Two lines of an ARPA file, two comments of a manifest, one beside and another inside."""
    arpa, manifest = tmp_path / "model.arpa", tmp_path / "manifest.json"
    worse = Provenance.none("counted without noise")
    arpa.write_text(f"# {GOOD.line}\n# made by dlm\n# {worse.line}\n\\data\\\nngram 1=1\n")
    manifest.write_text(
        json.dumps({**SET, "provenance": {"comments": [GOOD.line, "made by dlm", GOOD.line]}})
    )
    for place, said in ((arpa, "line 1 and line 3"), (manifest, "comment 1 and comment 3")):
        found = verdict(place, keys)
        assert found.standing == "wrong"
        assert f"has 2 privacy records, in {said}" in found.text
        with pytest.raises(PrivacyError, match="has 2 privacy records"):
            signed(place, keys)
        assert not signature_of(place).exists()
    arpa.write_text(f"# {worse.line}\n\\data\\\nngram 1=1\n")
    beside(arpa, GOOD)
    found = verdict(arpa, keys)
    assert found.standing == "wrong"
    assert "line 1 says NO GUARANTEE: counted without noise. model.arpa.prov" in found.text
    assert "beside it says (epsilon = 2.12" in found.text
    beside(arpa, worse, bind=False)
    with pytest.raises(PrivacyError, match="is the record of another file"):
        record_of_file(FileSnapshot.read(arpa))


def beside(path: Path, record: Provenance, *, bind: bool = True) -> None:
    """Puts a record beside a file, as whoever computes digests anew can."""
    digest = content_digest(path.read_bytes())
    body = record.about(file_sha256=digest) if bind else record
    sidecar(path).write_text(json.dumps({"file_sha256": digest, "provenance": body.to_dict()}))


def test_a_record_beside_a_checkpoint_does_not_hide_the_one_in_it(
    tmp_path: Path, keys: dict[str, Path]
) -> None:
    """Nor that there is none in it."""
    arrays = [np.arange(3.0)]
    for facts in ({"record": Provenance.none("no noise").to_dict()}, {}):
        place = tmp_path / "checkpoint.dlmfed"
        checkpoint.save(place, arrays, {}, facts=facts)
        beside(place, GOOD)
        found = verdict(place, keys)
        assert found.standing == "wrong"
        assert (
            "two privacy records that do not agree: the checkpoint says NO GUARANTEE" in found.text
        )


def test_a_record_stands_in_a_comment_of_an_arpa_file_alone(tmp_path: Path) -> None:
    """As the reader of ARPA files takes comments: one `#`, one space, before the counts."""
    arpa = tmp_path / "model.arpa"
    tail = "\\data\\\nngram 1=1\n"
    for line in (f"# {GOOD.line}", f"#{GOOD.line}", f"# {GOOD.line} \r"):
        arpa.write_text(f"\n{line}\n{tail}", newline="")
        assert record_of_file(FileSnapshot.read(arpa)) == GOOD
    for text in (
        f"{GOOD.line}\n{tail}",
        f" # {GOOD.line}\n{tail}",
        f"## {GOOD.line}\n{tail}",
        f"#  {GOOD.line}\n{tail}",
        f"{tail}# {GOOD.line}\n",
        f"# {GOOD.line}\nno ARPA\n{tail}",
        f"# {GOOD.line}\n",
    ):
        arpa.write_text(text)
        with pytest.raises(FormatError, match="no privacy record"):
            record_of_file(FileSnapshot.read(arpa))
    arpa.write_text(("#" * 99 + "\n") * (MAX_HEADER_BYTES // 100 + 1) + f"# {GOOD.line}\n{tail}")
    with pytest.raises(FormatError, match="are longer than 16777216 bytes"):
        record_of_file(FileSnapshot.read(arpa))


@pytest.mark.parametrize(
    "name",
    [
        "model.arpa.gz",
        "model.arpa.zst",
        pytest.param("model.arpa.xz", marks=pytest.mark.slow),
        "model",
    ],
)
def test_a_record_is_found_in_a_compressed_arpa_file(name: str, tmp_path: Path) -> None:
    """By its content, whatever its name says."""
    rows = "".join(f"-1\tword{n}\n" for n in range(300_000))
    text = f"# {GOOD.line}\n\n\\data\\\nngram 1=300000\n\n\\1-grams:\n{rows}".encode()
    packed = {".gz": gzip.compress, ".xz": lzma.compress, "": bytes}.get(
        Path(name).suffix, lambda raw: pa.Codec("zstd").compress(raw, asbytes=True)
    )(text)
    for place in (tmp_path / name, tmp_path / "other.arpa"):
        place.write_bytes(packed)
        assert record_of_file(FileSnapshot.read(place)) == GOOD


def test_a_key_that_comes_twice_in_a_file_of_json_is_refused(tmp_path: Path) -> None:
    """Readers differ in which of them they take."""
    place = tmp_path / "manifest.json"
    text = json.dumps({**SET, "provenance": {"comments": [GOOD.line]}})
    place.write_text('{"provenance": {"comments": []}, ' + text[1:])
    with pytest.raises(FormatError, match="duplicate key 'provenance'"):
        record_of_file(FileSnapshot.read(place))


def test_a_signature_of_a_manifest_is_of_each_file_of_its_set(
    tmp_path: Path, keys: dict[str, Path]
) -> None:
    """One that differs, or is not there, is named; the manifest is as it was."""
    names = ["vocabulary.arrow", "shard-0000.arrow", "shard-0001.arrow"]
    manifest = tmp_path / "manifest.json"
    body = {**SET, "files": [{"name": name} for name in names]}
    manifest.write_text(json.dumps({**body, "provenance": {"comments": [GOOD.line]}}))
    with pytest.raises(FormatError, match=r"lists vocabulary\.arrow, .*which cannot be read"):
        signed(manifest, keys)
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    signed(manifest, keys)
    assert verdict(manifest, keys).standing == "verified"
    (tmp_path / names[1]).write_bytes(b"others")
    for trusted in ("mine.pub", "theirs.pub", None):
        found = verdict(manifest, keys, trusted)
        assert found.standing == "wrong"
        assert found.text.startswith(f"shard-0000.arrow in {tmp_path}: not the file that")
    (tmp_path / names[2]).unlink()
    assert verdict(manifest, keys).text.startswith("shard-0000.arrow, shard-0001.arrow in ")
    for name in ("../outside.arrow", "/etc/hostname", ".."):
        manifest.write_text(
            json.dumps({**body, "files": [{"name": name}], "provenance": {"comments": [GOOD.line]}})
        )
        with pytest.raises(FormatError, match="in the same folder"):
            Claim.of(manifest)


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
