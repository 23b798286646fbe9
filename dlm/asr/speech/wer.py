"""Word error rates, from alignments of hypotheses with references, with confidence intervals.

WER = (D + S + I) / N (DLM equation 15): the words deleted, substituted and inserted in the shortest
edit from the reference to the hypothesis, per word of the reference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.asr.lines import finite, read_utf8
from dlm.asr.rescoring.nbest import read_nbest
from dlm.client.phrases import split_text
from dlm.errors import QueryError, TextError
from dlm.units import counted

__all__ = [
    "Interval",
    "WordErrors",
    "align",
    "by_group",
    "error_rate",
    "rate_difference",
    "read_spellings",
    "respelled",
    "spoken_words",
    "total",
    "word_errors",
]

TEXT_COLUMNS = ("text", "transcript", "sentence")
NAME_COLUMNS = ("id", "file", "utterance", "path")
# In `dlm transcribe --json`, the id of a later segment ends with the time at which it begins.
_SEGMENT = re.compile(r":\d+\.\d\d$")
DRAWS = 10_000
_QUOTES = str.maketrans("’‘`´", "''''")
_OTHERS = re.compile(r"[^\w']|_")
# A rule is `mr => mister` or, in NIST's files, `[mr] => [mister] / [ ] __ [ ]`.
_RULE = re.compile(r"\[?([^\[\]{}/]+?)\]?\s*=>\s*\[?([^\[\]{}/]*?)\]?(\s*/\s*\[ \]\s*__\s*\[ \])?")

Spellings = Mapping[tuple[str, ...], Sequence[str]]

MATCH, SUBSTITUTION, DELETION, INSERTION = "=", "S", "D", "I"


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Counts of an alignment's errors and of its reference words; such counts can be added."""

    words: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float | None:
        return self.errors / self.words if self.words else None

    def __add__(self, other: WordErrors) -> WordErrors:
        return WordErrors(
            self.words + other.words,
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """A value, the bounds of the middle 95 % of its resamples, and their standard deviation."""

    value: float
    low: float
    high: float
    error: float


def spoken_words(text: str) -> list[str]:
    """Returns a text's words as spoken: lower case, only letters, digits and inner apostrophes."""
    words = _OTHERS.sub(" ", text.translate(_QUOTES).lower()).split()
    return [word.strip("'") for word in words if word.strip("'")]


def read_spellings(path: Path, split: Callable[[str], list[str]] = spoken_words) -> Spellings:
    """Reads rules that replace a spelling by another one, one `SPELLING => OTHER` per line.

    SPELLING is one word or several, dropped if OTHER is empty. Empty lines, comments (`;;`)
    and the heading of NIST's global mapping files (`* ...`) are skipped. Rules that depend on
    neighbouring words or have alternatives are rejected.

    Raises  OSError;  TextError  not UTF-8, no rule, a malformed rule, two rules for one spelling
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for number, line in enumerate(read_utf8(path).splitlines(), 1):
        rule = line.partition(";;")[0].strip()
        if not rule or rule.startswith("*"):
            continue
        match = _RULE.fullmatch(rule)
        spelling = tuple(split(match[1])) if match else ()
        if match is None or not spelling or "=>" in match[2]:
            raise TextError(
                f"{path}, line {number}: expected SPELLING => OTHER, such as `mr => mister`; "
                "comments begin with ;;, and alternatives {a / b} or contexts [x] __ [y] are "
                "not supported"
            )
        other = split(match[2])
        if found.setdefault(spelling, other) != other:
            raise TextError(
                f"{path}, line {number}: an earlier line replaces this spelling with other words; "
                "remove one of the two lines"
            )
    if not found:
        raise TextError(f"{path} has no spellings; expected SPELLING => OTHER on each line")
    return found


def respelled(words: Sequence[str], spellings: Spellings) -> list[str]:
    """Replaces spellings in words: from the left, the longest first, and each word at most once."""
    longest = max(map(len, spellings), default=0)
    out: list[str] = []
    at = 0
    while at < len(words):
        for size in range(min(longest, len(words) - at), 0, -1):
            other = spellings.get(tuple(words[at : at + size]))
            if other is not None:
                out += other
                at += size
                break
        else:
            out.append(words[at])
            at += 1
    return out


def align(
    reference: Sequence[str], hypothesis: Sequence[str]
) -> list[tuple[str, str | None, str | None]]:
    """The shortest edit from the reference to the hypothesis, word by word.

    Returns  (operation, word of the reference, word of the hypothesis) in order. In an insertion
             or deletion, one word is None. Substitutions come as late as the shortest edit allows
    Cost     time and memory grow with the product of the lengths: 4 bytes per pair of words
    """
    distance = _distances(reference, hypothesis)
    steps: list[tuple[str, str | None, str | None]] = []
    i, j = len(reference), len(hypothesis)
    while i or j:
        here = distance[i, j]
        if i and j and here == distance[i - 1, j - 1] + (reference[i - 1] != hypothesis[j - 1]):
            i, j = i - 1, j - 1
            same = reference[i] == hypothesis[j]
            steps.append((MATCH if same else SUBSTITUTION, reference[i], hypothesis[j]))
        elif i and here == distance[i - 1, j] + 1:
            i -= 1
            steps.append((DELETION, reference[i], None))
        else:
            j -= 1
            steps.append((INSERTION, None, hypothesis[j]))
    return steps[::-1]


def _distances(reference: Sequence[str], hypothesis: Sequence[str]) -> NDArray[np.int32]:
    """Returns the edit distances of all prefix pairs, (len(reference) + 1, len(hypothesis) + 1).

    Rows are computed in turn. Insertions, which depend on the left neighbour, are found with a
    running minimum of the row, after the cost of each step to the right is subtracted.
    """
    place = {word: number for number, word in enumerate({*reference, *hypothesis})}
    words = np.array([place[word] for word in hypothesis], np.int64)
    right = np.arange(len(words) + 1, dtype=np.int32)
    table = np.empty((len(reference) + 1, len(words) + 1), np.int32)
    table[0] = right
    for i, word in enumerate(reference):
        table[i + 1, 0] = i + 1
        np.minimum(table[i, 1:] + 1, table[i, :-1] + (words != place[word]), out=table[i + 1, 1:])
        table[i + 1] = np.minimum.accumulate(table[i + 1] - right) + right
    return table


def distance(reference: Sequence[str], hypothesis: Sequence[str]) -> int:
    return int(_distances(reference, hypothesis)[-1, -1])


def word_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> WordErrors:
    kinds = [step[0] for step in align(reference, hypothesis)]
    return WordErrors(
        len(reference), kinds.count(SUBSTITUTION), kinds.count(DELETION), kinds.count(INSERTION)
    )


def total(errors: Iterable[WordErrors]) -> WordErrors:
    return sum(errors, WordErrors())


def error_rate(groups: Sequence[WordErrors], *, draws: int = DRAWS, seed: int = 1) -> Interval:
    """Returns the word error rate, and its interval by bootstrap over groups. A group is usually a
    speaker, since a speaker's utterances are not independent. Raises QueryError for fewer than two
    groups, or a group without words."""
    errors, words = _counts(groups)
    drawn = _draws(len(groups), draws, seed)
    return _interval(errors.sum() / words.sum(), _rates(drawn, errors, words))


def rate_difference(
    first: Sequence[WordErrors],
    second: Sequence[WordErrors],
    *,
    draws: int = DRAWS,
    seed: int = 1,
) -> Interval:
    """Returns the second word error rate minus the first, by paired bootstrap; both must have the
    same groups in the same order. Raises QueryError like `error_rate`, and if groups differ."""
    errors, words = _counts(first)
    others, same = _counts(second)
    if words.tolist() != same.tolist():
        raise QueryError(
            "the two recognisers' groups differ in their numbers of words; expected the same "
            "references for both"
        )
    drawn = _draws(len(first), draws, seed)
    return _interval((others - errors).sum() / words.sum(), _rates(drawn, others - errors, words))


def _counts(groups: Sequence[WordErrors]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if len(groups) < 2:
        raise QueryError(
            f"found {counted(len(groups), 'group')} of utterances; an interval needs at least 2"
        )
    words = np.array([group.words for group in groups], np.int64)
    if (words == 0).any():
        raise QueryError("a group of utterances has no words; leave it out")
    return np.array([group.errors for group in groups], np.int64), words


def _draws(groups: int, draws: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).multinomial(groups, [1.0 / groups] * groups, size=draws)


def _rates(
    drawn: NDArray[np.int64], errors: NDArray[np.int64], words: NDArray[np.int64]
) -> NDArray[np.float64]:
    return np.asarray((drawn @ errors) / (drawn @ words))


def _interval(value: float, resampled: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Interval(float(value), float(low), float(high), float(resampled.std()))


def by_group(
    errors: Mapping[str, WordErrors], group_of: Mapping[str, str]
) -> dict[str, WordErrors]:
    found: dict[str, WordErrors] = {}
    for utterance, one in errors.items():
        group = group_of[utterance]
        found[group] = found.get(group, WordErrors()) + one
    return found


# ------------------------------------------------------------------ references and hypotheses


@dataclass(frozen=True, slots=True)
class TranscriptFile:
    """The utterances of a file, by name, or by number from 1 if its lines have no names
    (`numbered`); `speakers` is empty if the file names none."""

    texts: Mapping[str, str] = field(repr=False)
    speakers: Mapping[str, str]
    numbered: bool = False


def read_transcripts(path: Path) -> TranscriptFile:
    """Reads one of these formats, detected from the first line:

    * JSON lines, as printed by `dlm transcribe --json`; segments of a file are joined
    * n-best lists, as written by `dlm rescore`; the first hypothesis of each counts. Text counts as
      n-best lists only if every line has an id and two scores with a decimal point
    * a tab-separated table with a header: text, a name (id or file), optionally speaker
    * a name, a tab, the text, as printed by `dlm transcribe` for several files
    * only the text, one line per utterance

    Raises  OSError;  TextError  empty, not UTF-8, or a line whose format is not the first line's
            LatticeError  an n-best list is malformed
    """
    lines = read_utf8(path).splitlines()
    if not any(line.strip() for line in lines):
        raise TextError(f"{path} has no utterances; expected one per line")
    if _is_nbest(lines):
        rows = [
            (_SEGMENT.sub("", one.id), " ".join(one.hypotheses[0].words), "")
            for one in read_nbest(path)
        ]
        return _named(path, rows, join=True)
    header = lines[0].lower().split("\t")
    if lines[0].startswith("{"):
        return _named(path, list(_json_rows(path, lines)), join=True)
    if _column(header, TEXT_COLUMNS) is not None and _column(header, NAME_COLUMNS) is not None:
        return _named(path, list(_table_rows(path, lines, header)))
    if "\t" in lines[0]:
        return _named(path, list(_tab_rows(path, lines)))
    return TranscriptFile({str(n): line for n, line in enumerate(lines, 1)}, {}, numbered=True)


_Row = tuple[str, str, str]  # name, text, speaker


def _named(path: Path, rows: list[_Row], *, join: bool = False) -> TranscriptFile:
    texts: dict[str, str] = {}
    for name, text, _ in rows:
        if name in texts and not join:
            raise TextError(f"{path} has {name!r} twice; expected one line per utterance")
        texts[name] = f"{texts[name]} {text}" if name in texts else text
    return TranscriptFile(texts, {name: speaker for name, _, speaker in rows if speaker})


def _json_rows(path: Path, lines: list[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found: Any = json.loads(line)
            name = found["file"] if "file" in found else found["id"]
            text, speaker = found["text"], found.get("speaker", "")
        except (ValueError, KeyError, TypeError) as exc:
            raise TextError(
                f"line {number} of {path} lacks the JSON key text or file; expected the output "
                "of `dlm transcribe --json`"
            ) from exc
        if not found.get("partial"):  # partial results come from `dlm transcribe --stream`
            yield str(name), str(text), str(speaker)


def _is_nbest(lines: list[str]) -> bool:
    if not lines[0].startswith("{"):
        return all(_has_scores(line) for line in lines if line.strip())
    try:
        found: Any = json.loads(lines[0])
    except ValueError:
        return False
    return "hyps" in found and "text" not in found


def _has_scores(line: str) -> bool:
    """Whether a line begins with an id and two scores; a score is never a whole number."""
    scores = split_text(line)[1:3]
    return len(scores) == 2 and all(
        not score.isdigit() and finite(score) is not None for score in scores
    )


def _table_rows(path: Path, lines: list[str], header: list[str]) -> Iterator[_Row]:
    text, name = _column(header, TEXT_COLUMNS), _column(header, NAME_COLUMNS)
    speaker = _column(header, ("speaker",))
    assert text is not None and name is not None
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        row = line.split("\t")  # quotes are text: an unclosed one does not swallow the next line
        if len(row) != len(header):
            raise TextError(
                f"line {number} of {path} has {counted(len(row), 'column')}; expected "
                f"{len(header)}, as in its first line"
            )
        yield row[name], row[text], "" if speaker is None else row[speaker]


def _tab_rows(path: Path, lines: list[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        name, tab, text = line.partition("\t")
        if not tab:
            raise TextError(
                f"line {number} of {path} has no tab; expected a name, a tab and the text, as in "
                "its first line"
            )
        yield name, text, ""


def _column(header: list[str], names: tuple[str, ...]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def with_kaldi_names(
    reference: TranscriptFile, hypothesis: TranscriptFile
) -> tuple[TranscriptFile, TranscriptFile]:
    """Takes first words of lines as names if the files look like Kaldi's `text`, without tabs.

    Returns other files unchanged. First words count as names if there are at least two lines, all
    first words differ, each has a digit, and all names of one file are in the other.
    """
    one, other = (_first_words(file) if file.numbered else file for file in (reference, hypothesis))
    if one is None or other is None or not (reference.numbered or hypothesis.numbered):
        return reference, hypothesis
    names, others = ({_stem(name) for name in file.texts} for file in (one, other))
    if not (names <= others or others <= names):
        return reference, hypothesis
    return one, other


def _first_words(file: TranscriptFile) -> TranscriptFile | None:
    lines = [line.split(maxsplit=1) for line in file.texts.values() if line.strip()]
    texts = {words[0]: " ".join(words[1:]) for words in lines}
    named = all(any(letter.isdigit() for letter in name) for name in texts)
    if not named or len(texts) < max(len(lines), 2):
        return None
    return TranscriptFile(texts, file.speakers)


def paired(
    reference: TranscriptFile, hypothesis: TranscriptFile, *, subset: bool = False
) -> dict[str, tuple[str, str]]:
    """Returns the reference and the hypothesis of each utterance in the reference.

    Names match if they are equal, or paths with the same file name: "audio/a1.flac" matches "a1"
    and "a1.wav".

    Args    subset  whether to leave out utterances without a hypothesis
    Raises  TextError  an utterance has no hypothesis (with `subset`: no utterance has one), or a
                       hypothesis has no utterance
    """
    if reference.numbered != hypothesis.numbered:
        alone, named = (
            ("reference", "hypothesis") if reference.numbered else ("hypothesis", "reference")
        )
        raise TextError(
            f"the {named} names its utterances, but the {alone} has only text; expected names in "
            "both (a name, a tab and the text) or in neither"
        )
    given = dict(hypothesis.texts)
    if not reference.texts.keys() & given.keys():
        given = {_stem(name): text for name, text in given.items()}
        keys = {name: _stem(name) for name in reference.texts}
    else:
        keys = {name: name for name in reference.texts}
    missing = [name for name, key in keys.items() if key not in given]
    if missing and (not subset or len(missing) == len(keys)):
        raise TextError(
            f"{len(missing)} of {len(keys)} utterances of the reference, such as "
            f"{missing[0]!r}, have no hypothesis; expected one for each (or pass --subset)"
        )
    unknown = given.keys() - set(keys.values())
    if unknown:
        raise TextError(
            f"{len(unknown)} hypotheses, such as that of "
            f"{min(unknown)!r}, have no utterance in the reference; remove them, or add references"
        )
    if len(set(keys.values())) < len(keys):
        raise TextError(
            "two utterances of the reference have the same file name in different folders; rename "
            "one"
        )
    return {name: (reference.texts[name], given[key]) for name, key in keys.items() if key in given}


def _stem(name: str) -> str:
    return Path(name).stem
