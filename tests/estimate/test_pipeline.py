"""The estimator of whole texts gives the plain one's model, whatever the memory."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest

from dlm.errors import ConfigError, EstimationError
from dlm.estimate import pipeline
from dlm.estimate.adjust.trie import Trie
from dlm.estimate.pipeline import estimate
from dlm.estimate.settings import EstimationSettings, EstimationSummary
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.arpa.writer import OutputFile
from estimate.corpora import Case, case
from estimate.lmplz import Values, lmplz, needs_lmplz, parsed
from estimate.test_oracle import plainly, values_of

MIB = 1 << 20


def made(
    folder: Path,
    one: Case,
    *,
    workspace: int = 64 * MIB,
    block: int | None = None,
    threads: int = 2,
) -> tuple[Values, EstimationSummary] | str:
    """The model as its file has it, or the complaint."""
    (folder / "text").write_bytes(one.text)
    settings = EstimationSettings(
        order=one.order,
        prune=one.prune,
        vocabulary=one.vocabulary,
        fallback=one.fallback,
        workspace_bytes=workspace,
        block_tokens=block,
        threads=threads,
    )
    try:
        summary = estimate([str(folder / "text")], folder / "model.arpa", settings)
    except EstimationError as exc:
        return str(exc)
    return parsed((folder / "model.arpa").read_bytes()), summary


def assert_alike(mine: Values, other: Values, about: object) -> None:
    """The same n-grams; values within what float32 can tell."""
    assert mine.keys() == other.keys(), about
    for ngram, values in other.items():
        assert mine[ngram] == pytest.approx(values, abs=2e-6), (about, ngram)


@pytest.mark.promise("as_lmplz")
@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 200), marks=pytest.mark.slow)], ids=["some", "more"]
)
def test_random_texts_give_the_plain_model(seeds: range, tmp_path: Path) -> None:
    """With pruning, vocabularies and fallback discounts; refusals are the same to the letter."""
    for seed in seeds:
        one = case(seed)
        ours, plain_model = made(tmp_path, one), plainly(one)
        if isinstance(plain_model, str) or isinstance(ours, str):
            assert ours == plain_model, seed
        else:
            assert_alike(ours[0], values_of(plain_model), seed)


def test_a_line_may_bring_any_number_of_new_words(tmp_path: Path) -> None:
    """The first as well as a later one, with a newline after it or not."""
    lines = [b" ".join(b"%c%d" % (k, i) for i in range(9000)) for k in b"abc"]
    (ours, _) = made(tmp_path, Case((lines[0], b"a1 b2", *lines[1:]), 2, (), None, (0.5, 1.0, 1.5)))
    assert len([ngram for ngram in ours if len(ngram) == 1]) == 27_000 + 3


def long_case(order: int, prune: tuple[int, ...] = (), sentences: int = 1500) -> Case:
    """A text whose n-grams do not fit in a small memory."""
    r = random.Random(order)
    words = [b"v%d" % i for i in range(900)]
    lines = []
    for _ in range(sentences):
        picked = (words[int(r.paretovariate(0.6)) % 900] for _ in range(r.randint(0, 25)))
        lines.append(b" ".join(picked))
    return Case(tuple(lines), order, prune, None, (0.5, 1.0, 1.5))


def all_on_disk(self: pipeline._Estimation, trie: Trie) -> tuple[int, int, int]:
    """No column in memory, few contexts at a time, and few rows."""
    self._memory.limit_bytes = 0
    for column in [*trie.words, *trie.counts, *trie.children]:
        column.spill()
    return 60_000, 2049, 513


@pytest.mark.promise("estimate_memory")
@pytest.mark.parametrize(
    ("order", "prune"),
    [(1, ()), (2, (0, 1)), (5, (0, 0, 1, 2)), pytest.param(8, (1,), marks=pytest.mark.slow)],
)
def test_a_model_made_on_disk_is_that_made_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: int, prune: tuple[int, ...]
) -> None:
    """Runs are merged, columns spilled, and contexts taken in ranges; not a byte is another."""
    one = long_case(order, prune)
    whole = made(tmp_path, one)
    assert not isinstance(whole, str)
    assert whole[1].runs == 0
    text = (tmp_path / "model.arpa").read_bytes()
    monkeypatch.setattr(pipeline._Estimation, "_divide", all_on_disk)
    for threads in (1, 3):
        small = made(tmp_path, one, workspace=2 * MIB, block=1500, threads=threads)
        assert not isinstance(small, str)
        assert small[1].runs > 1
        assert small[1].spilled_bytes > 0
        if order > 3:
            assert small[1].context_ranges > order + 2
        assert (tmp_path / "model.arpa").read_bytes() == text
    model = plainly(one)
    assert not isinstance(model, str)
    assert_alike(whole[0], values_of(model), order)


def test_text_that_repeats_itself_is_sorted_in_small_memory(tmp_path: Path) -> None:
    """Where all n-grams are alike no split by words makes parts small; they are counted so."""
    one = Case(tuple([b"a b c d"] * 20_000 + [b"a"] * 9_000), 5, (), None, (0.5, 1.0, 1.5))
    small = made(tmp_path, one, workspace=2 * MIB, block=1500)
    model = plainly(one)
    assert not isinstance(small, str)
    assert not isinstance(model, str)
    assert_alike(small[0], values_of(model), "repeats")


def test_the_header_says_where_the_model_comes_from(tmp_path: Path) -> None:
    """One line of JSON among the comments."""
    import json

    assert not isinstance(made(tmp_path, case(7)), str)
    with ArpaReader(tmp_path / "model.arpa") as reader:
        for _ in reader.batches():
            pass
        (comment,) = reader.comments
    about = json.loads(comment.removeprefix("provenance: "))
    assert about["order"] == case(7).order
    assert about["sources"] == ["text"]
    assert about["text"]["lines"] == len(case(7).lines)


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz"])
def test_the_output_is_compressed_by_its_suffix(tmp_path: Path, suffix: str) -> None:
    """And reads back as the plain one."""
    (tmp_path / "text").write_bytes(long_case(3, sentences=50).text)
    settings = EstimationSettings(order=3, fallback=(0.5, 1, 1.5), workspace_bytes=16 * MIB)
    for name in ("plain.arpa", f"model.arpa{suffix}"):
        estimate([str(tmp_path / "text")], tmp_path / name, settings)
    with ArpaReader(tmp_path / "plain.arpa") as one, ArpaReader(tmp_path / name) as other:
        for a, b in zip(one.batches(), other.batches(), strict=True):
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_array_equal(a.log10_prob, b.log10_prob)
        assert one.text_xxh3 == other.text_xxh3
        assert other.compression != "plain"


def test_a_bad_discount_names_the_order_and_the_way_out(tmp_path: Path) -> None:
    """No output is left behind, nor anything else."""
    one = Case((b"a b a b",), 3, (), None, None)
    complaint = made(tmp_path, one)
    assert isinstance(complaint, str)
    assert "order 1" in complaint
    assert "--discount-fallback" in complaint
    assert [p.name for p in tmp_path.iterdir()] == ["text"]


def test_a_full_disk_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While runs, columns or the model are written."""
    one = long_case(4)
    real = os.pwrite
    for fails_at in (1, 3, 30):
        left = [fails_at]

        def full(*_: object, left: list[int] = left) -> int:
            left[0] -= 1
            if left[0] <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*_)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            patch.setattr(pipeline._Estimation, "_divide", all_on_disk)
            complaint = made(tmp_path, one, workspace=2 * MIB, block=1500)
        assert isinstance(complaint, str)
        assert f" {tmp_path}/" in complaint and "--tmp" in complaint
        assert [p.name for p in tmp_path.iterdir()] == ["text"]
    monkeypatch.setattr(
        OutputFile,
        "_write",
        lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")),
    )
    complaint = made(tmp_path, one)
    assert isinstance(complaint, str)
    assert "--output" in complaint
    assert [p.name for p in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"order": 0}, "1 to 8"),
        ({"order": 9}, "1 to 8"),
        ({"prune": (0, 2, 1)}, "0,2,1"),
        ({"prune": (0, 0, 0), "order": 2}, "3 pruning thresholds"),
        ({"prune": (-1,)}, "negative"),
        ({"threads": 0}, "threads"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    settings: dict[str, int | tuple[int, ...]], complaint: str
) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match=complaint):
        EstimationSettings(**settings)  # type: ignore[arg-type]


def test_a_limit_below_the_interpreter_is_refused(tmp_path: Path) -> None:
    """With the least that would do."""
    (tmp_path / "text").write_bytes(b"a\n")
    with pytest.raises(ConfigError, match="at least"):
        estimate(
            [str(tmp_path / "text")], tmp_path / "m.arpa", EstimationSettings(memory_bytes=MIB)
        )


@needs_lmplz
def test_real_sized_models_are_those_of_lmplz(tmp_path: Path) -> None:
    """On a text large enough for discounts of its own."""
    for prune in ((), (0, 0, 1, 2, 2)):
        one = long_case(5, prune)
        ours = made(tmp_path, one, workspace=4 * MIB)
        assert not isinstance(ours, str)
        options = ["--discount_fallback", "0.5", "1", "1.5"]
        if prune:
            options += ["--prune", *map(str, prune)]
        theirs = lmplz(one.text, 5, tmp_path, *options)
        assert ours[0].keys() == theirs.keys()
        for ngram, values in theirs.items():
            assert ours[0][ngram] == pytest.approx(values, abs=2e-5), ngram
