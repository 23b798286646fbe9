"""Random questions to a model and the oracle's answers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import ModelFiles
from dlm.client import SentenceScore, Utterance
from dlm.ngram.backoff import DictModel, Score
from dlm.ngram.partition import slots_of
from dlm.ngram.query import BIGRAM_FALLBACK, Answers

Query = tuple[tuple[int, ...], int]


def random_queries(oracle: DictModel, seed: int, count: int) -> list[Query]:
    """Half from the model's n-grams, half of random words; contexts up to one word too long."""
    rng = np.random.default_rng(seed)
    size = len(oracle.vocabulary)
    known = sorted(oracle.ngrams)
    out: list[Query] = []
    for _ in range(count):
        if rng.random() < 0.5:
            ngram = known[rng.integers(len(known))]
            more = tuple(rng.integers(0, size, rng.integers(0, 3)).tolist())
            whole = (*more, *ngram) if rng.random() < 0.5 else (*ngram, *more[:1])
        else:
            whole = tuple(rng.integers(0, size, rng.integers(1, oracle.order + 2)).tolist())
        out.append((whole[:-1], whole[-1]))
    return out


def save_queries(path: Path, oracle: DictModel, queries: list[Query]) -> None:
    """For a process that is to ask: contexts, words and the bits of the answers, pickled."""
    scores = [oracle.score(context, word).log10_prob for context, word in queries]
    asked = [c for c, _ in queries], [w for _, w in queries], np.array(scores, np.float32).tobytes()
    path.write_bytes(pickle.dumps(asked))


def queries_to(files: ModelFiles, shard: int) -> list[Query]:
    """Queries that need this shard: the n-grams of order 4 in it."""
    found = []
    for ngram in sorted(n for n in files.oracle.ngrams if len(n) == 4):
        u, v = (np.array([i], np.uint32) for i in ngram[1:3])
        if files.manifest.slots[slots_of(u, v)[0]] == shard:
            found.append((ngram[:3], ngram[3]))
    return found


def submit(utterance: Utterance, queries: list[Query], deadline_s: float | None = None) -> Any:
    """Starts a call and returns it, with `result`, `exception` and `done` for whoever waits."""
    ((asked, _),) = utterance._inputs.score([c for c, _ in queries], [w for _, w in queries])
    return utterance._submit(asked, utterance._limit(deadline_s))


def answers_to(utterance: Any, queries: list[Query], **more: Any) -> Any:
    """The answers of an utterance; to be awaited if it is asyncio's."""
    return utterance.score([c for c, _ in queries], [w for _, w in queries], **more)


def ask(utterance: Utterance, oracle: DictModel, queries: list[Query], **more: Any) -> None:
    """Fails unless the answers are the oracle's."""
    assert_equal(answers_to(utterance, queries, **more), [oracle.score(c, w) for c, w in queries])


def assert_each_is_of_its_model(files: ModelFiles, queries: list[Query], answers: Answers) -> None:
    """Each score is the oracle's of the model that its source names: the whole, or its bigrams."""
    assert answers.source is not None
    for at, (context, word) in enumerate(queries):
        known = context[-1:] if answers.source[at] == BIGRAM_FALLBACK else context
        expected = files.oracle.score(known, word)
        assert answers.log10_prob[at] == expected.log10_prob
        assert answers.matched_order[at] == expected.matched_order
        if answers.source[at] == BIGRAM_FALLBACK:
            assert answers.state_length[at] == min(len(context) + 1, files.manifest.order - 1)
        else:
            assert answers.state_length[at] == expected.state_length


def random_sentences(oracle: DictModel, seed: int, count: int) -> list[list[str]]:
    """Words of the model along its n-grams, some unknown, some sentences empty."""
    rng = np.random.default_rng(seed)
    words = [w.decode("utf-8", "surrogateescape") for w in oracle.vocabulary.words]
    known = sorted(n for n in oracle.ngrams if len(n) > 1) or sorted(oracle.ngrams)
    out = []
    for _ in range(count):
        sentence: list[str] = []
        while len(sentence) < rng.integers(0, 14):
            sentence += [words[i] for i in known[rng.integers(len(known))]]
            if rng.random() < 0.1:
                sentence.append("never-seen")
        out.append(sentence)
    return [*out, []]


def assert_equal(answers: Answers, expected: list[Score]) -> None:
    """Fails unless every field of every answer is the oracle's, log10_prob bit for bit."""
    bits = np.array([e.log10_prob for e in expected], np.float32)
    assert answers.log10_prob.dtype == np.float32
    assert answers.log10_prob.tobytes() == bits.tobytes()
    for field in ("matched_order", "ngram_length", "state_length"):
        assert getattr(answers, field).tolist() == [getattr(e, field) for e in expected], field


def assert_sentence(score: SentenceScore, oracle: DictModel, words: list[str], **ends) -> None:
    """Fails unless `score` is the oracle's for the sentence."""
    expected = oracle.score_sentence(words, **ends)
    assert score.tokens == len(expected)
    bits = np.array([e.log10_prob for e in expected], np.float32)
    assert score.token_log10_prob.tobytes() == bits.tobytes()
    assert score.token_matched_order.tolist() == [e.matched_order for e in expected]
    assert score.log10_prob == float(bits.sum(dtype=np.float64))
    ids = [oracle.vocabulary.id_of(w) for w in words]
    if ends.get("eos", True):
        ids.append(oracle.vocabulary.end_id)
    unknown = np.array([i == 0 for i in ids], np.bool_)
    assert score.token_oov.tolist() == unknown.tolist()
    assert score.oovs == int(unknown.sum())
    assert score.log10_oovs == float(bits[unknown].sum(dtype=np.float64))


def events(caplog: pytest.LogCaptureFixture, begin: str) -> list[Any]:
    """The records of the events whose names begin so."""
    return [r for r in caplog.records if getattr(r, "event", "").startswith(begin)]
