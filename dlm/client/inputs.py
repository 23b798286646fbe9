"""Checks callers' input (words, contexts, sentences, states) and turns it into arrays of ids.

A large call becomes several `Queries`, so that the utterance can look at the clock between them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.client import kernels, router
from dlm.client.phrases import BoundPhrases, Phrases, split_parts
from dlm.client.router import Snapshot
from dlm.client.states import PhraseState, State, States, model_info_of, state_head
from dlm.errors import ModelMismatch, QueryError
from dlm.ngram.query import Answers
from dlm.ngram.vocab import UNK_ID, Vocabulary
from dlm.units import counted

Word: TypeAlias = str | bytes | int
Sentence: TypeAlias = str | bytes | Sequence[Word]

# Queries planned at a time. Planning takes a few milliseconds, or about ten if words are strings.
PART = 4096


class Queries(NamedTuple):
    """Contexts, right-aligned, and the words for each, one context after the other.

    Shapes  contexts (K, order - 1) uint32; lengths (K,) uint8; counts (K,) uint32; words (Q,);
            with phrases, else None: nodes (K,) int32 of the states; spoken (Q,) the words as given,
            while `words` has the unknown word in place of words that the model lacks
    """

    contexts: NDArray[np.uint32]
    lengths: NDArray[np.uint8]
    counts: NDArray[np.uint32]
    words: NDArray[np.uint32]
    nodes: NDArray[np.int32] | None = None
    spoken: NDArray[np.uint32] | None = None


# The parts of a call, each with the number of queries in the parts after it, as far as known.
Parts: TypeAlias = Iterator[tuple[Queries, int]]


def check_sequence(value: Any, name: str, expected: str = "a sequence of words") -> None:
    """Raises `QueryError` unless the value is a sequence and not a string."""
    kind = type(value)
    if kind is list or kind is tuple or (kind is np.ndarray and value.ndim):
        return
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        found = "one string"
    elif isinstance(value, np.ndarray) and value.ndim == 0:
        found = "an array without dimensions"
    elif isinstance(value, Mapping) or not (
        hasattr(value, "__len__") and hasattr(value, "__getitem__")
    ):
        found = "None" if value is None else f"of type {kind.__name__}"
    else:
        return
    raise QueryError(f"{name} is {found}; expected {expected}")


def _check_contexts(contexts: Any) -> None:
    check_sequence(contexts, "contexts", "a sequence of contexts, each a sequence of words")


def _check_states(states: Any) -> None:
    if isinstance(states, State):
        raise QueryError("found one State; expected a sequence of states: pass [state]")
    check_sequence(states, "states", "a sequence of states from begin() or extend()")


class Inputs:
    """Checks callers' input to an utterance that is open on one model.

    Args  before  the utterance's previous model, if servers no longer hold it
          digest  the digest of the utterance's phrases
    Attributes
        width    maximum number of words in a context, order - 1
        settled  whether the utterance stays on this model: true after an answer or the use of an id
        phrases  the phrases of the utterance, see `PhraseInputs`
        ids_end  a number that all ids from callers must be below
    """

    phrases: BoundPhrases | None = None

    def __init__(
        self, snapshot: Snapshot, kind: str, before: Inputs | None = None, *, digest: str = ""
    ) -> None:
        manifest = snapshot.topology.manifest
        self.snapshot = snapshot
        self.model_info = model_info_of(kind, manifest.model, manifest.shard_set, digest)
        self.vocabulary_size = self.ids_end = manifest.vocabulary_size
        self.width = max(manifest.order - 1, 0)
        self.settled = False
        self._before = before

    @property
    def words(self) -> Vocabulary:
        return self.snapshot.grams.vocabulary

    # -- words --------------------------------------------------------------------------------

    def id_of(self, word: Word) -> int:
        if isinstance(word, (str, bytes)):
            return self.words.id_of(word)
        self.settled = True
        try:
            number = operator.index(word)
        except TypeError as exc:
            raise QueryError(
                f"a word is of type {type(word).__name__}; expected a string, bytes or an id"
            ) from exc
        if not 0 <= number < self.ids_end:
            raise QueryError(f"word id {number} is out of range; ids are 0 to {self.ids_end - 1}")
        return number

    def _find(self) -> Callable[[bytes, int], int]:
        return self.words.ids.get

    def queries(self, states: States, counts: NDArray[np.uint32], words: Any) -> Queries:
        """Returns the queries for words after states; `counts` has each state's number of words."""
        return Queries(states._contexts, states._lengths, counts, words)

    def ids(
        self, words: Sequence[Word] | NDArray[Any], name: str = "words", *, planned: bool = False
    ) -> NDArray[np.uint32]:
        """Returns the ids of words; if `planned`, the plan of the call checks the ids later."""
        check_sequence(words, name)
        if not isinstance(words, np.ndarray):
            return np.fromiter(map(self.id_of, words), np.uint32, len(words))
        if words.ndim != 1:
            raise QueryError(f"an array of words has shape {words.shape}; expected one dimension")
        if words.dtype.kind not in "iu":
            return np.fromiter(map(self.id_of, words), np.uint32, len(words))
        self.settled = True
        if planned and words.dtype == np.uint32:
            # Copies `words`, which the caller may change, by way of bytes: NumPy releases the GIL
            # to copy an array, and regaining the GIL is slow.
            return np.frombuffer(words.tobytes(), np.uint32)
        if words.size and (int(words.min()) < 0 or int(words.max()) >= self.ids_end):
            raise QueryError(
                f"the word ids range from {words.min()} to {words.max()}; "
                f"valid ids are 0 to {self.ids_end - 1}"
            )
        return words.astype(np.uint32)

    # -- states -------------------------------------------------------------------------------

    def begin(self) -> State:
        return State(self.model_info, (self.words.begin_id,) if self.width else ())

    def null(self) -> State:
        return State(self.model_info, ())

    def states(self, states: States | Sequence[State]) -> States:
        """Returns a sequence of states as one flat array; checks the states' model."""
        if isinstance(states, States):
            self.model_info.check(states.model_info)
            return states if states._lengths.ndim == 1 else states.reshape(-1)
        _check_states(states)
        dense = np.zeros((len(states), self.width), np.uint32)
        lengths = np.zeros(len(states), np.uint8)
        for row, state in enumerate(map(self.own, states)):
            count = len(state._words)
            dense[row, self.width - count :] = state._words
            lengths[row] = count
        return States(self.model_info, dense, lengths)

    def own(self, state: Any) -> State:
        """Returns this utterance's state for `state`; raises `ModelMismatch` if it has none."""
        if not isinstance(state, State):
            raise ModelMismatch(f"expected a State, found {type(state).__name__}")
        if state.model_info is self.model_info or state.model_info == self.model_info:
            return state
        return self._moved(state)

    def _moved(self, state: State) -> State:
        before = self._before
        if before is not None and state == before.begin() and state._words:
            return self.begin()
        if before is not None and state == before.null():
            return self.null()
        self.model_info.check(state.model_info)
        return state

    def states_after(self, contexts: Sequence[Sequence[Word]], first: int = 0) -> States:
        """See `Utterance.states_after`; `first` is the first context's index in the call."""
        _check_contexts(contexts)
        dense = np.zeros((len(contexts), self.width), np.uint32)
        lengths = np.zeros(len(contexts), np.uint8)
        for row, context in enumerate(contexts):
            name = f"contexts[{first + row}]"
            check_sequence(context, name)
            last = context[max(len(context) - self.width, 0) :] if self.width else ()
            kept = self.ids(last, name)
            dense[row, self.width - len(kept) :] = kept
            lengths[row] = len(kept)
        return States(self.model_info, dense, lengths)

    def states_from_bytes(self, states: Sequence[bytes]) -> States:
        """See `Utterance.states_from_bytes`."""
        head, at = state_head(self.model_info)
        size = at + 1 + 4 * self.width
        for row, one in enumerate(states):
            if not one.startswith(head):
                raise ModelMismatch(
                    f"states[{row}] is not a state of model {self.model_info.model}, or is for "
                    "other phrases; begin the sentence again with a state of this utterance"
                )
            if len(one) != size:
                raise QueryError(f"states[{row}] has {len(one)} bytes; expected {size} bytes")
        rows = np.frombuffer(b"".join(states), np.uint8).reshape(len(states), size)
        lengths = rows[:, at].copy()
        dense = np.ascontiguousarray(rows[:, at + 1 :]).view("<u4").astype(np.uint32)
        unused = np.arange(self.width) < self.width - lengths[:, None].astype(np.int64)
        wrong = (lengths > self.width) | (dense >= self.vocabulary_size).any(axis=1)
        wrong |= (dense * unused).any(axis=1)
        nodes = None
        if self.phrases is not None:
            given = np.ascontiguousarray(rows[:, len(head) : at]).view("<u4")[:, 0]
            wrong |= given >= len(self.phrases.automaton.symbols)
            nodes = given.astype(np.int32)
        if wrong.any():
            raise QueryError(
                f"states[{int(wrong.argmax())}] was changed after the client returned it; expected "
                "the unchanged bytes of a state"
            )
        return States(self.model_info, dense, lengths, nodes)

    def after(
        self, queries: Queries, answers: Answers
    ) -> tuple[States, NDArray[np.float32] | None]:
        """Returns the minimised state after each query's word and, with phrases, its bonus."""
        given = (queries.contexts, queries.counts, queries.words, answers.state_length)
        found = kernels.next_states(*map(np.ascontiguousarray, given))
        return States(self.model_info, *found), None

    def bonuses(self, parts: Sequence[Queries], counts: Sequence[int]) -> Iterable[float]:
        """Returns each sentence's bonus; `counts` has each sentence's number of words."""
        return repeat(0.0)

    # -- calls --------------------------------------------------------------------------------

    def score(self, contexts: Sequence[Sequence[Word]], words: Sequence[Word]) -> Parts:
        _check_contexts(contexts)
        check_sequence(words, "words")
        if len(contexts) != len(words):
            raise QueryError(
                f"found {counted(len(contexts), 'context')} and {counted(len(words), 'word')}; "
                "expected one word per context"
            )
        for begin in range(0, len(words) or 1, PART):
            whole = len(words) <= PART
            part = slice(begin, begin + PART)
            before = self.states_after(contexts if whole else contexts[part], begin)
            asked = self.ids(words if whole else words[part])
            ones = np.ones(len(asked), np.uint32)
            ahead = max(len(words) - begin - PART, 0)
            yield self.queries(before, ones, asked), ahead

    def extend_shape(self, states: States | Sequence[State], words: Any) -> tuple[int, int, bool]:
        """The number of states, words per state, and whether each state has words of its own."""
        if not isinstance(states, States):
            _check_states(states)
        check_sequence(words, "words", "a sequence of words, or one per state")
        count = states._lengths.size if isinstance(states, States) else len(states)
        if isinstance(words, np.ndarray):
            if words.ndim != 2:
                return count, len(words if words.ndim == 1 else self.ids(words)), False
            rows, widths = len(words), {words.shape[1]}
        elif len(words) and (
            isinstance(words[0], (Sequence, np.ndarray)) and not isinstance(words[0], (str, bytes))
        ):
            for at, row in enumerate(words):
                check_sequence(row, f"words[{at}]")
            rows, widths = len(words), {len(row) for row in words}
        else:
            return count, len(words), False
        if len(widths) > 1 or rows != count:
            each = max(widths, default=0) if len(widths) == 1 else sorted(widths)
            raise QueryError(
                f"found {rows} lists of {each} words for {count} states; expected one list per "
                "state, all of the same length"
            )
        return count, max(widths), True

    def extend(
        self, shape: tuple[int, int, bool], states: States | Sequence[State], words: Any
    ) -> Parts:
        """The queries of `Utterance.extend`; `shape` comes from `extend_shape`."""
        count, width, nested = shape
        if isinstance(states, States):
            states = self.states(states)
        ids = None if nested else self.ids(words, planned=True)
        rows, columns = max(PART // max(width, 1), 1), max(min(width, PART), 1)
        for first in range(0, count or 1, rows):
            whole = count <= rows
            flat = states if whole else states[first : first + rows]
            if not isinstance(flat, States):
                flat = self.states(flat)
            some = () if ids is not None else words if whole else words[first : first + rows]
            for begin in range(0, width or 1, columns):
                part = slice(begin, begin + columns)
                if ids is not None:
                    # Repeats bytes, because `np.tile` takes several times as long.
                    asked = np.frombuffer(ids[part].tobytes() * len(flat), np.uint32)
                elif isinstance(some, np.ndarray):
                    asked = self.ids(some[:, part].reshape(-1), planned=True)
                else:
                    named = [(row[part], f"words[{at}]") for at, row in enumerate(some, first)]
                    none = np.zeros(0, np.uint32)
                    asked = np.concatenate([none, *(self.ids(*one) for one in named)])
                counts = np.empty(len(flat), np.uint32)
                counts[:] = min(columns, width - begin)
                ahead = count * width - first * width - len(flat) * begin - len(asked)
                yield self.queries(flat, counts, asked), ahead

    def sentences(
        self, sentences: Sequence[Sentence], bos: bool, eos: bool, counts: list[int]
    ) -> Parts:
        """The queries of `Utterance.score_sentences`; `counts` gets each sentence's token count."""
        counts.clear()
        if isinstance(sentences, (str, bytes)):
            raise QueryError(
                "found one string; expected a sequence of sentences (each character would "
                "be scored as a sentence): pass [sentence]"
            )
        check_sequence(sentences, "sentences", "a sequence of sentences")
        begin, end = self.words.begin_id, self.words.end_id
        segments: list[tuple[list[int], list[int]]] = []  # pairs of a context and its tokens
        tokens = total = 0
        for row, sentence in enumerate(sentences):
            before, count = [begin] * bos, 0
            for ids in self._sentence_ids(sentence, f"sentences[{row}]"):
                segments.append((before, ids))
                # A sentence that was cut continues after its own last words.
                before = [*before, *ids][-self.width :] if self.width else []
                count += len(ids)
                tokens += len(ids)
                if tokens >= PART:
                    total += tokens
                    yield self._tokens(segments), (len(sentences) - row - 1) * total // (row + 1)
                    segments, tokens = [], 0
            if eos:
                segments.append((before, [end]))
                tokens += 1
            counts.append(count + eos)
        if segments or not total:
            yield self._tokens(segments), 0

    def _sentence_ids(self, sentence: Sentence, name: str) -> Iterator[list[int]]:
        find = self._find()
        if isinstance(sentence, (str, bytes)):
            for words in split_parts(sentence):
                yield [find(word, UNK_ID) for word in words]
            return
        check_sequence(sentence, name, "a string or a sequence of words")
        if isinstance(sentence, np.ndarray):
            sentence = self.ids(sentence, name).tolist()
        given = iter(sentence)
        while some := list(islice(given, PART)):
            yield [find(w, UNK_ID) if type(w) is bytes else self.id_of(w) for w in some]

    def _tokens(self, segments: list[tuple[list[int], list[int]]]) -> Queries:
        stream: list[int] = []
        at: list[int] = []
        context_lengths: list[int] = []
        for before, ids in segments:
            stream += before
            at += range(len(stream), len(stream) + len(ids))
            context_lengths += range(len(before), len(before) + len(ids))
            stream += ids
        flat = np.array(stream, np.uint32)
        places = np.array(at, np.int64)
        kept = np.minimum(np.array(context_lengths, np.int64), self.width).reshape(len(at))
        back = np.arange(self.width, 0, -1)[None, :]
        used = back <= kept[:, None]
        before_each = np.where(used, places[:, None] - back, 0)
        contexts = np.where(used, flat[before_each] if len(flat) else 0, 0).astype(np.uint32)
        ones = np.ones(len(at), np.uint32)
        return Queries(contexts, kept.astype(np.uint8), ones, flat[places])


def stored_after(states: States, rows: NDArray[np.int64], skips: NDArray[np.uint32]) -> Parts:
    """Yields queries for words stored after states `rows`, except each state's first `skips`."""
    for first in range(0, len(rows), PART):
        some = rows[first : first + PART]
        ones = np.ones(len(some), np.uint32)
        contexts, lengths = states._contexts[some], states._lengths[some]
        yield Queries(contexts, lengths, ones, skips[first : first + PART]), 0


def every_word_after(states: States, rows: list[int], vocabulary_size: int) -> Parts:
    for place, row in enumerate(rows):
        here = slice(row, row + 1)
        for first in range(0, vocabulary_size, PART):
            last = min(first + PART, vocabulary_size)
            words = np.arange(first, last, dtype=np.uint32)
            count = np.array([len(words)], np.uint32)
            ahead = (len(rows) - place) * vocabulary_size - last
            yield Queries(states._contexts[here], states._lengths[here], count, words), ahead


# -------------------------------------------------------------------------------------------------
# The inputs of an utterance with phrases: ids of new words, and nodes in its states.


class PhraseInputs(Inputs):
    """The inputs of an utterance with phrases: its states have a node of the phrases' automaton."""

    def __init__(
        self, snapshot: Snapshot, kind: str, phrases: Phrases, before: Inputs | None = None
    ) -> None:
        super().__init__(snapshot, kind, before, digest=phrases.digest)
        self.phrases = self._bound = phrases.bound(self.words)
        self.ids_end = len(self._bound.symbols)

    def _find(self) -> Callable[[bytes, int], int]:
        ids, new = self.words.ids, self._bound.new
        return lambda word, default: ids.get(word) or new.get(word, default)

    def id_of(self, word: Word) -> int:
        if isinstance(word, (str, bytes)):
            return self._bound.id_of(word)
        return super().id_of(word)

    def queries(self, states: States, counts: NDArray[np.uint32], words: Any) -> Queries:
        spoken = np.ascontiguousarray(words)
        return Queries(
            states._contexts,
            states._lengths,
            counts,
            self._bound.model_words(spoken),
            states._nodes,
            spoken,
        )

    def begin(self) -> State:
        return PhraseState(self.model_info, super().begin()._words)

    def null(self) -> State:
        return PhraseState(self.model_info, ())

    def states(self, states: States | Sequence[State]) -> States:
        found = super().states(states)
        if found._nodes is not None:
            return found
        each = (state._node for state in states if isinstance(state, PhraseState))
        nodes = np.fromiter(each, np.int32, len(states))
        return States(found.model_info, found._contexts, found._lengths, nodes)

    def states_after(self, contexts: Sequence[Sequence[Word]], first: int = 0) -> States:
        found = super().states_after(contexts, first)
        said = [self.ids(list(context)) for context in contexts]
        words = np.concatenate([np.zeros(0, np.uint32), *said])
        _, nodes = self._bound.walk(words, [len(one) for one in said])
        contexts_ = self._bound.model_words(found._contexts)
        return States(found.model_info, contexts_, found._lengths, nodes)

    def _tokens(self, segments: list[tuple[list[int], list[int]]]) -> Queries:
        found, fold = super()._tokens(segments), self._bound.model_words
        return found._replace(
            contexts=fold(found.contexts), words=fold(found.words), spoken=found.words
        )

    def after(
        self, queries: Queries, answers: Answers
    ) -> tuple[States, NDArray[np.float32] | None]:
        assert queries.nodes is not None and queries.spoken is not None
        found, _ = super().after(queries, answers)
        nodes, bonus = self._bound.automaton.advance(
            queries.nodes, queries.counts, queries.spoken, self._bound.symbols
        )
        return States(found.model_info, found._contexts, found._lengths, nodes), bonus

    def bonuses(self, parts: Sequence[Queries], counts: Sequence[int]) -> list[float]:
        words = np.concatenate([part.spoken for part in parts if part.spoken is not None])
        found: list[float] = self._bound.walk(words, counts)[0].tolist()
        return found


def inputs_of(
    snapshot: Snapshot, kind: str, phrases: Phrases | None, before: Inputs | None = None
) -> Inputs:
    """The inputs of an utterance on the model of `snapshot`, with or without phrases."""
    if phrases is None:
        return Inputs(snapshot, kind, before)
    return PhraseInputs(snapshot, kind, phrases, before)


# -------------------------------------------------------------------------------------------------
# Shows which shards get a sentence's queries. Scoring does not use this: it plans queries itself.


def shards_of(
    utterance: Any, sentences: Sequence[Sentence], *, bos: bool = True, eos: bool = True
) -> list[NDArray[np.int32]]:
    """The shard that is queried for each token of each sentence, in the order of `score_sentences`;
    -1 if the low orders answer, or the model is in this process.

    Args  utterance  a `BaseUtterance`
    """
    counts: list[int] = []
    inputs = utterance._inputs

    def routes(queries: Queries) -> NDArray[np.int32]:
        if utterance.local_model is not None:
            return np.full(len(queries.words), -1, np.int32)
        given = queries.contexts, queries.lengths, queries.counts, queries.words
        snapshot = inputs.snapshot
        plan = router.plan(snapshot.grams, snapshot.topology.manifest, *given, PART)
        distinct = np.full(len(plan.log10_prob), -1, np.int32)
        for piece in plan.pieces:
            distinct[piece.at] = piece.shard
        return distinct[plan.place]

    found = [routes(queries) for queries, _ in inputs.sentences(sentences, bos, eos, counts)]
    return np.split(np.concatenate(found), np.cumsum(counts)[:-1])
