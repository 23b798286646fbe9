"""Records a decoder's requests, through a client whose utterances note every call.

    recorder = Recorder(Client.connect("cluster.toml"))
    with recorder.spoken("19-198-0034", speaker="19", seconds=16.6, kind="frame"):
        for at_s, frames in chunks:
            recorder.at_s = at_s
            decode(recorder.utterance(), frames)   # any code that queries an utterance
    write_trace(path, recorder.utterances, about)

A call that this module does not know is refused, so that no trace lacks a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from dlm.client import Client, ContextBlocks, Extension, SentenceScore, State, States, Utterance
from dlm.client.inputs import Sentence, Word
from dlm.client.metrics import Stats
from dlm.client.phrases import split_words
from dlm.errors import QueryError
from dlm.ngram.query import Answers
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE, Vocabulary, as_bytes
from loadtest.traces.trace import BLOCKS, EXTEND, KINDS, Request, Spoken, Words

# The attributes of an utterance that a decoder may use without querying the model.
_SILENT = (
    *("begin", "null", "states", "states_after", "phrases", "ids_of"),
    *("low_orders", "model_info", "order", "bigram_fallback", "vocabulary", "vocabulary_size"),
)


class Recorder:
    """Stands in for a client; its utterances record requests for the audio named by `spoken`.

    at_s        audio time of the next request; None spreads an utterance's requests evenly
    utterances  the utterances that have ended, with their requests
    """

    def __init__(self, client: Client) -> None:
        self.at_s: float | None = None
        self.utterances: list[Spoken] = []
        self._client = client
        self._kind = ""
        self.is_silent = False
        self._noted: list[tuple[float | None, Request]] | None = None

    @contextmanager
    def spoken(self, name: str, *, speaker: str, seconds: float, kind: str) -> Iterator[None]:
        """Inside the block, requests belong to this utterance; `kind` is one of `KINDS`."""
        if kind not in KINDS:
            raise QueryError(f"the request kind is {kind!r}; expected one of {list(KINDS)}")
        self._noted, self._kind, self.at_s = [], kind, None
        try:
            yield
            requests = _timed(self._noted, seconds) or [Request(0.0, kind, (), ())]
            self.utterances.append(Spoken(name, speaker, seconds, tuple(requests)))
        finally:
            self._noted = None

    def utterance(self, **options: Any) -> RecordingUtterance:
        return RecordingUtterance(self._client.utterance(**options), self)

    def spread(self, begin_s: float, end_s: float) -> None:
        """Spreads the requests that have no time yet evenly between these times, in order."""
        open_ = [at for at, (at_s, _) in enumerate(self._noted or ()) if at_s is None]
        for number, at in enumerate(open_, 1):
            assert self._noted is not None
            at_s = begin_s + (end_s - begin_s) * number / len(open_)
            self._noted[at] = (at_s, self._noted[at][1])

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside the block, nothing is recorded; for the requests that a decoder makes first."""
        self.is_silent = True
        try:
            yield
        finally:
            self.is_silent = False

    @property
    def vocabulary(self) -> Vocabulary:
        return self._client.vocabulary

    @property
    def stats(self) -> Stats:
        return self._client.stats

    def note(self, contexts: Sequence[Words], words: Sequence[Words], call: str = EXTEND) -> None:
        """Adds a request, unless it is empty; QueryError if no utterance is being spoken."""
        if self.is_silent:
            return
        if self._noted is None:
            raise QueryError(
                "an utterance made a request outside `Recorder.spoken`, which names the audio; use "
                "utterances only inside its block"
            )
        if contexts and (call == BLOCKS or (words and words[0])):
            request = Request(0.0, self._kind, tuple(contexts), tuple(words), call)
            self._noted.append((self.at_s, request))


def _timed(noted: list[tuple[float | None, Request]], seconds: float) -> list[Request]:
    return [
        replace(one, at_s=seconds * (n + 1) / len(noted) if at_s is None else min(at_s, seconds))
        for n, (at_s, one) in enumerate(noted)
    ]


class RecordingUtterance:
    """An `Utterance` that records its calls; made by `Recorder.utterance`."""

    local_model = None  # so decoders send the requests that servers would get

    def __init__(self, handle: Utterance, recorder: Recorder) -> None:
        self._handle = handle
        self._recorder = recorder
        self._table = handle.vocabulary.words
        self._width = handle.order - 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _SILENT and not self._recorder.is_silent:
            raise QueryError(
                f"cannot record {name} of an utterance; expected extend, score, "
                "score_sentences or context_blocks"
            )
        return getattr(self._handle, name)

    def extend(self, states: States | Sequence[State], words: Any, **options: Any) -> Extension:
        found = self._handle.extend(states, words, **options)
        self._recorder.note(self._contexts(states), self._rows(words))
        return found

    def context_blocks(self, states: States | Sequence[State], **options: Any) -> ContextBlocks:
        found = self._handle.context_blocks(states, **options)
        self._recorder.note(self._contexts(states), (), BLOCKS)
        return found

    def _contexts(self, states: States | Sequence[State]) -> list[Words]:
        kept = states if isinstance(states, States) else self._handle.states(states)
        return [tuple(self._table[w] for w in context) for context in kept.contexts()]

    def score(
        self, contexts: Sequence[Sequence[Word]], words: Sequence[Word], **options: Any
    ) -> Answers:
        found = self._handle.score(contexts, words, **options)
        self._recorder.note(
            [self._last(context) for context in contexts], [(self._word(w),) for w in words]
        )
        return found

    def score_sentences(
        self, sentences: Sequence[Sentence], *, bos: bool = True, eos: bool = True, **options: Any
    ) -> list[SentenceScore]:
        """Scores sentences; records one request, with a context for each token."""
        found = self._handle.score_sentences(sentences, bos=bos, eos=eos, **options)
        contexts: list[Words] = []
        asked: list[Words] = []
        for sentence in sentences:
            words = split_words(sentence) if isinstance(sentence, (str, bytes)) else sentence
            before = [BEGIN_SENTENCE] * bos
            for word in [*map(self._word, words), *[END_SENTENCE] * eos]:
                contexts.append(self._last(before))
                asked.append((word,))
                before.append(word)
        self._recorder.note(contexts, asked)
        return found

    def _word(self, word: Word) -> bytes:
        return as_bytes(word) if isinstance(word, (str, bytes)) else self._table[int(word)]

    def _last(self, words: Sequence[Word]) -> Words:
        first = max(len(words) - self._width, 0)
        return tuple(map(self._word, words[first:])) if self._width else ()

    def _rows(self, words: Any) -> list[Words]:
        nested = len(words) and (
            isinstance(words[0], (Sequence, np.ndarray)) and not isinstance(words[0], (str, bytes))
        )
        return [tuple(map(self._word, row)) for row in (words if nested else [words])]
