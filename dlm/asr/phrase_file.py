"""Files of phrases, for `dlm transcribe --phrases` and `dlm rescore --phrases`.

Each line begins with a phrase in the model's spelling. A tab and the phrase's bonus (log10) may
follow. After each further tab comes a word of the phrase, with its sounds in IPA, separated by
spaces. Cells may be empty:

    doctor strangelove<TAB>2.5<TAB>strangelove=s t ɹ e ɪ n d͡ʒ l ə v
    sellers
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dlm.asr.lines import finite, read_utf8
from dlm.client import Client, Phrases
from dlm.client.phrases import units_of, words_of
from dlm.errors import QueryError, TextError
from dlm.ngram.vocab import as_bytes
from dlm.units import counted

BONUS = 2.0  # log10, for a line without a bonus; from tests/benchmarks/rare_words.py


@dataclass(frozen=True, slots=True)
class PhraseFile:
    phrases: Phrases
    sounds: dict[str, list[tuple[str, ...]]] = field(repr=False)


def read_phrases(path: Path) -> PhraseFile:
    """Reads a file of phrases; empty lines are skipped.

    Raises  OSError;  TextError  not UTF-8, no phrase, an invalid phrase or bonus (`Phrases`), or
            sounds of a word that is not in the line
    """
    lines = read_utf8(path).split("\n")
    bonuses: dict[bytes, float] = {}
    sounds: dict[str, list[tuple[str, ...]]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        phrase, *fields = line.rstrip("\r").split("\t")
        where = f"{path}, line {number}"
        bonus = finite(fields[0]) if fields and fields[0].strip() else BONUS
        if bonus is None:
            raise TextError(f"{where}: the bonus is {fields[0]!r}; expected a finite number")
        try:
            words = words_of(phrase, "the phrase")
            units_of(bonus, "the phrase")
        except QueryError as exc:
            raise TextError(f"{where}: {exc}") from exc
        if bonuses.setdefault(b" ".join(words), bonus) != bonus:
            raise TextError(
                f"{where}: an earlier line gives this phrase another bonus; remove one of the two "
                "lines"
            )
        for given in filter(str.strip, fields[1:]):  # spreadsheets write empty cells
            word, equals, way = given.partition("=")
            if not equals or as_bytes(word.strip()) not in words or not way.split():
                raise TextError(
                    f"{where}: expected WORD=SOUNDS after the bonus: a word of the phrase, and its "
                    "sounds separated by spaces"
                )
            sounds.setdefault(word.strip(), []).append(tuple(way.split()))
    if not bonuses:
        raise TextError(f"{path} has no phrases; expected one per line")
    try:
        return PhraseFile(Phrases(bonuses), sounds)
    except QueryError as exc:  # too many phrases
        raise TextError(f"{path}: {exc}") from exc


def known_words(phrases: Phrases, client: Client) -> str:
    """Returns a line that says how many of the phrases' words the model lacks, without naming them.
    Many are missing if spellings differ, or if a file has spaces instead of tabs."""
    found = client.utterance(phrases=phrases).phrases
    new = 0 if found is None else len(found.new)
    listed, words = counted(len(phrases), "phrase"), counted(len(phrases.words), "word")
    return f"{listed}, {words} in all; the model lacks {new:,} of them"
