"""The record of what is guaranteed travels, is inherited, and tells when it was changed."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm.errors import FormatError, PrivacyError
from dlm.federated.account.records import compose_records, inherited, merged_record
from dlm.record.counts_file import WordCounts, counts_text, ranked, read_counts, write_counts
from dlm.record.lookup import FileSnapshot, record_of_file
from dlm.record.provenance import (
    Guarantee,
    Provenance,
    UnverifiedInput,
    content_digest,
)
from dlm.record.sidecar import sidecar

GOOD = Provenance(
    Guarantee(3.46, 1e-10, 0.154),
    stages=({"stage": "network", "mechanism": "blt"},),
    ledgers=("a" * 64,),
    config="b" * 64,
)
RAW = Provenance.none("unigrams: users' data were used without noise")


@pytest.mark.parametrize("record", [GOOD, RAW, GOOD.derive("arpa"), RAW.derive("wordpieces 4000")])
def test_a_record_comes_back_from_one_line(record: Provenance) -> None:
    """As it stands in the header of an ARPA file or in a manifest."""
    assert "\n" not in record.line
    assert Provenance.from_json(record.line) == record
    assert Provenance.from_json(record.to_json().encode()) == record
    assert Provenance.from_dict(json.loads(record.to_json())) == record


def test_what_is_derived_inherits_all_and_says_how_it_came_about() -> None:
    """A guarantee, or that there is none."""
    twice = RAW.derive("wordpieces 4000").derive("arpa")
    assert (twice.guarantee, twice.reasons) == (None, RAW.reasons)
    assert twice.derived == ("wordpieces 4000", "arpa")
    assert GOOD.derive("arpa").guarantee == GOOD.guarantee
    assert GOOD.derive("arpa").digest != GOOD.digest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guarantee", {"epsilon": 0.1, "delta": 1e-10, "rho": 0.154}),
        ("guarantee", "none"),
        ("ledgers", []),
        ("stages", []),
        ("unit", "word"),
    ],
)
def test_an_edited_record_is_refused(field: str, value: Any) -> None:
    """Whatever was changed."""
    body = GOOD.to_dict()
    body[field] = value
    with pytest.raises(PrivacyError, match="changed after it was written"):
        Provenance.from_dict(body)


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"format": "other"}', b"\xff"])
def test_what_is_no_record_is_a_format_error(text: str | bytes) -> None:
    """Whatever else it may be."""
    with pytest.raises(FormatError, match=r"not a (dlm )?privacy"):
        Provenance.from_json(text)


@pytest.mark.parametrize("said", ["privacy: none (public text)", "privacy: ", "privacy: x {}"])
def test_free_text_that_begins_like_a_record_claims_nothing(tmp_path: Path, said: str) -> None:
    """A model with such a line in its header can be mixed with others and asked for its record."""
    arpa = tmp_path / "model.arpa"
    arpa.write_text(f"# {said}\n\\data\\\nngram 1=0\n\n\\1-grams:\n\n\\end\\\n")
    with pytest.raises(FormatError, match="has no privacy record"):
        record_of_file(FileSnapshot.read(arpa))
    assert merged_record({"a model": [said]}, ["a text"], "") == []


def test_a_record_has_a_guarantee_or_reasons_and_no_infinite_one() -> None:
    """An infinite epsilon is none."""
    for guarantee, reasons in ((None, ()), (Guarantee(1.0, 1e-6, None), ("why",))):
        with pytest.raises(PrivacyError, match="both or neither"):
            Provenance(guarantee, reasons)
    for numbers in (
        (math.inf, 1e-6, None),
        (1.0, 1.0, None),
        (1.0, 1e-6, math.nan),
        (-1.0, 0.0, 0.0),
    ):
        with pytest.raises(PrivacyError, match="not a valid guarantee"):
            Guarantee(*numbers)


def test_one_thing_without_a_guarantee_or_a_record_leaves_the_whole_without() -> None:
    """And what it is made from is told by name."""
    found = inherited({"the counts": GOOD, "the topology": None, "the list": RAW})
    assert found.reasons == (
        "nothing says whose text the topology is: it has no record",
        *RAW.reasons,
    )
    assert found.stages == GOOD.stages
    whole = compose_records({"the counts": GOOD, "the topology": None}, delta=1e-6)
    assert whole.provenance.guarantee is None
    assert whole.numbers is None


@pytest.mark.parametrize(
    ("comments", "reason"),
    [
        ({"one": [GOOD.line], "other": []}, "nothing says whose text other is"),
        ({"one": [GOOD.line, RAW.line]}, "without noise"),
        ({"one": [RAW.line, GOOD.line]}, "without noise"),
    ],
)
def test_a_model_made_of_several_has_the_worst_of_their_records(
    comments: dict[str, list[str]], reason: str
) -> None:
    """Also where one of them has two: nobody knows which of them is true."""
    (line,) = merged_record(comments, [], "")
    record = Provenance.from_json(line)
    assert record.guarantee is None and reason in record.reasons[0]


def test_what_is_public_is_so_by_somebodys_word_and_stays_named() -> None:
    """Nobody's word is none."""
    with pytest.raises(PrivacyError, match="give the name of the person"):
        Provenance.public(" ", "the list")
    said = Provenance.public("ACME", "the list", "d" * 64)
    assert said.is_public
    assert f"The list (public, says ACME, SHA-256 {'d' * 64})." in said.statement()
    whole = compose_records({"the list": said, "the text": said.derive("cut")}, delta=1e-6)
    assert whole.provenance.is_public
    assert whole.provenance.public_inputs == said.public_inputs
    nothing = compose_records({}, delta=1e-6).provenance
    assert nothing.guarantee is None


def test_a_record_of_another_version_is_refused_by_name() -> None:
    """Earlier or later, and a file of another format."""
    for change in ({"version": 1}, {"version": 3}, {"format": "dlm privacy report"}):
        with pytest.raises(FormatError, match=r"dlm privacy provenance( of version|: its format)"):
            Provenance.from_dict({**GOOD.to_dict(), **change})


def test_what_was_read_is_unverified_and_so_is_what_is_made_from_it() -> None:
    """It says so; what this process did itself is not."""
    read = Provenance.from_json(GOOD.to_json())
    assert read == GOOD
    assert "Unverified" not in GOOD.statement()
    assert "Unverified: this record was not verified with a trusted key." in read.statement()
    assert pickle.loads(pickle.dumps(read)).standing == read.standing == "unverified"
    made = "Unverified: the record of what pieces is made of was not verified with a trusted key."
    assert made in read.derive("pieces").statement()
    assert made in read.derive("pieces").verified("0123").statement()
    counts, words = (UnverifiedInput(f"the {name}", GOOD.digest) for name in ("counts", "list"))
    assert inherited({"the counts": read}).unverified == (counts,)
    assert inherited({"the counts": GOOD}).unverified == ()
    later = dataclasses.replace(GOOD, unverified=(counts, words))
    assert "the record of the counts and the list was not verified" in later.statement()
    assert inherited({"the network": later}).unverified == (counts, words)
    signed = later.verified("0123", [GOOD.digest])
    assert signed.statement().endswith("the key 0123 together with the counts and the list.")
    assert signed.digest == later.digest
    assert inherited({"the network": signed}).unverified == signed.derive("x").unverified == ()


def counts(provenance: Provenance = GOOD) -> WordCounts:
    """Three words."""
    return WordCounts(("the", "café", "o'clock"), np.array([10.5, 3.0, 1e-7]), provenance)


def bound(counts: WordCounts) -> Provenance:
    """Their record, which names their digest."""
    return counts.provenance.about(counts_sha256=content_digest(counts_text(counts)))


def test_counts_come_back_with_their_record(tmp_path: Path) -> None:
    """To nine digits."""
    write_counts(tmp_path / "c.tsv", counts())
    found = read_counts(tmp_path / "c.tsv")
    assert found.words == counts().words
    np.testing.assert_allclose(found.counts, counts().counts, rtol=1e-8)
    assert found.provenance == bound(counts())
    assert found.probabilities().sum() == pytest.approx(1.0)


def test_counts_that_cannot_be_written_leave_those_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full, before the counts or before their record."""
    path = tmp_path / "c.tsv"
    write_counts(path, counts())
    for good in (0, 1):
        syncs = iter([None] * good)

        def fsync(handle: int, syncs: Any = syncs) -> None:
            for _ in syncs:
                return
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("dlm.files.os.fsync", fsync)
        with pytest.raises(OSError, match="No space"):
            write_counts(path, WordCounts(("other",), np.array([1.0]), RAW))
        assert read_counts(path).words == counts().words
        assert read_counts(path).provenance == bound(counts())
        assert sorted(tmp_path.iterdir()) == [path, sidecar(path)]


def test_counts_that_were_changed_or_whose_record_is_of_others_are_refused(tmp_path: Path) -> None:
    """Without any record they are read, and promise nothing."""
    path = tmp_path / "c.tsv"
    write_counts(path, counts())
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("10.5", "11.5"), encoding="utf-8")
    with pytest.raises(PrivacyError, match="is the record of another file"):
        read_counts(path)
    path.write_text(text, encoding="utf-8")
    side = sidecar(path)
    side.write_text(side.read_text().replace("3.46", "0.46"))
    with pytest.raises(PrivacyError, match="changed after"):
        read_counts(path)
    side.write_text("{}")
    with pytest.raises(FormatError, match="not a record of counts"):
        read_counts(path)
    side.unlink()
    assert read_counts(path).provenance.reasons == ("no provenance record stood beside the counts",)


def test_a_record_is_of_one_file_and_no_other(tmp_path: Path) -> None:
    """Given to other counts, or put beside them with the outer digest made to fit."""
    path, other = tmp_path / "c.tsv", tmp_path / "other.tsv"
    write_counts(path, counts())
    record = read_counts(path).provenance
    with pytest.raises(PrivacyError, match="cannot be written with this record"):
        write_counts(other, WordCounts(("the",), np.array([9.0]), record))
    assert not other.exists()
    write_counts(other, WordCounts(("the",), np.array([9.0]), RAW))
    beside = json.loads(sidecar(other).read_text())
    sidecar(other).write_text(json.dumps({**beside, "provenance": record.to_dict()}))
    with pytest.raises(PrivacyError, match="is the record of another file"):
        read_counts(other)


def test_what_is_wrong_with_counts_is_told_with_its_place(tmp_path: Path) -> None:
    """The line, and what it holds; but no more of a long one than tells which it is."""
    path = tmp_path / "c.tsv"
    for text, message in (
        ("the\t2\nof\t-1\n", "line 2: .*'of\\\\t-1\\\\n'.* a word, a tab and "),
        ("the\t2\nof\t1\nthe\t1\n", "line 3: 'the' occurs twice, first in line 1"),
        ("", "is empty"),
    ):
        path.write_text(text)
        with pytest.raises(FormatError, match=message):
            read_counts(path)
    path.write_text("long" * 100_000 + "\n")
    with pytest.raises(FormatError) as found:
        read_counts(path)
    assert len(str(found.value)) < 300 + len(str(path))


def test_a_byte_order_mark_is_no_part_of_the_first_counted_word(tmp_path: Path) -> None:
    """Nor does it hide a word that comes twice."""
    path = tmp_path / "c.tsv"
    path.write_text("\ufeffthe\t2\nof\t1\n", encoding="utf-8")
    assert read_counts(path).words == ("the", "of")


@pytest.mark.parametrize(
    "text",
    ["", "the\n", "the\tmany\n", "the\t0\n", "the\tinf\n", "a b\t1\n", "a\t1\na\t2\n", "\t1\n"],
)
def test_a_bad_counts_file_is_refused(tmp_path: Path, text: str) -> None:
    """With the line where there is one."""
    (tmp_path / "c.tsv").write_text(text)
    with pytest.raises(FormatError):
        read_counts(tmp_path / "c.tsv")


def test_words_are_ranked_by_count_and_those_not_seen_left_out(tmp_path: Path) -> None:
    """Ties in the order of the list; what noise made negative is not seen."""
    found = ranked(["a", "b", "c", "d"], np.array([1.0, -2.0, 3.0, 1.0]), 0.0)
    assert found.words == ("c", "a", "d")
    assert ranked(["a", "b"], np.array([1.0, 3.0]), 2.0).words == ("b",)
    with pytest.raises(FormatError, match="white space"):
        write_counts(tmp_path / "c.tsv", WordCounts(("a b",), np.array([1.0]), RAW))
