"""`dlm shard --engine spark` on two local executors: the local builder's files, to the byte."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from dlm.errors import ArpaError, ConfigError
from dlm.index.layout import read_manifest
from dlm.index.making import build_shard_set
from dlm.ngram.arpa import parts_index
from models import PlainModel, random_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # pyspark's own
]


def in_parts(arpa: Path, folder: Path, rows: int) -> Path:
    """The same model as a folder of parts of at most so many rows."""
    head, *sections = arpa.read_bytes().split(b"-grams:\n")
    lines = head.decode().splitlines()
    parts: list[list[tuple[str, int]]] = []
    for k, section in enumerate(sections, 1):
        (folder / f"order={k}").mkdir(parents=True)
        own = section.split(b"\n\n")[0].splitlines(keepends=True)
        parts.append([])
        for begin in range(0, len(own), rows):
            text = b"".join(own[begin : begin + rows]).rstrip(b"\n") + b"\n"
            name = f"order={k}/part-{begin:05d}.txt"
            (folder / name).write_bytes(text)
            parts[-1].append((name, len(text)))
    counts = [int(line.split("=")[1]) for line in lines if line.startswith("ngram ")]
    comments = [line[2:] for line in lines if line.startswith("# ")]
    (folder / "model.json").write_bytes(parts_index(comments, counts, parts))
    return folder


@pytest.mark.promise("spark")
@pytest.mark.parametrize(
    ("order", "unk", "shards", "partitions", "form"),
    [
        (1, True, 1, 1, "parts"),
        (2, True, 2, 3, "arpa.gz"),
        (3, False, 1, 3, "parts"),
        (5, False, 3, 4, "parts"),
        (5, False, 3, 7, "arpa"),
    ],
)
def test_the_set_is_the_local_builder_s_to_the_byte(
    spark: Any, tmp_path: Path, order: int, unk: bool, shards: int, partitions: int, form: str
) -> None:
    """All files, and the name; with blanks, weights of 0 and without the unknown word; from parts,
    and from a file in one piece, which Spark reads in several. Nothing else is left, whatever the
    paths are."""
    from dlm.spark.shards import build_shard_set as by_spark

    model = random_model(order, order=order, words=20, per_order=100, unk=unk)
    (arpa := tmp_path / "model.arpa").write_text(model.unsorted())
    local = build_shard_set(arpa, tmp_path / "local", shards)
    given, output = tmp_path / f"given [1] é.{form}", tmp_path / "{the} set"
    if form == "parts":
        in_parts(arpa, given, 9)
    else:
        text = b"# a \\comment\n" + arpa.read_bytes()
        given.write_bytes(gzip.compress(text) if form == "arpa.gz" else text)
    before = {*tmp_path.iterdir()}
    made = by_spark(spark, str(given), output, shards, partitions=partitions)
    assert {*tmp_path.iterdir()} == before | {output}
    assert spark.conf.get("spark.sql.maxConcurrentOutputFileWriters") == "0"  # the caller's own
    assert made.shard_set == local.shard_set
    assert read_manifest(output).counts == local.counts
    names = [entry.name for entry in local.files]
    assert sorted(path.name for path in output.iterdir()) == sorted(["manifest.json", *names])
    for name in names:
        assert (output / name).read_bytes() == (tmp_path / "local" / name).read_bytes()


def test_a_model_that_cannot_be_sharded_is_refused(spark: Any, tmp_path: Path) -> None:
    """Without a context, not a model, or not whole; nothing is left."""
    from dlm.spark.shards import build_shard_set as by_spark

    ngrams = dict(random_model(1, order=3, missing_suffixes=False).ngrams)
    prefix = next(ngram[:2] for ngram in ngrams if len(ngram) == 3)
    del ngrams[prefix]
    arpa = PlainModel(3, ngrams).write(tmp_path / "model.arpa")
    parts = in_parts(arpa, tmp_path / "parts", 9)
    with pytest.raises(ArpaError, match="prefix"):
        by_spark(spark, str(parts), tmp_path / "set", 2)
    with pytest.raises(ConfigError, match=r"model\.json"):
        by_spark(spark, str(tmp_path), tmp_path / "set", 2)
    whole = arpa.read_bytes()
    for text, what in (
        (whole.removesuffix(b"\\end\\\n"), "truncated"),
        (whole.replace(b"\\2-grams:", b"\\3-grams:"), "in order"),
        (whole.replace(b"\n\n\\2-grams:", b"\n-1\tx\n\n\\2-grams:"), "1-grams"),
        (whole + b"more\n", "1 rows after"),
        (whole.replace(b"\\3-grams:", b"\\x\n\n\\3-grams:"), "in order"),
        (b"no model\n", "ARPA"),
        (b"", "empty"),
    ):
        arpa.write_bytes(text)
        with pytest.raises(ArpaError, match=what):
            by_spark(spark, str(arpa), tmp_path / "set", 2)
    assert not (tmp_path / "set").exists()
