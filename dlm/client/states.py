"""Input and output of utterances: states, and scores with the states that follow.

Each state carries its `ModelInfo`, so a sentence never mixes the scores of two models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ModelMismatch, QueryError

FULL_MODEL, LOCAL_MODEL = "full", "local_fallback"

# A state as bytes has STATE_VERSION, the first bytes of the model's id, the number of words, and
# order - 1 word ids, uint32 LE, right-aligned, zero where unused. With phrases, the version is
# PHRASE_STATE_VERSION, and the first bytes of the phrases' digest and the node, uint32 LE, come
# before the number of words. DO NOT CHANGE: programs store these bytes.
STATE_VERSION, PHRASE_STATE_VERSION, MODEL_BYTES, PHRASES_BYTES = 1, 2, 8, 8


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model to which a state belongs, and the shard set on which the model was opened.

    kind     "full", or "local_fallback" for the local model of a client whose servers fail
    phrases  digest of the utterance's phrases; "" for none
    """

    kind: str
    model: str
    shard_set: str
    phrases: str = field(default="", repr=False)

    def check(self, found: ModelInfo) -> None:
        """Raises `ModelMismatch` unless a state of model `found` can be used with this model."""
        if found is not self and found != self:
            if found.phrases != self.phrases:
                raise ModelMismatch(
                    "the state comes from an utterance whose phrases differ from those of this "
                    "utterance; use the same phrases throughout a sentence"
                )
            raise ModelMismatch(
                f"a state of the {found.kind} model {found.model} (shard set {found.shard_set}) "
                f"was given to an utterance of the {self.kind} model {self.model} "
                f"(shard set {self.shard_set}). Begin the sentence again: it cannot mix the scores "
                "of two models"
            )


@lru_cache(maxsize=64)
def model_info_of(kind: str, model: str, shard_set: str, phrases: str = "") -> ModelInfo:
    """Returns the same object for all utterances on a model, so that comparisons are quick."""
    return ModelInfo(kind, model, shard_set, phrases)


@dataclass(frozen=True, slots=True)
class State:
    """The words so far that still matter for later scores; opaque, hashable, picklable.

    Two states of one model are equal exactly if every continuation scores the same by the n-grams
    the model has (KenLM's rule: the longest suffix that an n-gram extends or that has a back-off
    weight), so hypotheses with equal states can be recombined.
    """

    model_info: ModelInfo
    _words: tuple[int, ...]

    def __len__(self) -> int:
        return len(self._words)


@dataclass(frozen=True, slots=True)
class PhraseState(State):
    """A state of an utterance with phrases. Equal states also end in the same beginning of a phrase
    (`_node`, see `dlm.client.phrases`)."""

    _node: int = 0


@dataclass(frozen=True, eq=False)
class States:
    """States of one model_info in an array of any shape; index it to get a `State` or a part.

    Shapes
        _contexts  shape + (order - 1,)  uint32  right-aligned, zero where unused
        _lengths   shape                 uint8
        _nodes     shape                 int32   None without phrases
    """

    model_info: ModelInfo
    _contexts: NDArray[np.uint32]
    _lengths: NDArray[np.uint8]
    _nodes: NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._lengths.shape

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        lengths = self._lengths[index]
        # An ellipsis must stop before the last axis, which holds the words of a state.
        inner = index if isinstance(index, tuple) else (index,)
        contexts = self._contexts[(*inner, slice(None))]
        nodes = None if self._nodes is None else self._nodes[index]
        if np.ndim(lengths) == 0:
            words = contexts[contexts.shape[-1] - int(lengths) :].tolist()
            if nodes is not None:
                return PhraseState(self.model_info, tuple(words), int(nodes))
            return State(self.model_info, tuple(words))
        return States(self.model_info, contexts, lengths, nodes)

    @classmethod
    def joined(cls, parts: Sequence[States]) -> States:
        """Joins the states of all arrays, one after the other, in one dimension.

        Raises  ModelMismatch, QueryError (if there are no parts)
        """
        if not parts:
            raise QueryError("found no arrays of states to join; expected at least one")
        for part in parts:
            parts[0].model_info.check(part.model_info)
        flat = [part.reshape(-1) for part in parts]
        nodes = [part._nodes for part in flat if part._nodes is not None]
        return cls(
            parts[0].model_info,
            np.concatenate([part._contexts for part in flat]),
            np.concatenate([part._lengths for part in flat]),
            np.concatenate(nodes) if nodes else None,
        )

    def keys(self) -> list[bytes]:
        """Returns a bytes key for each state of the flattened array. Within a model, two keys are
        equal exactly if their states are. This is many times faster than creating each `State`."""
        flat = self.reshape(-1)
        words = np.column_stack([flat._lengths.astype(np.uint32), flat._contexts])
        if flat._nodes is not None:
            words = np.column_stack([flat._nodes.astype(np.uint32), words])
        step, content = words.itemsize * words.shape[1], words.tobytes()
        return [content[at : at + step] for at in range(0, len(content), step)]

    def to_bytes(self) -> list[bytes]:
        """Encodes each state of the flattened array as bytes for other processes, which read them
        with `states_from_bytes` of an utterance that has the same model and phrases. The bytes of
        two states are equal exactly if the states are."""
        rows = self.packed()
        each: list[bytes] = rows.view(f"V{rows.shape[1]}").ravel().tolist()
        return each

    def packed(self) -> NDArray[np.uint8]:
        """The states as rows of one array; see `to_bytes`."""
        flat = self.reshape(-1)
        head, size = state_head(self.model_info)
        rows = np.empty((len(flat), size + 1 + 4 * flat._contexts.shape[1]), np.uint8)
        rows[:, : len(head)] = np.frombuffer(head, np.uint8)
        if flat._nodes is not None:
            rows[:, len(head) : size] = flat._nodes.astype("<u4")[:, None].view(np.uint8)
        rows[:, size] = flat._lengths
        rows[:, size + 1 :] = np.ascontiguousarray(flat._contexts, "<u4").view(np.uint8)
        return rows

    def each(self) -> list[NDArray[np.uint32]]:
        """Returns the word ids of each state of the flattened array, most recent word last."""
        flat = self.reshape(-1)
        width = flat._contexts.shape[1]
        return [
            np.ascontiguousarray(context[width - length :])
            for context, length in zip(flat._contexts, flat._lengths.tolist(), strict=True)
        ]

    def reshape(self, *shape: int) -> States:
        lengths = self._lengths.reshape(*shape)
        return States(
            self.model_info,
            self._contexts.reshape(*lengths.shape, self._contexts.shape[-1]),
            lengths,
            None if self._nodes is None else self._nodes.reshape(*shape),
        )

    def contexts(self) -> list[tuple[int, ...]]:
        """The word ids that each state of the flattened array keeps, most recent last."""
        flat = self.reshape(-1)
        width = flat._contexts.shape[-1]
        rows = zip(flat._contexts.tolist(), flat._lengths.tolist(), strict=True)
        return [tuple(row[width - length :]) for row, length in rows]


def state_head(model_info: ModelInfo) -> tuple[bytes, int]:
    """Returns the bytes with which each state of a model begins, and the offset of the number of
    words in a state; with phrases, the node stands just before that number."""
    model = bytes.fromhex(model_info.model)[:MODEL_BYTES]
    if not model_info.phrases:
        return bytes([STATE_VERSION]) + model, 1 + len(model)
    phrases = bytes.fromhex(model_info.phrases)[:PHRASES_BYTES]
    head = bytes([PHRASE_STATE_VERSION]) + model + phrases
    return head, len(head) + 4


@dataclass(frozen=True, eq=False)
class Extension:
    """The result of extending K states by W words.

    Shapes
        log10_prob     (K, W)  float32
        matched_order  (K, W)  uint8   order of the longest n-gram found
        ngram_length   (K, W)  uint8   that n-gram's length, as KenLM counts it
        states         (K, W)          the state after each word
        source         (K, W)  uint8   `FULL`, or `BIGRAM_FALLBACK` where no shard answered in time;
                                       all `LOCAL_FALLBACK` if the local fallback answered
        oov            (K, W)  bool    whether the word is scored as the unknown word, since the
                                       vocabulary lacks it
        bonus          (K, W)  float32 log10 bonus in steps of 2^-10; None without phrases
    """

    log10_prob: NDArray[np.float32]
    matched_order: NDArray[np.uint8]
    ngram_length: NDArray[np.uint8]
    states: States
    source: NDArray[np.uint8]
    oov: NDArray[np.bool_]
    bonus: NDArray[np.float32] | None = None

    @property
    def biased(self) -> NDArray[np.float64]:
        """(K, W) float64: the sum of the log10 probability and the bonus."""
        exact = self.log10_prob.astype(np.float64)
        return exact if self.bonus is None else exact + self.bonus


@dataclass(frozen=True, eq=False)
class SentenceScore:
    """A sentence's score.

    log10_prob   sum over its tokens, in float64
    tokens       number of words, plus one if the sentence end was scored
    oovs         number of tokens that the vocabulary lacks
    log10_oovs   sum over the tokens that the vocabulary lacks
    token_log10_prob (tokens,) float32; token_matched_order (tokens,) uint8;
    token_oov (tokens,) bool; token_source (tokens,) uint8, `FULL`, `BIGRAM_FALLBACK` or
    `LOCAL_FALLBACK`
    bonus        log10, the sum of the bonuses of all occurrences of phrases
    """

    log10_prob: float
    tokens: int
    oovs: int
    log10_oovs: float
    token_log10_prob: NDArray[np.float32]
    token_matched_order: NDArray[np.uint8]
    token_oov: NDArray[np.bool_]
    token_source: NDArray[np.uint8]
    bonus: float = 0.0

    @property
    def biased(self) -> float:
        """The sum of the log10 probability and the bonus."""
        return self.log10_prob + self.bonus
