"""ARPA to shards to ARPA: the same n-grams with the same bits."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from dlm.index.check.decode import export_arpa
from dlm.index.making import build_shard_set
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.backoff import DictModel
from models import HAND_MADE, PlainModel, build, random_model

MODELS = HAND_MADE | {
    f"random {seed}": random_model(seed, order=2 + seed % 5, per_order=50, unk=bool(seed % 3))
    for seed in range(8)
}


def by_oracle(model: DictModel) -> dict[tuple[int, ...], tuple[bytes, bytes]]:
    """The bits of each n-gram."""
    return {n: (p.tobytes(), b.tobytes()) for n, (p, b) in model.ngrams.items()}


LOSSLESS: list[dict[str, Any]] = [{}, {"encoding": "compact", "bits": 32}]


@pytest.mark.promise("export")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("suffix", "options"), [("", LOSSLESS[0]), (".gz", LOSSLESS[1])])
def test_exported_file_reads_back_as_the_same_model(
    name: str, suffix: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Words, ids and bits; and its own shards have the same model id."""
    folder = build(MODELS[name], tmp_path, 3, **options)
    exported = export_arpa(folder, tmp_path / f"out.arpa{suffix}")
    again = DictModel.from_arpa(tmp_path / f"out.arpa{suffix}")
    oracle = DictModel.from_arpa(tmp_path / "model.arpa")
    assert by_oracle(again) == by_oracle(oracle)
    assert again.vocabulary == oracle.vocabulary
    rebuilt = build_shard_set(tmp_path / f"out.arpa{suffix}", tmp_path / "again", 5)
    assert rebuilt.model == exported.manifest.model


@pytest.mark.promise("compact")
@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("name", ["missing_suffixes", "unknown_word_in_longer_ngrams", "random 3"])
def test_an_exported_quantised_model_is_the_model_that_was_served(
    name: str, bits: int, tmp_path: Path
) -> None:
    """Its shards, exact or compact, have the model id of the set that it came from."""
    folder = build(MODELS[name], tmp_path, 2, encoding="compact", bits=bits)
    exported = export_arpa(folder, tmp_path / "out.arpa")
    for number, options in enumerate([*LOSSLESS, {"encoding": "compact", "bits": bits}]):
        again = build_shard_set(tmp_path / "out.arpa", tmp_path / str(number), 3, **options)
        assert again.model == exported.manifest.model
    source = exported.manifest.provenance["quantised_from"]
    assert source == build_shard_set(tmp_path / "model.arpa", tmp_path / "exact", 1).model
    assert exported.manifest.provenance["bits"] == bits


def test_export_keeps_comments_and_words_that_are_not_utf8(tmp_path: Path) -> None:
    """What the source said about itself travels with the model."""
    words = HAND_MADE["missing_suffixes"].ngrams | {("caf\udce9",): (-3.0, None)}
    text = "# first\n#second, caf\udce9\n\n" + PlainModel(4, words).arpa()
    (tmp_path / "in.arpa").write_bytes(text.encode("utf-8", "surrogateescape"))
    build_shard_set(tmp_path / "in.arpa", tmp_path / "set", 2)
    out = io.BytesIO()
    export_arpa(tmp_path / "set", out)
    (tmp_path / "out.arpa").write_bytes(out.getvalue())
    with ArpaReader(tmp_path / "in.arpa") as one, ArpaReader(tmp_path / "out.arpa") as two:
        assert one.comments == two.comments
        assert len(one.comments) == 2
        for reader in (one, two):
            for _ in reader.batches():
                pass
        assert one.vocabulary == two.vocabulary
        assert b"caf\xe9" in one.vocabulary.words
