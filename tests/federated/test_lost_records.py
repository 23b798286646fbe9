"""Every way of losing a record that was thought of, and what happens to each.

A row is a test. Run as a program, it prints the table in Markdown:
`PYTHONPATH=tests python -m federated.test_lost_records`.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from dlm import checkpoint
from dlm.errors import DlmError
from dlm.federated.account.records import inherited, merged_record
from dlm.federated.report.report import build
from dlm.federated.run.run_files import METRICS
from dlm.federated.run.run_folder import RunBinding, RunFolder, RunState
from dlm.federated.words import record_of
from dlm.record.counts_file import WordCounts, read_counts, write_counts
from dlm.record.inputs import record_or_word
from dlm.record.ledger import ParticipationLedger
from dlm.record.lookup import record_in
from dlm.record.provenance import Guarantee, Provenance, content_digest, digest_of, file_digest
from dlm.record.sidecar import sidecar

STAGE: dict[str, Any] = {
    "stage": "unigrams", "mechanism": "gaussian", "noise_multiplier": 2.0, "rounds": 1,
    "gap": 1, "max_participations": 1, "extras": {"ledger": "a" * 64},
}  # fmt: skip
GOOD = Provenance(Guarantee(2.12, 1e-6, 0.125), stages=(STAGE,), ledgers=("a" * 64,))
RAW = Provenance.none("unigrams: users' data were used without noise")


class Row(NamedTuple):
    """A way, what happens (the first words of which are the kind), and a trial of it."""

    way: str
    outcome: str
    trial: Callable[[Path], str]


ROWS: list[Row] = []


def row(way: str, outcome: str) -> Callable[[Callable[[Path], str]], Callable[[Path], str]]:
    """A row of the table, from a function that tries the way and tells what happened."""

    def noted(trial: Callable[[Path], str]) -> Callable[[Path], str]:
        ROWS.append(Row(way, outcome, trial))
        return trial

    return noted


def told(record: Provenance | None) -> str:
    """What a record that came out of it says."""
    if record is None or record.guarantee is None:
        return f"no guarantee: {record and record.reasons}"
    return f"kept; unverified: {record.standing}" if record.standing == "unverified" else "kept"


def counts(folder: Path, record: Provenance = GOOD, name: str = "counts.tsv") -> Path:
    """Counts with their record."""
    write_counts(folder / name, WordCounts(("the", "of"), np.array([9.0, 4.0]), record))
    return folder / name


def as_vocabulary(path: Path, by: str = "", record: Provenance | None = None) -> str:
    """A file taken as the vocabulary of a private run."""
    found = record_or_word(
        path, "the vocabulary", record, by=by, setting="data.public", sha256="d" * 64,
        promises=True, simulated=False,
    )  # fmt: skip
    return told(found)


def pieces(*, words: tuple[str, ...] = ("ab", "ba")) -> Any:
    """Wordpieces with a record."""
    pytest.importorskip("sentencepiece", reason="pip install -e '.[train]'")
    from dlm.federated.pieces.inventory import build_inventory

    return build_inventory(WordCounts(words, np.array([3.0, 2.0]), GOOD), 6)


class Lookalike:
    """Has a record, a model and a method `encode`, as wordpieces have them."""

    def __init__(self) -> None:
        known = pieces()
        self.provenance, self.model, self._known = known.provenance, known.model, known

    def encode(self, words: list[str]) -> Any:
        """Ids."""
        return self._known.encode(words)


# Wrapped.


@row("wrap: an encoder in a lambda", "no guarantee: nothing says whose text it was made from")
def _(folder: Path) -> str:
    known = pieces().encode
    return told(record_of(lambda words: known(words)))


@row(
    "wrap: an encoder in functools.partial",
    "no guarantee: nothing says whose text it was made from",
)
def _(folder: Path) -> str:
    return told(record_of(partial(pieces().encode)))


@row("wrap: an encoder in lru_cache", "no guarantee: nothing says whose text it was made from")
def _(folder: Path) -> str:
    return told(record_of(lru_cache(pieces().encode)))


@row(
    "wrap: an object with a record and a method named encode",
    "no guarantee: nothing says whose text it was made from",
)
def _(folder: Path) -> str:
    return told(record_of(Lookalike().encode))


@row(
    "wrap: a class derived from wordpieces",
    "no guarantee: nothing says whose text it was made from",
)
def _(folder: Path) -> str:
    from dlm.federated.pieces.inventory import Inventory

    class Derived(Inventory):
        """Says that it is one."""

    known = pieces()
    return told(record_of(Derived(known.model, known.provenance).encode))


def parts(**given: Any) -> str:
    """What a run says of an engine."""
    pytest.importorskip("jax", reason="pip install -e '.[train]'")
    from dlm.federated.devices.encoding import SecureAggregator
    from dlm.federated.training.engine import LocalEngine
    from dlm.federated.training.local import LocalConfig
    from dlm.federated.training.parts import unknown_parts
    from dlm.federated.training.rnn import RnnConfig

    class Hundredfold(SecureAggregator):
        """Multiplies what it adds up by 100."""

    class Unclipped(LocalEngine):
        """Skips clipping."""

    model = RnnConfig(8, 4, 5)
    aggregator = Hundredfold(0.5, 1e3, 6) if given.get("hundredfold") else None
    kind = Unclipped if given.get("unclipped") else LocalEngine
    engine = kind(model, LocalConfig(), aggregator=aggregator)
    assert unknown_parts(LocalEngine(model, LocalConfig())) == []
    reasons = unknown_parts(engine)
    stage = {**STAGE, "rounds": 12, "gap": 3, "max_participations": 4}
    book = ParticipationLedger(9, gap=3, max_participations=4)
    for index in range(12):
        book.record(index, [f"u{index % 3}"])
    report = build([stage], delta=1e-6, ledgers={"unigrams": book}, void=reasons)
    return told(report.provenance)


@row("wrap: an aggregator that multiplies by 100", "no guarantee: unknown aggregator, by name")
def _(folder: Path) -> str:
    return parts(hundredfold=True)


@row("wrap: an engine derived from ours that skips clipping", "no guarantee: unknown engine")
def _(folder: Path) -> str:
    return parts(unclipped=True)


# Brought, without a promise.


@row(
    "begin: a private run with counts that were made without noise",
    "refused: the vocabulary has no guarantee",
)
def _(folder: Path) -> str:
    return as_vocabulary(counts(folder, RAW), record=RAW)


# Renamed, copied without what stands beside.


@row("rename: counts, and not the record beside them", "no guarantee: no record stands beside it")
def _(folder: Path) -> str:
    return told(read_counts(counts(folder).rename(folder / "other.tsv")).provenance)


@row("rename: wordpieces, and not their record", "no guarantee: no record stands beside it")
def _(folder: Path) -> str:
    from dlm.federated.pieces.inventory import Inventory

    pieces().save(folder / "a.model")
    assert "kept" in told(Inventory.load(folder / "a.model").provenance)
    (folder / "a.model").rename(folder / "b.model")
    return told(Inventory.load(folder / "b.model").provenance)


# Cut.


@row(
    "cut: a vocabulary out of the first column of counts", "refused: nobody says that it is public"
)
def _(folder: Path) -> str:
    words = folder / "words.txt"
    words.write_text("".join(f"{word}\n" for word in read_counts(counts(folder)).words))
    return as_vocabulary(words)


@row(
    "cut: a record from beside counts that are then called public",
    "refused: a ledger beside it says that it is of users",
)
def _(folder: Path) -> str:
    path = counts(folder, RAW)
    sidecar(path).unlink()
    Path(f"{path}.ledger.json").write_text("{}")
    return as_vocabulary(path, by="ACME")


@row("cut: a file of counts", "refused: it is not the file that the record is of")
def _(folder: Path) -> str:
    path = counts(folder)
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    return told(read_counts(path).provenance)


@row("cut: a checkpoint", "refused: it is cut off")
def _(folder: Path) -> str:
    path = saved(folder)
    path.write_bytes(path.read_bytes()[:-9])
    return told(record_in(checkpoint.read(path)))


@row(
    "cut: the record out of a checkpoint", "no guarantee: the checkpoint carries no privacy record"
)
def _(folder: Path) -> str:
    return told(record_in(checkpoint.read(saved(folder, facts={}))))


@row("cut: a ledger to no rounds, with the bounds of the run", "refused: the ledger is of 0 rounds")
def _(folder: Path) -> str:
    blank = ParticipationLedger(9, max_participations=1)
    return told(build([STAGE], delta=1e-6, ledgers={"unigrams": blank}).provenance)


@row("cut: the last line of a run's journal", "kept: it comes back from the checkpoint")
def _(folder: Path) -> str:
    run = run_of(folder / "run", 3)
    cut_journal(run, 2)
    go_on(run, 0)
    rounds = [json.loads(line)["round"] for line in (run / METRICS).read_text().splitlines()]
    return "kept: it comes back" if rounds == [0, 1, 2] else "lost"


# Edited.


@row("edit: counts", "refused: it is not the file that the record is of")
def _(folder: Path) -> str:
    path = counts(folder)
    path.write_text(path.read_text().replace("9", "8"))
    return told(read_counts(path).provenance)


@row("edit: a record", "refused: it was changed after it was written")
def _(folder: Path) -> str:
    path = counts(folder)
    sidecar(path).write_text(sidecar(path).read_text().replace("2.12", "0.12"))
    return told(read_counts(path).provenance)


@row("edit: a record, its digest computed anew", "kept; unverified: no digest tells")
def _(folder: Path) -> str:
    path = counts(folder)
    forge(path)
    return told(read_counts(path).provenance)


@row(
    "edit: the same, seen by dlm privacy verify",
    "wrong: the stated epsilon does not follow from the stated noise",
)
def _(folder: Path) -> str:
    from dlm.federated.account.recheck import recheck

    path = counts(folder)
    forge(path)
    return f"wrong: {recheck(read_counts(path).provenance).text}"


@row(
    "edit: a signed record, its digest computed anew", "wrong: it is not the record that was signed"
)
def _(folder: Path) -> str:
    path = counts(folder)
    sign_with(folder, path, "mine")
    forge(path)
    return verdict(folder, path)


@row("edit: a report", "wrong: it was changed after it was written")
def _(folder: Path) -> str:
    book = ParticipationLedger(9, max_participations=1)
    book.record(0, ["u"])
    report = build([STAGE], delta=1e-6, ledgers={"unigrams": book})
    report.write(folder / "privacy.md", folder / "privacy.json")
    place = folder / "privacy.json"
    place.write_text(place.read_text().replace("each user", "every user"))
    return verdict(folder, place)


@row("edit: a signature", "wrong: its signature does not fit")
def _(folder: Path) -> str:
    path = counts(folder)
    place = sign_with(folder, path, "mine")
    place.write_text(place.read_text().replace("2026-", "2025-"))
    return verdict(folder, path)


@row("edit: data.public to a blank", "refused: nobody says that it is public")
def _(folder: Path) -> str:
    return as_vocabulary(folder / "words.txt", by="  ")


# Swapped.


@row("swap: the record of other counts", "refused: it is not the file that the record is of")
def _(folder: Path) -> str:
    path, other = counts(folder, RAW), folder / "other.tsv"
    write_counts(other, WordCounts(("a",), np.array([1.0]), GOOD))
    shutil.copy(sidecar(other), sidecar(path))
    return told(read_counts(path).provenance)


@row("swap: the same, with the digest beside it made to fit", "refused: it is not the file")
def _(folder: Path) -> str:
    path, other = counts(folder, RAW), folder / "other.tsv"
    write_counts(other, WordCounts(("a",), np.array([1.0]), GOOD))
    mine, theirs = (json.loads(sidecar(p).read_text()) for p in (path, other))
    sidecar(path).write_text(json.dumps({**mine, "provenance": theirs["provenance"]}))
    return told(read_counts(path).provenance)


@row(
    "swap: counts in memory, and written with the record of others",
    "refused: the record is of something else",
)
def _(folder: Path) -> str:
    found = read_counts(counts(folder))
    write_counts(folder / "b.tsv", dataclasses.replace(found, counts=np.array([8.0, 4.0])))
    return "kept"


@row(
    "swap: wordpieces in memory, with the record of others",
    "no guarantee: the record is of other wordpieces",
)
def _(folder: Path) -> str:
    other = pieces(words=("cd", "dc"))
    return told(record_of(dataclasses.replace(other, provenance=pieces().provenance).encode))


@row(
    "swap: wordpieces in memory, with a record that names none",
    "no guarantee: the record is of other wordpieces",
)
def _(folder: Path) -> str:
    return told(record_of(dataclasses.replace(pieces(), provenance=GOOD).encode))


@row("swap: the record of another checkpoint", "refused: it is of other parameters")
def _(folder: Path) -> str:
    other = checkpoint.read(saved(folder, np.zeros(3)))
    path = saved(folder, np.ones(3), facts={"record": other.facts["record"]})
    return told(record_in(checkpoint.read(path)))


@row(
    "swap: the vocabulary of a checkpoint",
    "refused: it is of other parameters or another vocabulary",
)
def _(folder: Path) -> str:
    return told(record_in(checkpoint.read(saved(folder, vocabulary=b"others\n"))))


@row("swap: the signature of another file", "wrong: it is the signature of another file")
def _(folder: Path) -> str:
    path, other = counts(folder, RAW), folder / "other.tsv"
    write_counts(other, WordCounts(("a",), np.array([1.0]), GOOD))
    place = sign_with(folder, other, "mine")
    shutil.copy(place, f"{path}.signature.json")
    return verdict(folder, path)


@row("swap: the key that signed", "unverified: not by the trusted one")
def _(folder: Path) -> str:
    path = counts(folder)
    sign_with(folder, path, "theirs")
    return verdict(folder, path)


@row("swap: two runs with one stage passed for one run", "composed: twice")
def _(folder: Path) -> str:
    other = {**STAGE, "extras": {"ledger": "b" * 64}}
    second = dataclasses.replace(GOOD, stages=(other,), ledgers=("b" * 64,))
    both = inherited({"the counts": GOOD, "the list": second})
    return "composed: twice" if len(both.stages) == 2 else "composed: once"


# Copied.


@row("copy: a checkpoint alone", "kept; unverified: the record is inside")
def _(folder: Path) -> str:
    moved = shutil.copy(saved(folder), folder / "model.dlmfed")
    return told(record_in(checkpoint.read(Path(moved))))


# Of another version, in another process, with others.


@row("other version: a record", "refused: version 1; this program reads version 2")
def _(folder: Path) -> str:
    return told(Provenance.from_dict({**GOOD.to_dict(), "version": 1}))


@row("another process: a record in a file that it reads", "kept; unverified")
def _(folder: Path) -> str:
    code = (
        "import sys; from dlm import checkpoint as c; from pathlib import Path\n"
        "from dlm.record.lookup import record_in\n"
        "r = record_in(c.read(Path(sys.argv[1]))); print(r.guarantee.epsilon, r.standing)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, saved(folder)], capture_output=True, text=True, check=True
    )
    return f"kept; {done.stdout.split()[1]}" if done.stdout.startswith("2.12") else done.stdout


@row("another process: a record that was read, pickled", "kept; unverified")
def _(folder: Path) -> str:
    return told(pickle.loads(pickle.dumps(read_counts(counts(folder)).provenance)))


@row("merge: a model with a record and one without", "no guarantee: nothing says whose text it is")
def _(folder: Path) -> str:
    (line,) = merged_record({"one": [GOOD.line], "other": []}, [], "")
    return told(Provenance.from_json(line))


@row(
    "sign: wordpieces that were made of counts nobody signed",
    "kept; unverified: the counts are named",
)
def _(folder: Path) -> str:
    made = read_counts(counts(folder)).provenance.derive("wordpieces")
    said = made.verified("0123").statement()
    named = (
        "Unverified: the record of what wordpieces is made of was not verified with a trusted key"
    )
    return "kept; unverified: the counts" if named in said else said


@row("merge: a model with two records, one of which promises", "no guarantee: both are composed")
def _(folder: Path) -> str:
    (line,) = merged_record({"one": [GOOD.line, RAW.line]}, [], "")
    return told(Provenance.from_json(line))


@row(
    "shadow: a record beside a checkpoint that has another one",
    "wrong: two privacy records that do not agree",
)
def _(folder: Path) -> str:
    path = saved(folder, facts={"record": RAW.to_dict()})
    beside(path, GOOD)
    return verdict(folder, path)


@row(
    "shadow: a record beside an ARPA file that has another one",
    "wrong: two privacy records that do not agree",
)
def _(folder: Path) -> str:
    path = arpa(folder, RAW.line)
    beside(path, GOOD)
    return verdict(folder, path)


@row("shadow: a second record in the header of an ARPA file", "wrong: 2 privacy records")
def _(folder: Path) -> str:
    return verdict(folder, arpa(folder, GOOD.line, RAW.line))


@row("shadow: a record in an ARPA file behind a second #", "refused: it has no privacy record")
def _(folder: Path) -> str:
    return verdict(folder, arpa(folder, f"# {GOOD.line}"))


@row("swap: a file of a signed shard set", "wrong: it is not the file that was signed")
def _(folder: Path) -> str:
    files = [{"name": "shard-0000.arrow"}]
    body = {"format": "dlm shard set", "files": files, "provenance": {"comments": [GOOD.line]}}
    path = folder / "manifest.json"
    path.write_text(json.dumps(body))
    (folder / "shard-0000.arrow").write_bytes(b"rows")
    sign_with(folder, path, "mine")
    assert verdict(folder, path).startswith("verified")
    (folder / "shard-0000.arrow").write_bytes(b"others")
    return verdict(folder, path)


def arpa(folder: Path, *comments: str) -> Path:
    """The header of an ARPA file."""
    path = folder / "model.arpa"
    path.write_text("".join(f"# {line}\n" for line in comments) + "\\data\\\nngram 1=1\n")
    return path


def beside(path: Path, record: Provenance) -> None:
    """Puts a record beside a file, as whoever computes digests anew can."""
    digest = file_digest(path)
    body = record.about(file_sha256=digest).to_dict()
    sidecar(path).write_text(json.dumps({"file_sha256": digest, "provenance": body}))


def saved(
    folder: Path,
    array: Any = None,
    *,
    facts: dict[str, Any] | None = None,
    vocabulary: bytes = b"alpha\n",
) -> Path:
    """A run's checkpoint."""
    arrays = [np.arange(3.0) if array is None else array]
    record = GOOD.about(
        state_sha256=checkpoint.digest(arrays),
        vocabulary_sha256=content_digest(b"alpha\n"),
    )
    given = {"record": record.to_dict()} if facts is None else facts
    path = folder / "checkpoint.dlmfed"
    checkpoint.save(path, arrays, {}, facts=given, attachments={"vocabulary": vocabulary})
    return path


BINDING = RunBinding({"rounds": 9}, {"users": "these"})


def run_of(folder: Path, rounds: int) -> Path:
    """A run's folder after rounds that were released."""
    with RunFolder(folder) as run:
        run.save(state(0), BINDING, released=True)
        for done in range(1, rounds + 1):
            run.save(state(done), BINDING, [{"round": done - 1}], released=True)
    return folder


def state(done: int) -> RunState:
    """A user in each round."""
    ledger = ParticipationLedger(10, salt=b"salt")
    for index in range(done):
        ledger.record(index, ["someone"])
    return RunState(done, [np.arange(done)], [np.array([0.5])], ledger, 60.0 * done)


def go_on(folder: Path, rounds: int) -> None:
    """Opens a run's folder and does rounds."""
    with RunFolder(folder) as run:
        found = run.load(BINDING, released=True)
        assert found is not None
        for done in range(found.done + 1, found.done + rounds + 1):
            run.save(state(done), BINDING, [{"round": done - 1}], released=True)


def cut_journal(run: Path, lines: int) -> None:
    """Leaves its first lines."""
    journal = run / METRICS
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:lines]))


def forge(path: Path) -> None:
    """A smaller epsilon, with the digest computed anew."""
    side = json.loads(sidecar(path).read_text())
    body = {k: v for k, v in side["provenance"].items() if k != "digest"}
    body["guarantee"] = {**body["guarantee"], "epsilon": 0.01}
    sidecar(path).write_text(
        json.dumps({**side, "provenance": {**body, "digest": digest_of(body)}})
    )


def sign_with(folder: Path, path: Path, name: str) -> Path:
    """Signs with a key of that name; returns where the signature stands."""
    key = key_of(folder, name)
    from dlm.record.signature import Claim, read_private_key, sign

    return sign(Claim.of(path), read_private_key(key), at=datetime(2026, 11, 22, tzinfo=UTC))


def key_of(folder: Path, name: str) -> Path:
    """A key of that name."""
    pytest.importorskip("cryptography", reason="pip install -e '.[train]'")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    place = folder / f"{name}.pem"
    if not place.exists():
        key = Ed25519PrivateKey.generate()
        place.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        place.with_suffix(".pub").write_bytes(public)
    return place


def verdict(folder: Path, path: Path) -> str:
    """Of a file, by the key `mine`."""
    public = key_of(folder, "mine").with_suffix(".pub")
    from dlm.record.signature import look_at, read_public_key

    found = look_at(path, read_public_key(public))
    return f"{found.standing}: {found.text}"


def happened(trial: Callable[[Path], str], folder: Path) -> str:
    """What a way comes to."""
    try:
        return trial(folder)
    except DlmError as exc:
        return f"refused: {exc}"


# What must stand in the answer, by what the table says of it.
FRAGMENTS = {
    "nobody says that it is public": "nobody (says|who says)|name (of )?who says so",
    "it was changed after it was written": "was changed after it was written",
    "it is not the file that the record is of|it is not the file": "the record of another file",
    "it is not the file that was signed": r"shard-0000\.arrow in .* not the file that manifest",
    "it has no privacy record": "has no privacy record",
    "it is not the record that was signed": "signature of another record",
    "its signature does not fit": "its signature does not fit",
    "nothing says whose text it was made from|nothing says whose text it is": "says whose text",
    "a ledger beside it says that it is of users": "says that .* comes from users",
    "no record stands beside it": "no provenance record stood beside",
    "the record is of something else": "the record of something else",
    "the record is of other wordpieces": "is of other wordpieces",
    "it is cut off": "is cut off",
    "it is of other parameters or another vocabulary|it is of other parameters": "of other param",
    "it is the signature of another file": "is the signature of another file",
    "unknown aggregator, by name": "unknown aggregator Hundredfold",
    "unknown engine": "unknown engine Unclipped",
    "it comes back from the checkpoint": "it comes back",
    "no digest tells|the record is inside": "unverified",
    "both are composed": "without noise",
    "the counts are named": "the counts",
}


@pytest.mark.parametrize("one", ROWS, ids=[row.way for row in ROWS])
def test_a_way_of_losing_a_record_ends_as_the_table_says(one: Row, tmp_path: Path) -> None:
    """No way ends in a guarantee that was not given."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
    found = happened(one.trial, tmp_path)
    kind, _, detail = one.outcome.partition(": ")
    assert found.startswith(kind), found
    for known, fragment in FRAGMENTS.items():
        if detail in known.split("|"):
            detail = fragment
            break
    else:
        detail = re.escape(detail)
    assert re.search(detail, found), found


def test_each_way_is_named_once() -> None:
    """So that each is a test with a name of its own."""
    assert len({one.way for one in ROWS}) == len(ROWS)


if __name__ == "__main__":
    print("| way | what happens |\n| --- | --- |")
    for one in ROWS:
        print(f"| {one.way} | {one.outcome} |")
