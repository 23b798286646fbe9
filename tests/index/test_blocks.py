"""What is stored after a context answers any word with the oracle's bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm.index.check.decode import export_arpa
from dlm.index.search.blocks import ContextBlock
from dlm.index.search.local import LocalModel
from dlm.ngram.backoff import DictModel
from dlm.ngram.query import BIGRAM_FALLBACK, Answers
from models import PlainModel, build, random_model


def contexts_of(oracle: DictModel, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Contexts of all lengths, most of them of n-grams or of their blanks."""
    rng = random.Random(seed)
    known = sorted(n for n in oracle.closure if len(n) < oracle.order) or [()]
    size = len(oracle.vocabulary)
    found = [(), (size - 1,)[: oracle.order - 1]]
    while len(found) < count:
        ngram = rng.choice(known) if rng.random() < 0.7 else (rng.randrange(size),)
        older = tuple(rng.randrange(size) for _ in range(rng.randrange(oracle.order)))
        found.append((older + ngram)[-(oracle.order - 1) :] if oracle.order > 1 else ())
    return found


def assert_oracles(
    answers: Answers, oracle: DictModel, context: tuple[int, ...], words: list[int]
) -> None:
    """Every field, log10_prob bit for bit."""
    expected = [oracle.score(context, word) for word in words]
    bits = np.array([one.log10_prob for one in expected], np.float32)
    assert answers.log10_prob.tobytes() == bits.tobytes(), context
    for name in ("matched_order", "ngram_length", "state_length"):
        assert getattr(answers, name).tolist() == [getattr(e, name) for e in expected], context


def block_after(local: LocalModel, context: tuple[int, ...]) -> ContextBlock:
    """All that is stored after a context."""
    ids = np.array(context, np.uint32)
    if len(ids) < 2:
        return ContextBlock.low_only(local.low, ids)
    found = local.stored_words(ids)
    return ContextBlock.make(local.low, ids, found.log10_backoffs, found.ranks, found.answers)


def compare(model: PlainModel, folder: Path, shards: int, count: int, **options: Any) -> int:
    """Every word after `count` contexts; returns the words that shards store after them."""
    local = LocalModel.open(build(model, folder, shards, **options))
    arpa = folder / "model.arpa"
    if options.get("bits", 32) != 32:
        arpa = folder / "export.arpa"
        export_arpa(folder / "set", arpa)
    oracle = DictModel.from_arpa(arpa)
    every = list(range(len(oracle.vocabulary)))
    stored = 0
    for context in contexts_of(oracle, count):
        block = block_after(local, context)
        stored += len(block.words)
        assert_oracles(block.score_all(), oracle, context, every)
        whole = block.score_all()
        for word in every[::5]:
            found = whole.log10_prob[word], whole.state_length[word]
            assert block.score_word(word) == found
        some = every[::3][::-1]
        assert_oracles(block.score(np.array(some, np.uint32)), oracle, context, some)
    return stored


@pytest.mark.parametrize(
    "options", [{}, {"encoding": "compact", "bits": 8}], ids=["exact", "8 bits"]
)
@pytest.mark.parametrize(
    ("order", "words", "per_order", "missing_suffixes", "unk"),
    [
        (1, 8, 0, True, True),
        (2, 20, 100, True, False),
        (3, 90, 7000, False, True),  # lists that are all of their parents'; hundreds of words
        (4, 30, 3000, True, True),
        (4, 150, 9000, True, False),
        (6, 8, 300, True, True),
    ],
)
def test_blocks_of_random_models_have_the_bits_of_the_oracle(
    order: int,
    words: int,
    per_order: int,
    missing_suffixes: bool,
    unk: bool,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Short lists and long ones, with blanks and without, quantised and not."""
    model = random_model(
        order,
        order=order,
        words=words,
        per_order=per_order,
        missing_suffixes=missing_suffixes,
        unk=unk,
    )
    stored = compare(model, tmp_path, 3, 80, **options)
    assert (stored > 0) == (order > 2)


def test_what_is_stored_can_be_read_in_parts(tmp_path: Path) -> None:
    """Any limit, several contexts; together the parts are the whole."""
    model = random_model(2, order=4, words=30, per_order=3000)
    local = LocalModel.open(build(model, tmp_path, 1))
    oracle = DictModel.from_arpa(tmp_path / "model.arpa")
    contexts = [c for c in contexts_of(oracle, 80) if len(c) >= 2]
    lengths = np.array([len(c) for c in contexts], np.uint8)
    flat = np.array([w for c in contexts for w in c], np.uint32)
    nothing = np.zeros(len(contexts), np.uint32)
    shard = local.shards[0]
    last = np.array([c[-2:] for c in contexts], np.uint32)
    pairs = local.low.stored_pairs(*np.ascontiguousarray(last.T))
    found = shard.find_blocks(lengths, flat, pairs)
    whole = shard.stored_words(found, nothing, 1 << 30)
    assert whole.counts.tolist() == whole.totals.tolist()
    assert len(whole.ranks) > 100
    for most in (1, 7, 64):
        skips, parts = nothing.copy(), [list[tuple[int, float]]() for _ in contexts]
        while (skips < whole.totals).any():
            part = shard.stored_words(found, skips, most)
            assert 0 < len(part.ranks) <= most
            assert part.totals.tolist() == whole.totals.tolist()
            assert part.log10_backoffs.tobytes() == whole.log10_backoffs.tobytes()
            rows = zip(part.ranks.tolist(), part.answers.log10_prob.tolist(), strict=True)
            for c in np.repeat(np.arange(len(contexts)), part.counts).tolist():
                parts[c].append(next(rows))
            skips += part.counts
        rows = zip(whole.ranks.tolist(), whole.answers.log10_prob.tolist(), strict=True)
        assert [row for part in parts for row in part] == list(rows)


def test_without_a_shard_a_block_is_the_model_of_order_2(tmp_path: Path) -> None:
    """P(w | v), and a state that is not minimised, as `client.bigram_fallback` says."""
    model = random_model(2, order=4, words=30, per_order=300)
    local = LocalModel.open(build(model, tmp_path, 2))
    oracle = DictModel.from_arpa(tmp_path / "model.arpa")
    for context in contexts_of(oracle, 30):
        block = ContextBlock.low_only(local.low, np.array(context, np.uint32), BIGRAM_FALLBACK)
        answers = block.score_all()
        expected = [oracle.score(context[-1:], w) for w in range(len(oracle.vocabulary))]
        bits = np.array([one.log10_prob for one in expected], np.float32)
        assert answers.log10_prob.tobytes() == bits.tobytes()
        assert set(answers.state_length.tolist()) == {min(len(context) + 1, 3)}
