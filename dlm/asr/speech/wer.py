"""Word error rates: alignments of hypotheses with references, and confidence intervals.

WER = (D + S + I) / N (DLM equation 15): the words deleted, substituted and inserted in the shortest
edit from the reference to the hypothesis, per word of the reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.asr.lines import read_utf8
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

DRAWS = 10_000
_QUOTES = str.maketrans("’‘`´", "''''")
_OTHERS = re.compile(r"[^\w']|_")
# `mr => mister`, or as files of NIST write it: `[mr] => [mister] / [ ] __ [ ]`.
_RULE = re.compile(r"\[?([^\[\]{}/]+?)\]?\s*=>\s*\[?([^\[\]{}/]*?)\]?(\s*/\s*\[ \]\s*__\s*\[ \])?")

Spellings = Mapping[tuple[str, ...], Sequence[str]]

MATCH, SUBSTITUTION, DELETION, INSERTION = "=", "S", "D", "I"


@dataclass(frozen=True, slots=True)
class WordErrors:
    """The error counts of an alignment, and the reference's words; they can be added."""

    words: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float | None:
        """The word error rate; None if the reference has no words."""
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
    """A figure with its confidence interval.

    value      from the data itself
    low, high  contain 95 % of the resampled values
    error      standard error: the standard deviation of the resampled values
    """

    value: float
    low: float
    high: float
    error: float


def spoken_words(text: str) -> list[str]:
    """The words of a text as spoken: lower case, with letters, digits and inner apostrophes."""
    words = _OTHERS.sub(" ", text.translate(_QUOTES).lower()).split()
    return [word.strip("'") for word in words if word.strip("'")]


def read_spellings(path: Path, split: Callable[[str], list[str]] = spoken_words) -> Spellings:
    """The spellings of a file that count as another, one `SPELLING => OTHER` per line.

    A spelling is one word or several; an OTHER of no words drops it. Empty lines, comments (`;;`)
    and the heading of NIST's global mapping files (`* ...`) are skipped. Of these files, rules that
    depend on their neighbours, or have alternatives, are refused.

    Args    split  a text to words, as the transcripts are split
    Raises  OSError;  TextError  not UTF-8, no rule, another form, two rules for one spelling
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
                "comments begin with ;;, and alternatives {a / b} or neighbours [x] __ [y] are "
                "not supported"
            )
        other = split(match[2])
        if found.setdefault(spelling, other) != other:
            raise TextError(
                f"{path}, line {number}: another line has this spelling; remove one of the two"
            )
    if not found:
        raise TextError(f"{path} has no spellings; expected SPELLING => OTHER in each line")
    return found


def respelled(words: Sequence[str], spellings: Spellings) -> list[str]:
    """The words with each spelling replaced: from the left, the longest first, each word once."""
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

    Returns  (operation, word of the reference, word of the hypothesis) in order, None where an
             insertion or deletion lacks one. Of equally short edits, the one that substitutes last
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
    """(len(reference) + 1, len(hypothesis) + 1): errors between each pair of prefixes.

    Computed row by row. Insertions, which depend on the left neighbour, are a running minimum of
    the row after the cost of each step to the right is subtracted.
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
    """The word error rate, with its interval by bootstrap over groups.

    Args    groups  errors per speaker, since utterances of one speaker are not independent
            draws   number of resamples of all groups, with replacement
    Raises  QueryError  fewer than two groups, or a group without words
    """
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
    """Word error rate of the second minus that of the first, by paired bootstrap over groups.

    Args    first, second  errors of the same groups, in the same order; see `error_rate`
    Raises  QueryError  groups that do not match, fewer than two, or a group without words
    """
    errors, words = _counts(first)
    others, same = _counts(second)
    if words.tolist() != same.tolist():
        raise QueryError(
            "the two recognisers' groups have other numbers of words; expected the same references"
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
    """(draws, groups): how often each group was drawn."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(groups, np.full(groups, 1.0 / groups), size=draws)


def _rates(
    drawn: NDArray[np.int64], errors: NDArray[np.int64], words: NDArray[np.int64]
) -> NDArray[np.float64]:
    rates: NDArray[np.float64] = (drawn @ errors) / (drawn @ words)
    return rates


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
