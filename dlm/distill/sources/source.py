"""The protocol of a source: a model over words that gives the probability of each next word.

    class MyModel:
        vocabulary = ["</s>", "<unk>", "the", ...]     # a word for each column of log_probs
        begin_id = end_id = 0                          # if they are not spelled <s> and </s>

        def log_probs(self, prefixes, lengths):        # (b, t) int32, (b,) int32 -> (b, v)
            ...

`SourceReader` maps its ids to those of a model, checks its output, and follows sentences.
"""

from __future__ import annotations

import hashlib
import importlib
import operator
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts.count import Visit, WordMass
from dlm.errors import ConfigError, DlmError, SourceError
from dlm.ngram.vocab import (
    BEGIN_SENTENCE,
    END_SENTENCE,
    UNK_ID,
    Vocabulary,
    as_bytes,
    as_text,
    is_unk_spelling,
)

MOST_WORDS = 200  # maximum words in a sentence; a longer sentence is cut
BATCH = 256
SUM_TOLERANCE = 1e-3
_SPACES = b" \t\r\n"


class Source(Protocol):
    """The interface that your own model needs in order to be distilled.

    Optional attributes:
        begin_id, end_id    ids that begin and end a sentence; default: those of `<s>` and `</s>`.
                            They may be the same id
        record              `Provenance`: the protection of the people whose text the model learned
                            from. Without it, there is no guarantee unless the source is attested
        digest              str: identifies the model; a resumed run rejects a different one. By
                            default, the words and the first distribution are compared
        sample(seed, n)     n sentences, each a list of ids without begin and end; default: words
                            are drawn from `log_probs`
        histories(places)   `Histories`: gives the same distributions word by word, which is faster
        visits(samples, seed)  the visits themselves (`count.Visit`), for a source that derives
                            visits from another source
    Sentences are counted in blocks. `sample` and `visits` are called for each block, with a
    separate seed; `histories` may be called for each block, too.
    """

    @property
    def vocabulary(self) -> Vocabulary | Sequence[bytes | str]:
        """The word of each id; ids are the columns of `log_probs`."""

    def log_probs(self, prefixes: NDArray[np.int32], lengths: NDArray[np.int32]) -> Any:
        """Returns ln P of each word after each prefix.

        Shapes
            prefixes  (b, t)  int32  ids, starting with the one that begins a sentence; entries
                                     beyond `lengths` are ignored
            lengths   (b,)    int32  1 to t
            returns   (b, v)  natural logarithms, whose exponentials sum to 1 within 1e-3; -inf is
                              allowed. The probability of `begin_id` is removed and the rest
                              rescaled
        """


class Histories(Protocol):
    """A batch's unfinished sentences, one per place; predicts the next word of each."""

    def advance(
        self, words: NDArray[np.uint32], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Takes one word for each given place; `<s>` begins a new sentence at that place.

        Shapes, n places
            words    (n,)    uint32
            places   (n,)    int64    increasing
            returns  (n, v), (n,)     float32: the distribution of the next word, and its entropy
        """


class SourceReader:
    """Reads a source with the ids of a dlm model, and checks its answers. `ids` maps the source's
    ids to the model's, `own_ids` the model's ids to the source's.

    Raises
        ConfigError  invalid, repeated or unordered words; no id that begins or ends a sentence
        SourceError  the source's first answer is not a distribution over its words
    """

    def __init__(self, source: Source, name: str) -> None:
        self.source, self.name = source, name
        given = source.vocabulary
        words = list(given.words) if isinstance(given, Vocabulary) else _words(given, name)
        begin, end = (
            _mark(source, words, attribute, mark, name)
            for attribute, mark in (("begin_id", BEGIN_SENTENCE), ("end_id", END_SENTENCE))
        )
        spelled = dict(enumerate(words))
        if begin != end:
            spelled[begin] = BEGIN_SENTENCE
        spelled[end] = END_SENTENCE
        unk = [i for i, word in spelled.items() if is_unk_spelling(word)]
        has_unk = bool(unk) and not (isinstance(given, Vocabulary) and not given.unk_in_model)
        rest = [i for i in spelled if i not in unk[:1]]
        missing = [] if begin != end else [BEGIN_SENTENCE]
        _check_words([spelled[i] for i in rest], name)
        try:
            self.vocabulary = Vocabulary(
                [b"<unk>" if not unk else spelled[unk[0]], *(spelled[i] for i in rest), *missing],
                unk_in_model=has_unk,
            )
        except ValueError as exc:
            raise ConfigError(f"the vocabulary of {name} is not valid: {exc}") from exc
        # For each id of the model: the source's id or -1, and whether the source predicts the word.
        self.own_ids = np.array([unk[0] if unk else -1, *rest, *(begin for _ in missing)], np.int32)
        self._predicted = np.ones(len(self.vocabulary), np.bool_)
        self._predicted[self.vocabulary.begin_id] = False
        self._predicted[UNK_ID] = has_unk
        self._columns = np.where(self._predicted, self.own_ids, 0)
        self._size = len(words)
        self.ids = np.zeros(len(words), np.uint32)
        self.ids[self.own_ids[self._predicted]] = np.flatnonzero(self._predicted)
        self.first = self._first()

    def identity(self) -> dict[str, object]:
        words = hashlib.sha256(b"\n".join(self.vocabulary.words)).hexdigest()
        named = getattr(self.source, "digest", None)
        if named is not None:
            return {"words": words, "digest": str(named)}
        # The entropy is rounded, since its last bits differ between machines.
        entropy = -float((self.first * np.log(np.maximum(self.first, 1e-30))).sum(dtype=float))
        return {"words": words, "first_word_entropy_nats": float(f"{entropy:.3g}")}

    def histories(self, places: int) -> Histories:
        """The source's own histories, or histories that call `log_probs` each time."""
        own = getattr(self.source, "histories", None)
        return PrefixHistories(self, places) if own is None else OwnHistories(self, own(places))

    def distributions(
        self, prefixes: NDArray[np.uint32], lengths: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Returns next-word distributions after prefixes, both with the model's ids; SourceError if
        the source does not give distributions."""
        given = np.asarray(self.source.log_probs(self.own_ids[prefixes], lengths))
        if given.shape != (len(prefixes), self._size):
            raise SourceError(
                f"log_probs of {self.name} returned shape {given.shape} for {len(prefixes)} "
                f"prefixes; expected {(len(prefixes), self._size)}, one column per word of its "
                "vocabulary"
            )
        if given.dtype.kind not in "fiu":
            raise SourceError(
                f"log_probs of {self.name} returned an array of {given.dtype}; expected natural "
                "logarithms in float32"
            )
        with np.errstate(over="ignore"):  # +inf is rejected below
            probs = np.exp(given.astype(np.float32, copy=False))
        check_distributions(probs, self.name)
        found: NDArray[np.float32] = probs[:, self._columns] * self._predicted
        total = found.sum(axis=1, dtype=np.float64)
        if not (total > 0).all():
            raise SourceError(
                f"{self.name} gives all probability to the mark that starts a sentence, which "
                "never follows another word; expected a probability above 0 for other words"
            )
        scaled: NDArray[np.float32] = (found / total[:, None]).astype(np.float32)
        return scaled

    @property
    def makes_visits(self) -> bool:
        """Whether visits come from the source itself, which is then not queried for histories."""
        return hasattr(self.source, "visits") and not hasattr(self.source, "histories")

    def _first(self) -> NDArray[np.float32]:
        """Checks the first distribution, so that a faulty source fails before hours of work."""
        if self.makes_visits:
            return np.zeros(0, np.float32)
        begin = np.array([self.vocabulary.begin_id], np.uint32)
        if hasattr(self.source, "log_probs"):
            given = self.distributions(begin[:, None], np.ones(1, np.int32))
        else:
            given, _ = self.histories(1).advance(begin, np.zeros(1, np.int64))
        return given.reshape(-1)


class OwnHistories:
    """Histories that a source provides; SourceError for wrong shapes or types, or if `<s>` has
    a probability other than 0."""

    def __init__(self, reader: SourceReader, own: Histories) -> None:
        self._own, self._name = own, reader.name
        self._words, self._begin = len(reader.vocabulary), reader.vocabulary.begin_id

    def advance(
        self, words: NDArray[np.uint32], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        given, entropy = self._own.advance(words, places)
        found = f"{given.dtype} {given.shape} and {entropy.dtype} {entropy.shape}"
        wanted = f"float32 {(len(places), self._words)} and float32 {(len(places),)}"
        if found != wanted:
            raise SourceError(
                f"histories of {self._name} returned {found}; expected {wanted}: for each place, "
                "the distribution by model ids (SourceReader.vocabulary) and its entropy"
            )
        if given[:, self._begin].any():
            raise SourceError(
                f"histories of {self._name} give a probability to <s>, which never follows "
                "another word; expected 0"
            )
        check_distributions(given, self._name)
        return given, entropy


class PrefixHistories:
    def __init__(self, reader: SourceReader, places: int) -> None:
        self._reader = reader
        self._begin = reader.vocabulary.begin_id
        self._prefixes = np.full((places, MOST_WORDS + 1), self._begin, np.uint32)
        self._lengths = np.zeros(places, np.int32)

    def advance(
        self, words: NDArray[np.uint32], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        self._lengths[places[words == self._begin]] = 0
        at = self._lengths[places]
        self._prefixes[places, at] = words
        self._lengths[places] = at + 1
        asked = np.ascontiguousarray(self._prefixes[places, : int(at.max()) + 1])
        given = self._reader.distributions(asked, self._lengths[places])
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(given > 0, given * np.log(given), 0).sum(axis=1, dtype=np.float64)
        return given, entropy.astype(np.float32)


def check_distributions(given: NDArray[np.floating[Any]], name: str) -> None:
    """Raises SourceError unless each row sums to 1 and has no value below 0."""
    if given.size and given.min() < 0:  # false for NaN, which the sum catches
        raise SourceError(
            f"{name} gives a probability of {given.min():.6g}; expected 0 to 1, not logarithms"
        )
    total = given.sum(axis=1, dtype=np.float64)
    good = np.abs(total - 1) <= SUM_TOLERANCE
    if good.all():
        return
    row = int(np.flatnonzero(~good)[0])
    if not np.isfinite(total[row]):
        raise SourceError(
            f"{name} gives a log-probability of NaN or +inf; expected natural logarithms of "
            "probabilities, -inf for 0"
        )
    raise SourceError(
        f"the probabilities from {name} sum to {total[row]:.6g}; expected 1. log_probs must return "
        "natural logarithms of a softmax, in float32"
    )


def is_object_name(name: str) -> bool:
    """Whether a string has the form `module:factory`."""
    module, _, attribute = name.partition(":")
    parts = (*module.split("."), *attribute.split("."))
    return all(part.isidentifier() for part in parts)


def load_object(name: str) -> Source:
    """Loads `module:factory`: the object itself, or what it returns when called without arguments.
    ConfigError if the object is missing or has no `log_probs`, SourceError if its code raises."""
    module, _, attribute = name.partition(":")
    with user_code(f"import of {module}"):
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as exc:
            raise ConfigError(
                f"{name}: found no module named {exc.name}; run the command in the module's "
                "folder, or set PYTHONPATH"
            ) from exc
    for part in attribute.split("."):
        if not hasattr(found, part):
            kind = getattr(found, "__name__", type(found).__name__)
            raise ConfigError(
                f"{name}: {kind} has no {part}; expected module:factory, where the module defines "
                "the factory"
            )
        found = getattr(found, part)
    if isinstance(found, type) or (callable(found) and not hasattr(found, "log_probs")):
        with user_code(name):
            found = found()
    for wanted in ("vocabulary", "log_probs"):
        if not hasattr(found, wanted):
            raise ConfigError(
                f"{name} is a {type(found).__name__}, which has no {wanted}; see "
                "dlm.distill.sources.source.Source for what a source needs"
            )
    source: Source = UserSource(found, name)
    return source


def _mark(source: Source, words: list[bytes], attribute: str, mark: bytes, name: str) -> int:
    given = getattr(source, attribute, None)
    if given is not None:
        try:
            place = operator.index(given)
        except TypeError:
            place = -1
        if not 0 <= place < len(words):
            raise ConfigError(
                f"{attribute} of {name} is {given!r}; expected an id from 0 to {len(words) - 1:,} "
                "of its vocabulary"
            )
        return place
    if mark not in words:
        raise ConfigError(
            f"the vocabulary of {name} has no {as_text(mark)} to "
            f"{'begin' if attribute == 'begin_id' else 'end'} sentences; add it, or set {attribute}"
        )
    return words.index(mark)


def _words(given: Any, name: str) -> list[bytes]:
    """The word of each id; rejects types not ordered by id, such as a tokenizer's dict."""
    is_listed = hasattr(given, "__iter__") and not isinstance(given, Mapping | Set | str | bytes)
    words = list(given) if is_listed else []
    if not words or not all(isinstance(word, str | bytes) for word in words):
        what = f"{type(given).__name__} of {type(words[0]).__name__}" if words else repr(given)
        raise ConfigError(
            f"the vocabulary of {name} is {what[:60]}; expected a list of str or bytes, one word "
            "per column of log_probs (from a dict of ids: sorted(ids, key=ids.get))"
        )
    return list(map(as_bytes, words))


def _check_words(words: list[bytes], name: str) -> None:
    for word in words:
        if not word or any(space in word for space in _SPACES):
            raise ConfigError(
                f"the vocabulary of {name} has {as_text(word)!r}, which is not a word: it is empty "
                "or contains white space. A wordpiece model cannot be distilled directly"
            )


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turns what a user's code raises, including `SystemExit`, into a `SourceError`; `what`
    names the code that was called."""
    try:
        yield
    except DlmError:
        raise
    except (Exception, SystemExit) as exc:
        error = SourceError(f"{what} raised {type(exc).__name__}: {exc}")
        for frame in _places(exc)[-1:]:
            error.add_note(f"in {frame.filename}, line {frame.lineno}, {frame.name}")
        raise error from exc


def _places(exc: BaseException) -> list[traceback.FrameSummary]:
    ours = str(Path(__file__).parents[1])
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if f.filename[:1] != "<"]
    theirs = [f for f in frames if not f.filename.startswith(ours)]
    return [f for f in theirs if not f.filename.startswith(libraries)] or theirs


class UserSource:
    """A user's object that implements `source.Source`; SourceError for what its code raises."""

    def __init__(self, source: Any, name: str) -> None:
        self._source, self._name = source, name

    def __getattr__(self, attribute: str) -> Any:
        what = f"{attribute} of {self._name}"
        with user_code(what):
            is_there = not attribute.startswith("_") and hasattr(self._source, attribute)
            found: Any = getattr(self._source, attribute) if is_there else None
        if not is_there:
            raise AttributeError(f"{self._name} has no {attribute}")
        if attribute not in ("log_probs", "sample", "histories", "visits"):
            return found

        def call(*arguments: Any) -> Any:
            with user_code(what):
                given = found(*arguments)
                # A tensor's package may refuse to convert the tensor to an array.
                return np.asarray(given) if attribute == "log_probs" else given

        if attribute == "histories":
            return lambda places: UserHistories(call(places), what)
        if attribute == "visits":
            return lambda samples, seed: _visits(call(samples, seed), what)
        return call


def _visits(given: Any, what: str) -> Iterator[Visit | WordMass]:
    with user_code(what):
        rest = iter(given)
    while True:
        with user_code(what):
            visit = next(rest, None)
        if visit is None:
            return
        if not isinstance(visit, Visit | WordMass):
            raise SourceError(
                f"{what} yielded a {type(visit).__name__}; expected dlm.distill.counts.count.Visit"
            )
        yield visit


class UserHistories:
    def __init__(self, histories: Any, what: str) -> None:
        self._histories, self._what = histories, what

    def advance(
        self, words: NDArray[np.uint32], places: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        with user_code(self._what):
            given, entropy = self._histories.advance(words, places)
            return np.asarray(given), np.asarray(entropy)
