"""`dlm pipeline` with wordpieces: users -> words -> pieces -> network -> words again -> shards."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")
pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
pytest.importorskip("sentencepiece", reason="pip install -e '.[train]'")

from typer.testing import CliRunner

from dlm.cli.main import app
from dlm.federated.pieces.inventory import Inventory
from dlm.ngram.backoff import DictModel
from dlm.record.counts_file import read_counts
from dlm.record.provenance import Provenance, digest_of
from pipeline.runs import Run, done_stages, people, record_of, results

SIZE = 16


def test_users_become_a_model_of_words_by_wordpieces(tmp_path: Path, dlm: Run) -> None:
    """A real run. The record is that of the counts and of the rounds together, and the pieces tell
    of nobody more; killed while the network's sentences are counted, it goes on with the counts and
    ends in the bytes that it ends in otherwise."""
    folder = people(tmp_path / "run", seed="")
    config = folder / "p.toml"
    config.write_text(
        config.read_text().replace("[federate.run]", f"[pieces]\nsize = {SIZE}\n[federate.run]")
    )
    stopped = dlm(
        folder, "pipeline", "p.toml", killed=("dlm.distill.counts.work:_save", 1, "after")
    )
    assert stopped.returncode == -signal.SIGKILL, stopped.stderr
    assert "stage 3 of 8, pieces: make 16 wordpieces from the words of counts.tsv" in stopped.stderr
    assert done_stages(folder) == ["estimate", "unigrams", "pieces", "federate"]
    out = folder / "out"
    assert (out / "distilled.work").exists()
    done = dlm(folder, "pipeline", "p.toml")
    assert done.returncode == 0, done.stderr
    assert "stage 5 of 8, distill, resumed" in done.stderr
    assert "sentences for" not in done.stderr
    assert "sentences already counted" in done.stderr
    assert not (out / "distilled.work").exists()

    counts, pieces = read_counts(out / "counts.tsv"), Inventory.load(out / "pieces.model")
    assert pieces.size == SIZE
    assert pieces.provenance.guarantee == counts.provenance.guarantee
    record = record_of(out / "model.arpa.zst")
    assert [stage["stage"] for stage in record.stages] == ["unigrams", "network"]
    assert record.ledgers[0] in counts.provenance.ledgers
    network = json.loads((out / "network/privacy.json").read_text())["provenance"]
    of_network = Provenance.from_dict(network)
    assert set(record.ledgers) == set(of_network.ledgers) > set(counts.provenance.ledgers)
    assert record.guarantee is not None
    assert counts.provenance.guarantee is not None
    assert record.guarantee.rho == of_network.guarantee.rho > counts.provenance.guarantee.rho
    report = json.loads((out / "privacy.json").read_text())
    # Dated, with the digest of the settings that it shows.
    assert report["privacy"]["made"].endswith("UTC")
    shown = report["privacy"]["config"]
    assert shown
    assert f"settings: SHA-256 {digest_of(shown)}" in (out / "privacy.md").read_text()
    assert report["statement"] == record.statement(held_out=12)
    told = {stage["stage"]: stage["wrote"] for stage in report["stages"]}
    assert told["pieces"] == f"pieces.model: {pieces.provenance.statement()}"

    model = DictModel.from_arpa(out / "model.arpa.zst")
    words = {word.decode() for word in model.vocabulary.words} - {"<s>", "</s>", "<unk>"}
    assert len(words) > 10
    assert pieces.decode(pieces.encode(sorted(words))) == sorted(words)
    assert words - set(counts.words)  # of public text, spelled in pieces of users' words

    before = results(folder)
    again = dlm(folder, "pipeline", "p.toml", "--redo", "distill")
    assert again.returncode == 0, again.stderr
    assert results(folder) == before
    refused = CliRunner().invoke(app, ["pipeline", str(config), "--redo", "pieces"])
    assert "federate has already released something about users" in str(refused.exception)
