"""The network of a run of `dlm federate` as a source: it follows sentences one word at a time, and
keeps the state of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts.count import Visit
from dlm.distill.counts.visits import drawn
from dlm.distill.sources.source import BATCH
from dlm.errors import ConfigError
from dlm.federated.tokens import BOS_ID, FIRST_WORD_ID
from dlm.federated.training import rnn
from dlm.federated.training.trained import load_model
from dlm.federated.words import WordList
from dlm.ngram.vocab import MARKS, Vocabulary


class NetworkSource:
    """The released network of a run of `dlm federate`; raises what `training.trained.load_model`
    does. `inventory` has the network's wordpieces, which `PieceSource` turns into words; None if
    the network predicts whole words."""

    def __init__(self, run: Path, *, batch: int = BATCH) -> None:
        model = load_model(run)
        if model.vocabulary is None:
            raise ConfigError(
                f"{run} has no vocabulary that turns ids into words; train with a vocabulary"
            )
        words = model.vocabulary.words
        self.inventory = None if isinstance(words, WordList) else words
        names = words.words if isinstance(words, WordList) else words.pieces()[FIRST_WORD_ID:]
        assert len(MARKS) == FIRST_WORD_ID
        self.vocabulary = Vocabulary(
            [*MARKS, *(name.encode() for name in names)], unk_in_model=True
        )
        self.record = model.record
        self.rounds = model.rounds
        self._network, self._params, self._batch = model.network, model.params, batch
        self._step = jax.jit(partial(_step, config=self._network))  # compiled once for all blocks

    def log_probs(
        self, prefixes: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        logits = rnn.apply(self._params, self._network, jnp.maximum(jnp.asarray(prefixes), 0))
        last = logits[jnp.arange(len(prefixes)), jnp.asarray(lengths) - 1]
        return np.asarray(jax.nn.log_softmax(_without_begin(last), axis=-1))

    def histories(self, places: int) -> NetworkHistories:
        return NetworkHistories(self._network, partial(self._step, self._params), places)

    def visits(self, samples: int, seed: int) -> Iterator[Visit]:
        places = min(self._batch, samples)
        number = np.random.SeedSequence((seed,))
        return drawn(self.histories(places), self.vocabulary, samples, number, places)


class NetworkHistories:
    """Implements `source.Histories` for a network: holds the states of the layers by place. `step`
    is the network's `_step`."""

    def __init__(self, network: rnn.RnnConfig, step: Callable[..., Any], places: int) -> None:
        self._state = rnn.initial_state(network, places)
        self._words = np.full(places, BOS_ID, np.int32)
        self._step = step

    def advance(
        self, words: NDArray[np.uint32], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns the distributions and entropies at some places; resets the others to `<s>`."""
        self._words[:] = BOS_ID
        self._words[places] = words
        begins = self._words == BOS_ID
        given, entropy, self._state = self._step(self._state, self._words, begins)
        return np.asarray(given)[places], np.asarray(entropy)[places]


def _step(
    params: rnn.Params, state: rnn.State, words: Any, begins: Any, *, config: rnn.RnnConfig
) -> tuple[Any, Any, rnn.State]:
    state = [tuple(jnp.where(begins[:, None], 0.0, part) for part in layer) for layer in state]
    logits, state = rnn.run(params, config, state, words[:, None])
    ln_given = jax.nn.log_softmax(_without_begin(logits[:, 0]), axis=-1)
    given = jnp.exp(ln_given)
    entropy = -jnp.where(given > 0, given * ln_given, 0.0).sum(-1)
    return given, entropy, state


def _without_begin(logits: Any) -> Any:
    """Returns the logits with -inf for `<s>`, which is never predicted."""
    return logits.at[..., BOS_ID].set(-jnp.inf)
