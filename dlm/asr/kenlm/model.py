"""KenLM's `Model`, its settings and its small value types."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.asr.kenlm.opened import LENGTH_SHIFT, NextStates, OpenedModel, opened
from dlm.asr.kenlm.state import KenlmState, not_a_state
from dlm.asr.kenlm.table import NULL, ModelTable
from dlm.client import ClientConfig
from dlm.errors import DlmError
from dlm.kenlm.score_kernels import TEXT_BYTES
from dlm.ngram.vocab import UNK_ID, Vocabulary, as_bytes, as_text

__all__ = ["KenlmLanguageModel", "KenlmModel"]


class KenlmLoadMethod:
    """How a model is loaded. LAZY and POPULATE_OR_LAZY map its files, so that processes share them;
    KenLM's own files are always mapped. The other methods unpack a model into the process's memory
    if enough is free, for faster scoring. Models on servers are not loaded."""

    LAZY = 0
    POPULATE_OR_LAZY = 1
    POPULATE_OR_READ = 2
    READ = 3
    PARALLEL_READ = 4


class ArpaComplaint:
    """Which faults of an ARPA file KenLM reports. dlm rejects a faulty file with any setting."""

    ALL = 0
    EXPENSIVE = 1
    NONE = 2


class KenlmConfig:
    """KenLM's `Config`, with one more setting: `client`, a `ClientConfig` for servers, by default
    with `bigram_fallback`.

    arpa_complain  accepted for compatibility; has no effect
    show_progress  whether sharding and compilation are reported to standard error
    vocab          path of a list of words, one per line, for a KenLM file that stores no words
                   (`build_binary -v`); only `Model.vocab`, and methods that list words, need it
    """

    def __init__(self) -> None:
        self.load_method = KenlmLoadMethod.POPULATE_OR_READ
        self.show_progress = True
        self.arpa_complain = ArpaComplaint.ALL
        self.vocab: str | None = None
        self.client: ClientConfig | None = None


@dataclass(frozen=True, slots=True, eq=False)
class WordScore:
    """KenLM's `FullScoreReturn`, read-only. `ngram_length` is the length of the n-gram found, as
    KenLM counts it; `oov` says whether the vocabulary lacks the word."""

    log_prob: float
    ngram_length: int
    oov: bool

    def __repr__(self) -> str:
        return f"FullScoreReturn{self.log_prob, self.ngram_length, self.oov}"


class Words(Sequence[str]):
    """A read-only view of a vocabulary's words, by id."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self._vocabulary)

    def __getitem__(self, at: Any) -> Any:
        found = self._vocabulary.words[at]
        return as_text(found) if isinstance(found, bytes) else [as_text(word) for word in found]

    def __contains__(self, word: object) -> bool:
        return isinstance(word, (str, bytes)) and word in self._vocabulary

    def __repr__(self) -> str:
        return f"Words({len(self)})"


class KenlmModel:
    """A language model with the interface of the package `kenlm`; all scores are log10.

    Args
        path    of a KenLM binary file, of a cluster.toml, of a shard set's folder, of an ARPA file
                (sharded once, into the cache) or of a pointer file; or "dlm://..."; see
                `asr.open.open_model`
    Raises  OSError  the model cannot be opened: the message says why, and dlm's error is its cause
    Guarantees
        Scores equal those of the ARPA model, in float32, bit for bit. With a KenLM binary file,
        scores, their float32 sums and the equality of states are the package kenlm's instead.
        Unless `config.client` says otherwise, calls never raise if servers fail: 2-grams answer
        queries that no shard answers in time, and `stats` counts these. Thread-safe. Forks and
        unpickled copies reuse a model that is already open
    """

    def __init__(self, path: str | bytes, config: KenlmConfig | None = None) -> None:
        config = KenlmConfig() if config is None else config
        if not isinstance(config, KenlmConfig):
            raise TypeError(f"config is a {type(config).__name__}; expected a dlm.asr.kenlm.Config")
        named = _bytes_of(path)
        self.path = named if b"://" in named else os.path.abspath(named)  # noqa: PTH100
        self._config = config
        try:
            self._opened: OpenedModel = opened(
                self.path,
                config.client,
                unpacks=config.load_method >= KenlmLoadMethod.POPULATE_OR_READ,
                show_progress=config.show_progress,
                vocab=config.vocab,
            )
        except (DlmError, OSError) as exc:
            raise OSError(f"Cannot read model {os.fsdecode(named)!r} ({exc})") from exc

    @property
    def order(self) -> int:
        """N, the length of the longest n-grams; a state has at most N - 1 words."""
        return self._opened.table.order

    def __repr__(self) -> str:
        return f"<Model from {os.path.basename(self.path)!r}>"  # noqa: PTH119

    def __reduce__(self) -> tuple[Any, ...]:
        if vars(self._config) == vars(KenlmConfig()):
            return type(self), (self.path,)
        return type(self), (self.path, self._config)

    def __contains__(self, word: str | bytes) -> bool:
        """Whether the vocabulary has a word, not counting the unknown word. Queries no server."""
        return self._opened.table.id_of(_str_of(word)) != UNK_ID

    # -- sentences ----------------------------------------------------------------------------

    def score(self, sentence: str | bytes, bos: bool = True, eos: bool = True) -> float:
        """Returns log10 P of a sentence, which is split at white space and must not contain <s>.
        With `bos`, its context begins with <s>; with `eos`, its end, </s>, is scored too."""
        text = _bytes_of(sentence)
        direct = self._opened.direct
        if direct is not None and len(text) <= TEXT_BYTES:
            return direct.score(text, bool(bos), bool(eos))
        return self._opened.score(text, bool(bos), bool(eos))

    def perplexity(self, sentence: str | bytes) -> float:
        """Perplexity of a sentence and its end: 10 ** (-log10 P / (words + 1))."""
        text = _bytes_of(sentence)
        return float(10.0 ** (-self.score(text) / (len(text.split()) + 1)))

    def full_scores(
        self, sentence: str | bytes, bos: bool = True, eos: bool = True
    ) -> Iterator[tuple[float, int, bool]]:
        """Yields (log10 P, KenLM's ngram_length, whether unknown) of each word, then of the end."""
        return self._opened.full_scores(_bytes_of(sentence), bool(bos), bool(eos))

    def score_many(
        self, sentences: Sequence[str | bytes], bos: bool = True, eos: bool = True
    ) -> NDArray[np.float64]:
        """Returns the `score` of each sentence, (sentences,) float64, in few calls or messages."""
        if isinstance(sentences, (str, bytes)):
            raise TypeError("score_many got one string; expected a list: pass [sentence]")
        return self._opened.score_many([*map(_bytes_of, sentences)], bool(bos), bool(eos))

    # -- states -------------------------------------------------------------------------------

    def BeginSentenceWrite(self, state: KenlmState) -> None:
        table = self._opened.current()
        self._write(state, table, table.start())

    def NullContextWrite(self, state: KenlmState) -> None:
        self._write(state, self._opened.current(), NULL)

    def BaseScore(self, in_state: KenlmState, word: str, out_state: KenlmState) -> float:
        """Returns log10 P of `word` after `in_state`, and sets `out_state`, which may be the same
        object, to the state after `word`."""
        try:
            opened = self._opened
            log10_prob: float
            table: Any = in_state._table
            if table is opened.table:
                row = in_state._answer
            else:
                table, row = opened.resolve(in_state)
            log10_prob, answer = table.step(table.address, row, table.ids[word])
            if answer < 0:
                table, log10_prob, answer = opened.ask(table, row, table.id_of(word))
            out_state._table = table
            out_state._answer = answer
            return log10_prob
        except KeyError:  # the word has not been looked up yet
            table.id_of(word)
            return self.BaseScore(in_state, word, out_state)
        except AttributeError:
            if isinstance(in_state, KenlmState) and not hasattr(in_state, "_table"):  # a new state
                empty = KenlmState()
                self.NullContextWrite(empty)
                return self.BaseScore(empty, word, out_state)
            raise not_a_state(in_state, out_state) from None

    def BaseFullScore(self, in_state: KenlmState, word: str, out_state: KenlmState) -> WordScore:
        """Like `BaseScore`; adds the found n-gram's length, and whether the word is unknown."""
        if not (isinstance(in_state, KenlmState) and isinstance(out_state, KenlmState)):
            raise not_a_state(in_state, out_state)
        table, row = self._opened.resolve(in_state)
        found = table.id_of(word)
        table, log10_prob, row = self._opened.ask(table, row, found)
        self._write(out_state, table, row)
        return WordScore(log10_prob, row >> LENGTH_SHIFT, found == UNK_ID)

    @staticmethod
    def _write(state: KenlmState, table: ModelTable, row: int) -> None:
        if not isinstance(state, KenlmState):
            raise not_a_state(state, state)
        state._table, state._answer = table, row

    # -- additions to the package kenlm --------------------------------------------------------

    def base_score_batch(
        self, states: Sequence[KenlmState], words: Any
    ) -> tuple[NDArray[np.float32], NextStates]:
        """Extends each of K states by W words: the same words, or a row of words for each state.

        Returns (K, W) float32 log10 P, and the next states, indexed by [k, w]
        Raises  QueryError, ModelMismatch
        """
        return self._opened.score_batch(states, words)

    def next_distribution(self, state: KenlmState) -> NDArray[np.float32]:
        """Returns log10 P of every word after `state`, (V,) float32, in the order of `vocab`. The
        value for <s> comes from the file, although <s> never follows a word."""
        return self._opened.distribution(state)

    def top_k(self, state: KenlmState, k: int) -> list[tuple[str, float]]:
        """The `k` most probable next words and their log10 P, best first; ties are in vocabulary
        order. Includes </s> and <unk>, but not <s>."""
        if k < 0:
            raise ValueError(f"k is {k}; expected 0 or more")
        found = self.next_distribution(state)
        vocabulary = self._opened.table.vocabulary
        if vocabulary.begin_id != UNK_ID:
            found[vocabulary.begin_id] = -np.inf
        best = np.argsort(-found, kind="stable")[:k]
        words = self.vocab
        return [(words[i], float(found[i])) for i in best.tolist()]

    @property
    def vocab(self) -> Words:
        """The words by id; the first is the unknown word."""
        return Words(self._opened.table.vocabulary)

    def stats(self) -> dict[str, int]:
        """Counts for this model in this process, since it was opened.

        queries          words scored
        cached           words whose scores came from the cache
        cache_misses     words whose scores the cache did not have
        contexts_fetched  contexts fetched from servers with everything stored after them
        bigram_fallback, local_fallback  words that each fallback scored while servers failed
        """
        return self._opened.stats()


class KenlmLanguageModel(KenlmModel):
    """An older name for `Model`."""


def _bytes_of(text: object) -> bytes:
    if not isinstance(text, (str, bytes)):
        raise TypeError(f"Cannot convert {type(text)} to string")
    return as_bytes(text)


def _str_of(word: object) -> str:
    if isinstance(word, bytes):
        return word.decode("utf-8", "surrogateescape")
    if not isinstance(word, str):
        raise TypeError(f"Cannot convert {type(word)} to string")
    return word
