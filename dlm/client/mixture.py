"""Does everything that a mixture's calls need, except waiting; see `Mixture`.

As for utterances (`base_utterance`), a call is a generator that yields whatever must be waited for.
P(word) is the weighted sum of the members' probabilities, each after the member's own state. All
members are queried before the call waits for any member.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlm.client.base_utterance import Asking, Steps
from dlm.client.core import Asked
from dlm.client.inputs import check_sequence
from dlm.client.states import LOCAL_MODEL, Extension, SentenceScore, State, States
from dlm.client.utterance import AsyncUtterance, Utterance, WithBlocks, awaited, waited
from dlm.errors import ModelMismatch, ModelSwitched, QueryError
from dlm.estimate.merge.heldout import Heldout
from dlm.estimate.merge.weights import check_weights, tune
from dlm.ngram.vocab import BEGIN_SENTENCE, UNK_ID, as_text
from dlm.units import LN_10

T = TypeVar("T")
U = TypeVar("U", bound=WithBlocks)
MixtureState = tuple[State, ...]

# Rules by which a member scores a word that only other members have.
ZERO, SHARED, WHOLE = "zero", "shared", "whole"


@dataclass(frozen=True, eq=False)
class MixtureStates:
    """States of a mixture in an array of any shape. An index gives a part of the array, or one
    state, which is a tuple of the members' states."""

    parts: tuple[States, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    def __len__(self) -> int:
        return len(self.parts[0])

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        found = tuple(part[index] for part in self.parts)
        return found if isinstance(found[0], State) else MixtureStates(found)

    def reshape(self, *shape: int) -> MixtureStates:
        return MixtureStates(tuple(part.reshape(*shape) for part in self.parts))

    def keys(self) -> list[bytes]:
        """See `States.keys`."""
        return [b"".join(each) for each in zip(*(part.keys() for part in self.parts), strict=True)]


@dataclass(frozen=True, eq=False)
class MixtureExtension:
    """K states extended by W words.

    Shapes
        log10_prob  (K, W)  float32  of the mixture
        states      (K, W)           the state after each word
        source      (K, W)  uint8    the largest source of any member: not `FULL` if a server failed
        oov         (K, W)  bool     no member has the word
        bonus       (K, W)  float32  what phrases add, as in `Extension`; None without phrases
        members                      the `Extension` of each member
    """

    log10_prob: NDArray[np.float32]
    states: MixtureStates
    source: NDArray[np.uint8]
    oov: NDArray[np.bool_]
    bonus: NDArray[np.float32] | None
    members: tuple[Extension, ...]

    @property
    def biased(self) -> NDArray[np.float64]:
        """(K, W) float64: the log10 probability plus the bonus."""
        exact = self.log10_prob.astype(np.float64)
        return exact if self.bonus is None else exact + self.bonus


class BaseMixture(Generic[U]):
    """Utterances whose models are mixed; the base of `Mixture` and `AsyncMixture`."""

    _member: ClassVar[type[WithBlocks]]

    def __init__(self, members: Sequence[tuple[U, float]], *, unknown: str = ZERO) -> None:
        check_sequence(members, "members", "a sequence of pairs of an utterance and its weight")
        for member in members:
            if not (
                isinstance(member, tuple)
                and len(member) == 2
                and isinstance(member[0], self._member)
            ):
                raise QueryError(
                    f"a member of the {type(self).__name__} is not a pair of an "
                    f"{self._member.__name__} and its weight; expected "
                    "[(client.utterance(), 0.7), ...]"
                )
        if not members:
            raise QueryError("the mixture has no members; expected one or more")
        if unknown not in (ZERO, SHARED, WHOLE):
            raise QueryError(f"unknown={unknown!r}; expected {ZERO!r}, {SHARED!r} or {WHOLE!r}")
        self.members = tuple(utterance for utterance, _ in members)
        self.unknown = unknown
        weights = check_weights([weight for _, weight in members], len(members))
        self.weights: tuple[float, ...] = tuple(weights.tolist())
        with np.errstate(divide="ignore"):
            self._log10_weights = np.log10(weights)
        kinds = [member.model_info.kind for member in self.members]
        if LOCAL_MODEL in kinds and len(set(kinds)) > 1:
            raise ModelSwitched(
                f"{kinds.count(LOCAL_MODEL)} of {len(kinds)} members use their local fallback, "
                "because their servers are failing, so the weights no longer suit the models in "
                "use. Open all utterances again later, or leave these members out"
            )
        # Reading the property `phrases` would fix a member to a model that was just replaced.
        biased = [at for at, one in enumerate(self.members) if one._inputs.phrases is not None]
        if len(biased) > 1:
            raise QueryError(
                f"{len(biased)} members have phrases, whose bonuses would count more than once; "
                "give phrases to one member only"
            )
        self._biased = biased[0] if biased else None

    def __repr__(self) -> str:
        pairs = zip(self.weights, self.members, strict=True)
        parts = ", ".join(f"{weight:g} {member!r}" for weight, member in pairs)
        return f"{type(self).__name__}({parts})"

    @classmethod
    def even(cls, members: Sequence[U], unknown: str = ZERO) -> Self:
        """Makes a mixture with equal weights."""
        check_sequence(members, "members", "a sequence of utterances")
        return cls([(member, 1.0 / len(members)) for member in members], unknown=unknown)

    def begin(self) -> MixtureState:
        """The state at the beginning of a sentence."""
        return tuple(member.begin() for member in self.members)

    def null(self) -> MixtureState:
        """The state whose context is empty."""
        return tuple(member.null() for member in self.members)

    def finish(self, state: MixtureState) -> float:
        """See `Utterance.finish`."""
        parts = zip(self.members, self._parts([state]), strict=True)
        return sum(member.finish(one) for member, (one,) in parts)

    @property
    def words(self) -> list[bytes]:
        """All words of the members, each once; the unknown word first."""
        return self._union[0]

    # -- what each call does ------------------------------------------------------------------

    def _extend(
        self,
        states: MixtureStates | Sequence[MixtureState],
        words: Any,
        deadline_s: float | None,
    ) -> Steps[MixtureExtension]:
        _check_strings(words)
        parts = self._parts(states)
        found = yield from _together(
            [
                member._extend(Asking(member, deadline_s), part, words)
                for member, part in zip(self.members, parts, strict=True)
            ]
        )
        oov = np.array([one.oov for one in found])
        return MixtureExtension(
            self._mixed(np.array([one.log10_prob for one in found]), oov),
            MixtureStates(tuple(one.states for one in found)),
            np.array([one.source for one in found]).max(axis=0),
            np.asarray(oov.all(axis=0)),
            None if self._biased is None else found[self._biased].bonus,
            tuple(found),
        )

    def _score_sentences(
        self, sentences: Sequence[Any], bos: bool, eos: bool, deadline_s: float | None
    ) -> Steps[list[SentenceScore]]:
        out = []
        scores = yield from self._sentences(sentences, bos, eos, deadline_s)
        for each in zip(*scores, strict=True):
            lacked = np.array([one.token_oov for one in each])
            prob = self._mixed(np.array([one.token_log10_prob for one in each]), lacked)
            oov = lacked.all(axis=0)
            out.append(
                replace(
                    each[0],
                    log10_prob=float(prob.sum(dtype=np.float64)),
                    oovs=int(oov.sum()),
                    log10_oovs=float(prob[oov].sum(dtype=np.float64)),
                    token_log10_prob=prob,
                    token_matched_order=np.array([o.token_matched_order for o in each]).max(axis=0),
                    token_oov=oov,
                    token_source=np.array([one.token_source for one in each]).max(axis=0),
                    bonus=sum(one.bonus for one in each),
                )
            )
        return out

    def _next_words(
        self, state: MixtureState, k: int, deadline_s: float | None
    ) -> Steps[list[tuple[str, np.float32]]]:
        if not isinstance(k, (int, np.integer)) or k < 1:
            raise QueryError(f"k is {k!r}; expected an integer, 1 or more")
        found = yield from self._next_distribution(state, deadline_s)
        words = np.array([at for at, word in enumerate(self.words) if word != BEGIN_SENTENCE])
        best = words[np.argsort(-found[words], kind="stable")[:k]]
        return [(as_text(self.words[at]), found[at]) for at in best.tolist()]

    def _next_distribution(
        self, state: MixtureState, deadline_s: float | None
    ) -> Steps[NDArray[np.float32]]:
        (states,) = zip(*self._parts([state]), strict=True)
        found = yield from _together(
            [
                member._next_distribution(Asking(member, deadline_s), one)
                for member, one in zip(self.members, states, strict=True)
            ]
        )
        if "_union" not in self.__dict__:  # slow for large models, so not on an event loop
            yield self._unite
        places = self._union[1]
        log10_prob = np.empty((len(found), len(self.words)), np.float32)
        oov = np.ones(log10_prob.shape, bool)
        for at, one in enumerate(found):
            log10_prob[at] = one[UNK_ID]
            log10_prob[at, places[at][1:]] = one[1:]
            oov[at, places[at][1:]] = False
        return self._mixed(log10_prob, oov)

    def _tuned_weights(
        self, sentences: Sequence[str], deadline_s: float | None
    ) -> Steps[tuple[float, ...]]:
        scores = yield from self._sentences(sentences, True, True, deadline_s)
        weights: list[float] = []
        yield lambda: weights.extend(self._best_weights(scores))  # an event loop goes on meanwhile
        return tuple(weights)

    def _best_weights(self, scores: list[list[SentenceScore]]) -> Sequence[float]:
        prob, known = [], []
        for each in zip(*scores, strict=True):
            oov = np.array([one.token_oov for one in each])
            prob.append(self._each(np.array([one.token_log10_prob for one in each]), oov))
            known.append(~oov)
        nothing = np.zeros((len(self.members), 0))
        probs = 10.0 ** np.concatenate([nothing, *prob], axis=1)
        knows = np.concatenate([nothing.astype(bool), *known], axis=1)
        in_any = np.asarray(knows.any(axis=0))
        return tune(Heldout(len(scores[0]), probs, probs, knows, in_any)).weights

    # -- within -------------------------------------------------------------------------------

    def _unite(self) -> None:
        _ = self._union

    @cached_property
    def _union(self) -> tuple[list[bytes], list[NDArray[np.int64]]]:
        places: dict[bytes, int] = {self.members[0].vocabulary.words[UNK_ID]: UNK_ID}
        found = []
        for member in self.members:
            words = member.vocabulary.words
            at = [UNK_ID, *(places.setdefault(word, len(places)) for word in words[1:])]
            found.append(np.array(at, np.int64))
        return list(places), found

    @cached_property
    def _log10_shares(self) -> NDArray[np.float64]:
        """(members,) for the rule "shared": log10 of the share of a member's P(<unk>) for each
        word that the member lacks."""
        lacked = [len(self.words) - len(member.vocabulary) for member in self.members]
        shares: NDArray[np.float64] = -np.log10(1.0 + np.array(lacked))
        return shares

    def _each(self, log10_prob: NDArray[np.float32], oov: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Returns (members, ...) log10 P, by the rule for words that a member lacks."""
        found = log10_prob.astype(np.float64)
        if self.unknown == ZERO:
            found[oov & ~oov.all(axis=0)] = -np.inf
        elif self.unknown == SHARED:
            shares = self._log10_shares.reshape(-1, *[1] * (oov.ndim - 1))
            found += np.where(oov, shares, 0.0)
        return found

    def _mixed(
        self, log10_prob: NDArray[np.float32], oov: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        each = self._each(log10_prob, oov)
        each += self._log10_weights.reshape(-1, *[1] * (oov.ndim - 1))
        found = np.logaddexp.reduce(each * LN_10, axis=0) / LN_10
        return np.asarray(found, np.float32)

    def _sentences(
        self, sentences: Sequence[Any], bos: bool, eos: bool, deadline_s: float | None
    ) -> Steps[list[list[SentenceScore]]]:
        if not isinstance(sentences, (str, bytes)):  # members refuse a string
            _check_strings(sentences)
        found = yield from _together(
            [
                member._score_sentences(Asking(member, deadline_s), sentences, bos, eos)
                for member in self.members
            ]
        )
        return found

    def _parts(
        self, states: MixtureStates | Sequence[MixtureState]
    ) -> Sequence[States | list[State]]:
        if isinstance(states, MixtureStates):
            if len(states.parts) != len(self.members):
                raise ModelMismatch(
                    f"the states belong to a mixture of {len(states.parts)} models; expected "
                    f"{len(self.members)}"
                )
            return states.parts
        if isinstance(states, tuple) and states and isinstance(states[0], State):
            raise QueryError("found one state; expected a sequence of states: pass [state]")
        check_sequence(states, "states", "a sequence of states from begin() or extend()")
        for state in states:
            if not isinstance(state, tuple) or len(state) != len(self.members):
                raise ModelMismatch(
                    f"a state of this mixture is a tuple of {len(self.members)} states; found one "
                    f"of another length or type: {type(state).__name__}"
                )
        return [[state[at] for state in states] for at in range(len(self.members))]


def _check_strings(words: Any) -> None:
    if isinstance(words, (str, bytes)) or not hasattr(words, "__iter__"):
        return  # members raise the error for this
    for word in words:
        if isinstance(word, (int, np.integer)):
            raise QueryError(
                f"found the word id {word}; a mixture's models have different ids, so give words "
                "as strings"
            )
        if not isinstance(word, (str, bytes)):
            _check_strings(word)


def _together(steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Returns the results of several calls, which all send their messages before any call waits.
    If a call fails, the others are cancelled."""
    results: dict[int, T] = {}
    waits: dict[int, tuple[Asked, float]] = {}  # the calls waited for, and until when (`monotonic`)

    def go_on(at: int) -> Steps[None]:
        """Runs a call until it waits for messages, or ends."""
        try:
            while not isinstance(wait := next(steps[at]), tuple):
                yield wait
        except StopIteration as end:
            waits.pop(at, None)
            results[at] = end.value
        else:
            waits[at] = wait[0], time.monotonic() + wait[1]

    try:
        for at in range(len(steps)):
            yield from go_on(at)
        while waits:
            at, (call, until) = next(iter(waits.items()))
            yield call, max(until - time.monotonic(), 0.0)
            yield from go_on(at)
        return [results[at] for at in range(len(steps))]
    finally:
        for one in steps:
            one.close()


# -------------------------------------------------------------------------------------------------
# Several models as one, mixed word by word: a general model and a domain's, say.
#
#     mixture = Mixture([(general.utterance(), 0.7), (radiology.utterance(), 0.3)])
#     first = mixture.extend([mixture.begin()], ["the", "a", "there"])
#
# Models have different ids, so words are strings. `AsyncMixture` is the same for asyncio.


class Mixture(BaseMixture[Utterance]):
    """Utterances whose models are mixed; one thread at a time.

    Args
        members  utterances, of one client or of several, and their weights, which sum to 1. At most
                 one utterance has phrases, which count for the whole mixture
        unknown  how a member scores a word that only other members have:
                 "zero": as probability 0, so that all words sum to 1 (SRILM without -unk, and `dlm
                 merge`); "shared": as an equal share of the member's P(<unk>), which the unknown
                 word and all words that the member lacks share, so that all words sum to 1
                 (OpenGrm's OOV class); "whole": as P(<unk>), so that the sum exceeds 1 (SRILM with
                 -unk). A word that no member has gets P(<unk>), or one share with "shared"
    Raises
        ConfigError    weights that are not numbers >= 0, or do not sum to 1
        QueryError     no members, an unknown rule, or phrases in several members
        ModelSwitched  only some members are on their local fallback: open all utterances again
    """

    _member = Utterance

    @classmethod
    def tuned(
        cls,
        members: Sequence[Utterance],
        sentences: Sequence[str],
        *,
        unknown: str = ZERO,
        deadline_s: float | None = None,
    ) -> Mixture:
        """Makes the mixture that makes held-out sentences most probable (`dlm merge --tune`).

        Raises  EstimationError  no word of the sentences is in any model;  see `Mixture`
        """
        weights = waited(cls.even(members, unknown)._tuned_weights(sentences, deadline_s))
        return cls(list(zip(members, weights, strict=True)), unknown=unknown)

    def extend(
        self,
        states: MixtureStates | Sequence[MixtureState],
        words: Any,
        *,
        deadline_s: float | None = None,
    ) -> MixtureExtension:
        """Extends each of K states by W words, see `Utterance.extend`; words are strings.

        Cost    that of the slowest member
        Raises  ModelMismatch, QueryError, and what members raise, since a score needs all members
        """
        return waited(self._extend(states, words, deadline_s))

    def score_sentences(
        self,
        sentences: Sequence[Any],
        *,
        bos: bool = True,
        eos: bool = True,
        deadline_s: float | None = None,
    ) -> list[SentenceScore]:
        """Scores whole sentences, see `Utterance.score_sentences`; words are strings."""
        return waited(self._score_sentences(sentences, bos, eos, deadline_s))

    def next_words(
        self, state: MixtureState, k: int, *, deadline_s: float | None = None
    ) -> list[tuple[str, np.float32]]:
        """Returns the `k` most probable next words: (word, log10 P), best first. The sentence end
        and `words[0]`, the unknown word, may be among them, but never <s>."""
        return waited(self._next_words(state, k, deadline_s))

    def next_distribution(
        self, state: MixtureState, *, deadline_s: float | None = None
    ) -> NDArray[np.float32]:
        """(U,) float32: log10 P of each of `words` after a state."""
        return waited(self._next_distribution(state, deadline_s))


class AsyncMixture(BaseMixture[AsyncUtterance]):
    """A `Mixture` for asyncio, of utterances of `AsyncClient`; methods that wait are coroutines.

    Raises  ConfigError  a client has not connected yet: use `await client.utterance()`;
            see `Mixture`
    """

    _member = AsyncUtterance

    @classmethod
    async def tuned(
        cls,
        members: Sequence[AsyncUtterance],
        sentences: Sequence[str],
        *,
        unknown: str = ZERO,
        deadline_s: float | None = None,
    ) -> AsyncMixture:
        """See `Mixture.tuned`."""
        weights = await awaited(cls.even(members, unknown)._tuned_weights(sentences, deadline_s))
        return cls(list(zip(members, weights, strict=True)), unknown=unknown)

    async def extend(
        self,
        states: MixtureStates | Sequence[MixtureState],
        words: Any,
        *,
        deadline_s: float | None = None,
    ) -> MixtureExtension:
        """See `Mixture.extend`."""
        return await awaited(self._extend(states, words, deadline_s))

    async def score_sentences(
        self,
        sentences: Sequence[Any],
        *,
        bos: bool = True,
        eos: bool = True,
        deadline_s: float | None = None,
    ) -> list[SentenceScore]:
        """See `Mixture.score_sentences`."""
        return await awaited(self._score_sentences(sentences, bos, eos, deadline_s))

    async def next_words(
        self, state: MixtureState, k: int, *, deadline_s: float | None = None
    ) -> list[tuple[str, np.float32]]:
        """See `Mixture.next_words`."""
        return await awaited(self._next_words(state, k, deadline_s))

    async def next_distribution(
        self, state: MixtureState, *, deadline_s: float | None = None
    ) -> NDArray[np.float32]:
        """See `Mixture.next_distribution`."""
        return await awaited(self._next_distribution(state, deadline_s))
