"""What is approximated: a network that users trained, asked for samples and distributions.

Sentences are sampled in a batch, a word of each at a time, and at every history that a sample
visits the network's whole distribution is taken: what it gives to words that were not drawn counts
as well (Rao-Blackwell), so that few samples go far.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dlm.distill.count import Visit
from dlm.errors import ConfigError
from dlm.federated import rnn
from dlm.federated.provenance import Provenance
from dlm.federated.tokens import BOS_ID, EOS_ID, FIRST_WORD_ID
from dlm.federated.train import load_model
from dlm.federated.words import WordList
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE, Vocabulary

MOST_WORDS = 200  # of a sampled sentence, which is cut there
BATCH = 256


class Source(Protocol):
    """What can be distilled by samples."""

    vocabulary: Vocabulary
    record: Provenance

    def visits(self, samples: int, seed: int) -> Iterator[Visit]:
        """The histories of sampled sentences, in steps; the same for the same arguments."""


class NetworkSource:
    """The released network of a run of `dlm federate`.

    Raises
        ConfigError   a run without a vocabulary, or with wordpieces
        FormatError, PrivacyError  as `federated.train.load_model`
    """

    def __init__(self, run: Path, *, batch: int = BATCH) -> None:
        model = load_model(run)
        if model.vocabulary is None:
            raise ConfigError(f"{run} has no vocabulary: its ids cannot be made words")
        words = model.vocabulary.words
        if not isinstance(words, WordList):
            raise ConfigError(
                f"{run} was trained on wordpieces, which are not distilled yet; train on words"
            )
        marks = [b"<unk>", BEGIN_SENTENCE, END_SENTENCE]
        assert len(marks) == FIRST_WORD_ID
        self.vocabulary = Vocabulary(
            [*marks, *(word.encode() for word in words.words)], unk_in_model=True
        )
        self.record = model.record
        self.rounds = model.rounds
        self._network, self._params, self._batch = model.network, model.params, batch

    def log_probs(
        self, prefixes: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """ln P of each word after each prefix, which begins with `<s>`.

        Shapes
            prefixes  (b, t)  int32  what is behind `lengths` does not count
            lengths   (b,)    int32  1 to t
            returns   (b, v)  float32
        """
        logits = rnn.apply(self._params, self._network, jnp.maximum(jnp.asarray(prefixes), 0))
        last = logits[jnp.arange(len(prefixes)), jnp.asarray(lengths) - 1]
        return np.asarray(jax.nn.log_softmax(_without_begin(last), axis=-1))

    def visits(self, samples: int, seed: int) -> Iterator[Visit]:
        """As `Source` has it; a place of the batch that ends a sentence begins the next."""
        batch = min(self._batch, samples)
        left = np.full(batch, samples // batch)
        left[: samples % batch] += 1
        token = np.full(batch, BOS_ID, np.int32)
        said = np.zeros(batch, np.int64)
        state = rnn.initial_state(self._network, batch)
        step = jax.jit(partial(_step, config=self._network))
        key = jax.random.key(seed)
        live = left > 0
        while live.any():
            key, drawn_by = jax.random.split(key)
            found = step(self._params, state, token, token == BOS_ID, drawn_by)
            given, entropy, drawn, state = found
            places = np.flatnonzero(live)
            yield Visit(
                token[places].astype(np.uint32),
                places,
                np.asarray(given)[places],
                np.asarray(entropy)[places],
            )
            said += 1
            token = np.array(drawn)
            ended = (token == EOS_ID) | (said >= MOST_WORDS)
            left[ended] -= 1
            live = left > 0
            token[ended], said[ended] = BOS_ID, 0


def _step(
    params: rnn.Params, state: rnn.State, token: Any, begins: Any, key: Any,
    *, config: rnn.RnnConfig,
) -> tuple[Any, Any, Any, rnn.State]:  # fmt: skip
    """The distributions after a word of each sentence, their entropies, draws, and the state."""
    state = [tuple(jnp.where(begins[:, None], 0.0, part) for part in layer) for layer in state]
    logits, state = rnn.run(params, config, state, token[:, None])
    logits = _without_begin(logits[:, 0])
    ln_given = jax.nn.log_softmax(logits, axis=-1)
    given = jnp.exp(ln_given)
    entropy = -jnp.where(given > 0, given * ln_given, 0.0).sum(-1)
    return given, entropy, jax.random.categorical(key, logits), state


def _without_begin(logits: Any) -> Any:
    """`<s>` begins sentences and is never said."""
    return logits.at[..., BOS_ID].set(-jnp.inf)
