"""`dlm info`: what a model promises, and what a pod of each shard needs, from the manifest."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cli.conftest import MODEL
from cli.trained import dlm
from dlm import __version__
from dlm.errors import ConfigError
from dlm.index.describe import PROCESS_MIB
from dlm.index.layout import read_manifest
from dlm.index.making.shard_set import build_shard_set
from dlm.ngram.arpa import provenance_line
from dlm.record.provenance import Guarantee, Provenance

TINY = Path(__file__).parents[2] / "shards/tiny/exact-2"


def shards_of(folder: Path, *comments: str) -> Path:
    """The shard set of a model with these comments."""
    arpa = MODEL.write(folder / "model.arpa")
    head = "".join(f"# {line}\n" for line in comments)
    arpa.write_bytes(head.encode() + arpa.read_bytes())
    build_shard_set(arpa, folder / "shards", shards=1)
    return folder / "shards"


def test_helm_values_are_those_of_one_process() -> None:
    """The files of this set are below a MiB."""
    done = dlm("info", TINY, "--helm", status=0)
    manifest = read_manifest(TINY)
    assert done.output == (
        f"# Shard set {manifest.shard_set} of model {manifest.model}.\n"
        "shards: 2\n"
        "resources:\n"
        "  requests:\n"
        '    cpu: "1"\n'
        f"    memory: {1 + PROCESS_MIB}Mi\n"
        "  limits:\n"
        "    memory: 322Mi\n"
    )


@pytest.mark.parametrize(
    ("comment", "shown"),
    [
        ("privacy: none (public text)", "privacy: none (public text) (not a record)"),
        ('privacy: {"format": "dlm privacy', "privacy: WRONG, no guarantee can be claimed: "),
        ("privacy:  {}", "privacy: WRONG, no guarantee can be claimed: "),
    ],
)
def test_a_privacy_comment_is_shown_as_words_unless_it_begins_as_a_record(
    tmp_path: Path, comment: str, shown: str
) -> None:
    """Words claim nothing; a record that does not parse may have claimed something."""
    done = dlm("info", shards_of(tmp_path, comment), status=0)
    (line,) = (line for line in done.output.splitlines() if "privacy: " in line)
    assert shown in line
    assert ("WRONG" in line) == ("WRONG" in shown)


STAGE = {
    "stage": "unigrams", "mechanism": "gaussian", "noise_multiplier": 2.0, "rounds": 1,
    "gap": 1, "max_participations": 1, "extras": {"ledger": "a" * 64},
}  # fmt: skip
GOOD = Provenance(Guarantee(2.116, 1e-6, 0.125), stages=(STAGE,), ledgers=("a" * 64,))


def _forged(record: Provenance) -> str:
    """Its line with another epsilon, and a digest of what it says now."""
    return dataclasses.replace(record, guarantee=Guarantee(0.01, 1e-6, 0.125)).line


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([], "no record of private training, so no guarantee"),
        (["Privacy: {}"], "no record of private training, so no guarantee"),
        (["privacy: none (public text)"], "no record of private training, so no guarantee"),
        ([Provenance.none("no noise").line], "NO GUARANTEE: no noise."),
        ([GOOD.line.replace("2.116", "0.01")], "WRONG, no guarantee can be claimed: comment 1 of"),
        ([GOOD.line, Provenance.none("no noise").line], "WRONG, no guarantee can be claimed: "),
        ([_forged(GOOD)], "WRONG, no guarantee can be claimed: the stated epsilon does not follow"),
    ],
)
def test_a_served_model_claims_what_its_one_record_bears_out(
    tmp_path: Path, lines: list[str], shown: str
) -> None:
    """Without a record, with an edited one or with two, info says that nothing is guaranteed."""
    if "does not follow" in shown:
        pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
    shards = shards_of(tmp_path, *lines)
    told = dlm("info", shards)
    (line,) = (line for line in told.output.splitlines() if line.startswith("privacy "))
    assert line.removeprefix("privacy ").lstrip().startswith(shown)
    asked = dlm("info", shards, "--json")
    assert json.loads(asked.output)["privacy"].startswith(shown)


def test_an_unverified_record_is_stated_once(tmp_path: Path) -> None:
    """Under "privacy"; the comment that holds it only says so."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
    record = dataclasses.replace(GOOD, guarantee=Guarantee(2.41909318, 1e-6, 0.125))
    told = dlm("info", shards_of(tmp_path, record.line)).output
    assert told.count("Unverified") == told.count("differential privacy") == 1
    assert "privacy: the record of the statement above\n" in told


def test_provenance_is_short_rows(tmp_path: Path) -> None:
    """One per fact, without those of the inputs' inputs or control characters; --json has all."""
    inner = provenance_line("estimate", order=3)
    line = provenance_line(
        "distill",
        samples=300,
        limits=[None, 40],
        note="a\x1b[2Jb" + "c" * 900,
        inputs=[
            {"name": "net", "rounds": 3},
            {"name": "top", "counts": [1, 2], "comments": [inner]},
        ],
    )
    shards = shards_of(tmp_path, line, "provenance: [7]")
    told = dlm("info", shards).output
    rows = told[told.index("provenance") :].splitlines()
    assert max(map(len, rows)) <= 130
    assert [row.split(maxsplit=1) for row in rows[2:8]] == [
        ["made", f"by           dlm {__version__} distill"],
        ["samples", "300"],
        ["limits", "- 40"],
        ["note", rows[5].split(maxsplit=1)[1]],
        ["inputs", "net (rounds 3); top (counts 1 2)"],
        ["comments", "provenance: [7]"],
    ]
    assert rows[5].split(maxsplit=1)[1].startswith("a\\x1b[2Jbccc")
    asked = dlm("info", shards, "--json").output
    assert json.loads(asked)["provenance"]["comments"][0] == line


def test_one_form_is_printed_at_a_time() -> None:
    """--json and --helm together are refused, with what is expected."""
    done = dlm("info", str(TINY), "--json", "--helm")
    assert isinstance(done.exception, ConfigError)
    assert "--json and --helm" in str(done.exception)


def test_a_quantised_set_is_not_compared_value_by_value(tmp_path: Path) -> None:
    """It differs on purpose: the command says so, and what to do."""
    arpa = MODEL.write(tmp_path / "model.arpa")
    build_shard_set(arpa, tmp_path / "q8", 1, encoding="compact", bits=8)
    done = dlm("verify", str(tmp_path / "q8"), "--arpa", str(arpa))
    assert isinstance(done.exception, ConfigError)
    assert "q8 is quantised (8 bits)" in str(done.exception)
    assert f"dlm export {tmp_path / 'q8'}" in str(done.exception)
    assert dlm("verify", str(tmp_path / "q8")).exit_code == 0
