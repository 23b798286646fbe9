"""Every token after every state of a batch, in NeMo's shape, with the model's own scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cluster import Cluster, ModelFiles, build
from dlm.asr.decoders import advance
from dlm.asr.decoders.advance import TokenLM
from dlm.client import Client
from dlm.errors import QueryError
from dlm.units import LN_10
from models import random_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model of order 4 whose n-grams lack suffixes, which NeMo's own would refuse."""
    return build(random_model(4, order=4, words=30, per_order=800), tmp_path_factory.mktemp("m"), 2)


@pytest.mark.parametrize("bos", [True, False])
def test_walks_have_the_bits_of_the_oracle(
    files: ModelFiles, bos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random walks in a batch: each score is that of the whole history, while the table grows."""
    monkeypatch.setattr(advance, "STATES", 8)
    rng = np.random.default_rng(1)
    tokens = [f"w{i}" for i in range(30)]
    ids = [files.oracle.vocabulary.id_of(t) for t in tokens]
    with Client.local(files.directory) as client:
        lm = TokenLM(client.utterance(), tokens, natural=False)
        states = lm.get_init_states(16, bos)
        assert (states.shape, states.dtype) == ((16,), np.int64)
        start = [files.oracle.vocabulary.begin_id] * bos
        histories = [list(start) for _ in range(16)]
        for _ in range(12):
            scores, after = lm.advance(states)
            assert (scores.shape, scores.dtype) == ((16, lm.vocab_size), np.float32)
            assert (after.shape, after.dtype) == ((16, 30), np.int64)
            final = lm.get_final(states)
            for row, history in enumerate(histories):
                expected = [files.oracle.score(history, w).log10_prob for w in ids]
                assert scores[row].tobytes() == np.array(expected, np.float32).tobytes()
                end = files.oracle.score(history, files.oracle.vocabulary.end_id)
                assert final[row] == end.log10_prob
            chosen = rng.integers(0, 30, 16)
            states = after[np.arange(16), chosen]
            for history, token in zip(histories, chosen.tolist(), strict=True):
                history.append(ids[token])


def test_states_that_are_not_integers_are_refused(files: ModelFiles) -> None:
    """Cut to integers, they would be other states; no state at all is fine."""
    with Client.local(files.directory) as client:
        lm = TokenLM(client.utterance())
        for states in ([0.0, 1.7], np.array([2.0]), [True]):
            kind = str(np.asarray(states).dtype)
            for ask in (lm.advance, lm.get_final):
                with pytest.raises(QueryError, match=kind):
                    ask(states)  # type: ignore[arg-type]
        assert lm.advance([])[0].shape == (0, lm.vocab_size)
        assert lm.advance(np.array([0], np.uint8))[0].shape == (1, lm.vocab_size)


def test_equal_numbers_are_equal_contexts_and_a_batch_is_one_message_per_shard(
    files: ModelFiles,
) -> None:
    """Rows that are there are not fetched again; with room for one the answers are the same."""
    with Cluster(files) as running, Client.connect(running.addresses) as client:
        lm, small = TokenLM(client.utterance()), TokenLM(client.utterance(), max_bytes=1)
        assert lm.vocab_size == files.manifest.vocabulary_size
        scores, after = lm.advance(lm.get_init_states(1))
        states = after[0]
        before = client.stats.messages
        wide, beyond = lm.advance(states)
        assert client.stats.messages - before <= files.manifest.shards
        before = client.stats.messages
        again, same = lm.advance(states[::-1])
        assert client.stats.messages == before
        assert np.array_equal(again[::-1], wide)
        assert np.array_equal(same[::-1], beyond)
        other = small.advance(small.advance(small.get_init_states(1))[1][0])
        assert np.array_equal(other[0], wide)
        # The same numbers, as both met the states in the same order.
        assert np.array_equal(other[1], beyond)
        extension = client.utterance().extend([client.utterance().begin()], [3, 4])
        assert len(set(states[3:5].tolist())) == len(set(extension.states.reshape(-1)))
        lm.clear()
        assert np.array_equal(lm.advance(lm.get_init_states(2))[0], np.repeat(scores, 2, axis=0))


def test_scores_are_natural_logarithms_unless_asked_otherwise(files: ModelFiles) -> None:
    """As NeMo's; a token may stand for the sentence end."""
    with Client.local(files.directory) as client:
        tokens = ["w1", "w2", "<blank-that-the-model-lacks>"]
        natural = TokenLM(client.utterance(), tokens)
        plain = TokenLM(client.utterance(), tokens, natural=False)
        start = natural.get_init_states(1)
        scores, _ = plain.advance(start)
        assert natural.advance(start)[0] == pytest.approx(LN_10 * scores)
        assert natural.advance(start, eos_id=2)[0][0, 2] == natural.get_final(start)[0]
        assert natural.advance(start, eos_id=2)[0][0, 0] == natural.advance(start)[0][0, 0]


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    """Unknown states, tokens and ends; a model of one order is fine."""
    files = build(random_model(1, order=1, words=5), tmp_path, 1)
    with Client.local(files.directory) as client:
        lm = TokenLM(client.utterance(), ["w1", 2])
        scores, after = lm.advance(lm.get_init_states(3))
        assert np.array_equal(after, np.zeros((3, 2)))
        assert np.isfinite(scores).all()
        for state in (999, -1):
            with pytest.raises(QueryError, match=f"state {state} "):
                lm.advance([state])
        with pytest.raises(QueryError, match="eos_id"):
            lm.advance([0], eos_id=2)
        with pytest.raises(QueryError, match="word ids"):
            TokenLM(client.utterance(), [10**6])
