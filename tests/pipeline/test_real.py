"""`dlm pipeline` without a seed: users become answers over gRPC, under a guarantee or none."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")
pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")

from typer.testing import CliRunner, Result

from cluster import CommandServer
from dlm.cli.main import app
from dlm.client import Client
from dlm.errors import ConfigError, PrivacyError
from dlm.files import lock_file
from dlm.ngram.backoff import DictModel
from pipeline.runs import (
    STAGES,
    WORDS,
    Run,
    done_stages,
    people,
    record_of,
    results,
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, dlm: Run) -> Path:
    """A real run, which was killed while it counted, and again while it trained."""
    folder = people(tmp_path_factory.mktemp("real") / "run", seed="")
    for killed in (
        ("dlm.federated.counting.collect:apply", 2, "after"),
        ("dlm.federated.training.train:Training._round", 2, "after"),
    ):
        stopped = dlm(folder, "pipeline", "p.toml", killed=killed)
        assert stopped.returncode == -signal.SIGKILL, stopped.stderr
    whole = dlm(folder, "pipeline", "p.toml")
    assert whole.returncode == 0, whole.stderr
    assert "stage 2 of 7, unigrams: already done, skipped" in whole.stderr
    assert "stage 3 of 7, federate, resumed" in whole.stderr
    assert "(epsilon = " in whole.stdout
    # Times would tell how much users wrote.
    assert " s]" not in whole.stderr
    return folder


@pytest.mark.promise("one_command")
def test_users_become_answers_over_grpc(real: Path, dlm: Run) -> None:
    """The served model is the ARPA file, to the bit; record, report and manifest say the same."""
    out = real / "out"
    record = record_of(out / "model.arpa.zst")
    assert record.guarantee is not None
    assert [stage["extras"]["generator"] for stage in record.stages] == ["ChaCha20", "ChaCha20"]
    assert {one.by for one in record.public_inputs} == {"the tests"}
    assert len(record.public_inputs) == 2
    report = json.loads((out / "privacy.json").read_text())
    said = record.statement(held_out=12)
    assert "12 held-out users are not covered" in said
    assert report["statement"] == said
    assert report["privacy"]["provenance"] == record.to_dict()
    assert report["privacy"]["numbers"]["rho"] == record.guarantee.rho
    assert [stage["stage"] for stage in report["stages"]] == STAGES
    assert "public, says the tests, SHA-256" in report["inputs"]["inputs.text, public.txt"]
    assert said in (out / "privacy.md").read_text()
    told = dlm(real, "info", "out/shards").stdout
    assert re.search(rf"^privacy +{re.escape(record.statement())}$", told, re.MULTILINE)
    assert not (out / "users.store").exists()
    assert (out / "journal.json").stat().st_mode & 0o077 == 0
    oracle = DictModel.from_arpa(out / "model.arpa.zst")
    assert oracle.order == 3
    served = CommandServer("cluster", "out/shards", cwd=real)
    with served.ready(), Client.connect(real / "cluster.toml") as client:
        for words in (WORDS[:5], [WORDS[0]] * 4, ["nobody", "knows", *WORDS[:2]]):
            (found,) = client.utterance().score_sentences([" ".join(words)])
            expected = oracle.score_sentence([word.encode() for word in words])
            assert found.token_log10_prob.tolist() == [float(e.log10_prob) for e in expected]


def test_a_finished_pipeline_repeats_nothing(real: Path) -> None:
    """It says so, and leaves each byte; --check says it, too."""
    before = results(real)
    again = pipeline(real)
    assert again.exit_code == 0, again.exception
    assert again.stderr.count("already done, skipped") == len(STAGES)
    assert results(real) == before
    look = pipeline(real, "--check")
    assert look.exit_code == 0, look.exception
    assert [line.split()[1:3] for line in look.stdout.splitlines()[:7]] == [
        [name, "done"] for name in STAGES
    ]
    facts = json.loads(pipeline(real, "--check", "--json").stdout)
    assert [(one["stage"], one["state"]) for one in facts["stages"]] == [
        (name, "done") for name in STAGES
    ]


def test_the_folder_stands_for_its_model_and_its_report(real: Path) -> None:
    """`privacy verify` and `privacy compose` take it as they take the folder of any run."""
    told = CliRunner().invoke(app, ["privacy", "verify", str(real / "out")])
    assert told.exit_code == 3, told.exception
    assert "(epsilon = " in told.output
    composed = CliRunner().invoke(app, ["privacy", "compose", str(real / "out")])
    assert composed.exit_code == 0, composed.exception
    assert "together: (epsilon = " in composed.output


@pytest.mark.promise("records")
def test_one_signing_verifies_the_shard_set_and_the_stages_before_it(
    tmp_path: Path, real: Path
) -> None:
    """The signature names the files that the signer saw; without them, they stay unverified."""
    pytest.importorskip("cryptography", reason="pip install -e '.[train]'")
    out = Path(shutil.copytree(real / "out", tmp_path / "out"))
    key, public = tmp_path / "key.pem", tmp_path / "key.pub"
    for line in (
        f"openssl genpkey -algorithm ed25519 -out {key}",
        f"openssl pkey -in {key} -pubout -out {public}",
    ):
        subprocess.run(line.split(), check=True, capture_output=True)

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(app, list(map(str, arguments)))

    assert call("privacy", "sign", out / "shards", "--key", key).exit_code == 0
    alone = call("privacy", "verify", out / "shards", "--public-key", public).stdout
    assert "Unverified: the record of the vocabulary counts.tsv and the network network" in alone
    signed = call("privacy", "sign", out, "--key", key)
    assert signed.exit_code == 0, signed.exception
    assert f"made of the network network: {out / 'network/checkpoint.dlmfed'}" in signed.stdout
    moved = shutil.move(out / "shards", tmp_path / "elsewhere")  # the set travels by itself
    for shown in (
        call("privacy", "verify", moved, "--public-key", public),
        call("info", moved, "--public-key", public),
    ):
        assert shown.exit_code == 0, shown.exception
        assert "together with the vocabulary counts.tsv and the network network." in shown.stdout
        assert "Unverified" not in shown.stdout
    assert "Unverified: this record was not" in call("info", moved).stdout
    edit(tmp_path / "elsewhere/manifest.json.signature.json", '"signed": "', '"signed": "1')
    assert "privacy             WRONG" in call("info", moved, "--public-key", public).stdout
    edit(out / "counts.tsv", "w", "v")
    refused = call("privacy", "sign", out, "--key", key).exception
    assert isinstance(refused, PrivacyError)


def test_the_report_for_programs_and_one_process_at_a_time(real: Path) -> None:
    """--json prints what stands in the folder; a second process is refused."""
    printed = pipeline(real, "--json", "--quiet")
    assert printed.exit_code == 0, printed.exception
    assert json.loads(printed.stdout) == json.loads((real / "out/privacy.json").read_text())
    assert printed.stderr == ""
    handle = lock_file(real / "out/.lock")
    assert handle is not None
    try:
        assert "another process is using" in str(pipeline(real).exception)
    finally:
        os.close(handle)


def pipeline(folder: Path, *more: str) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(app, ["pipeline", str(folder / "p.toml"), *more])


def edit(path: Path, old: str, new: str) -> None:
    """Changes a file of text; it must hold `old`."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.promise("changed_stage")
@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "users.tsv",
            "user000\t",
            "user000\twaa ",
            "unigrams: inputs.users .* has other content",
        ),
        ("words.txt", "waa\n", "", "unigrams: inputs.wordlist .* other content"),
        ("public.txt", "waa", "wab", "estimate: inputs.text .* other content.*--redo estimate"),
        (
            "p.toml",
            "lambda = 10",
            "lambda = 11",
            "unigrams: lambda was 10.0 and is now 11.0.*add up",
        ),
        (
            "p.toml",
            "gap = 2",
            "gap = 1",
            "federate: privacy.gap was 2 and is now 1.*stays released",
        ),
        ("p.toml", "samples = 300", "samples = 9", "distill: samples was 300.* --redo distill"),
        ("p.toml", "-,-,40", "-,-,50", "prune: by_order was .*40. and is now .*50.*--redo prune"),
        ("p.toml", "shards = 2", "shards = 3", "shard: shards was 2 and is now 3.*--redo shard"),
        ("p.toml", 'the tests"', 'others"', "distill: public was 'the tests' and is now 'others'"),
        ("out/counts.tsv", "waa", "wzz", "its output .*counts.tsv has changed since"),
        (
            "out/counts.tsv.provenance.json",
            "1e-06",
            "1e-09",
            "its output .*provenance.json has",
        ),
        ("out/network/privacy.json", "{", " {", "federate: its output .*privacy.json has"),
    ],
)
def test_what_changed_is_refused_by_the_name_of_its_stage(
    tmp_path: Path, real: Path, file: str, old: str, new: str, message: str
) -> None:
    """With what to do; --check says it too, and nothing is done."""
    folder = tmp_path / "copy"
    shutil.copytree(real, folder)
    edit(folder / file, old, new)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    refused = pipeline(folder)
    assert isinstance(refused.exception, ConfigError)
    assert re.search(message, str(refused.exception)), refused.exception
    look = pipeline(folder, "--check")
    assert look.exit_code == 1
    assert str(refused.exception) in look.stdout
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_record_that_was_removed_is_missed(tmp_path: Path, real: Path) -> None:
    """Of counts; and what was released is not made again for it."""
    folder = tmp_path / "copy"
    shutil.copytree(real, folder)
    (folder / "out/counts.tsv.provenance.json").unlink()
    assert "provenance.json is missing" in str(pipeline(folder).exception)
    redo = pipeline(folder, "--redo", "unigrams")
    assert "has already released something about users" in str(redo.exception)
    assert not (folder / "out/counts.tsv.provenance.json").exists()


def test_a_stage_that_refused_its_settings_takes_others(tmp_path: Path) -> None:
    """Nothing was released with those it refused."""
    folder = people(tmp_path / "run", seed="")
    edit(folder / "p.toml", "report_goal = 20", "report_goal = 99")
    assert "with a gap of 2" in str(pipeline(folder).exception)
    assert done_stages(folder) == ["estimate"]
    edit(folder / "p.toml", "report_goal = 99", "report_goal = 20")
    edit(folder / "p.toml", "lambda = 10", "lambda = 8")
    look = pipeline(folder, "--dry-run")
    assert look.exit_code == 0, look.exception
    assert [line.split()[1:3] for line in look.stdout.splitlines()[:2]] == [
        ["estimate", "done"],
        ["unigrams", "begin"],
    ]


@pytest.mark.promise("no_guarantee")
def test_an_input_without_a_record_voids_the_guarantee_and_an_edited_one_is_refused(
    tmp_path: Path, real: Path, dlm: Run
) -> None:
    """Counts with their record, and n-grams that nobody vouches for: said first, last, in the
    report and of the served model."""
    folder = people(tmp_path / "run", seed="", public="")
    for name in ("counts.tsv", "counts.tsv.provenance.json", "topology.arpa.zst"):
        shutil.copy(real / "out" / name, folder)
    config = folder / "p.toml"
    edit(config, 'wordlist = "words.txt"', 'vocabulary = "counts.tsv"')
    edit(config, 'text = "public.txt"', 'topology = "topology.arpa.zst"')
    unigrams, rest = config.read_text().split("[federate.run]")
    config.write_text(unigrams.split("[unigrams]")[0] + "[federate.run]" + rest)
    edit(config, "[estimate]\ndiscount_fallback = true\n", "")
    why = "topology.arpa.zst has no privacy record, and nobody has attested that it is public"
    assert f"NO GUARANTEE: {folder / why}" in pipeline(folder, "--check").stdout
    done = dlm(folder, "pipeline", "p.toml")
    assert done.returncode == 0, done.stderr
    assert f"NO GUARANTEE: {why}" in done.stderr
    assert done.stdout.startswith("NO GUARANTEE: nothing says whose text the topology")
    record = record_of(folder / "out/model.arpa.zst")
    assert record.guarantee is None
    assert {stage["stage"] for stage in record.stages} == {"unigrams", "network"}
    report = json.loads((folder / "out/privacy.json").read_text())
    assert report["inputs"]["inputs.topology, topology.arpa.zst"].startswith("no record")
    assert report["inputs"]["inputs.vocabulary, counts.tsv"].startswith("record: (epsilon")
    told = dlm(folder, "info", "out/shards").stdout
    assert re.search("^privacy +NO GUARANTEE", told, re.MULTILINE)
    # Of another folder: the record of the counts says less than it did.
    edit(config, 'folder = "out"', 'folder = "other"')
    edit(folder / "counts.tsv.provenance.json", '"rounds": 4', '"rounds": 3')
    changed = pipeline(folder)
    assert isinstance(changed.exception, PrivacyError)
    assert "was changed after it was written" in str(changed.exception)
