"""Word counts on disk: a TSV of word and count, and beside it the record of what protects it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlm.errors import FormatError, PrivacyError
from dlm.federated.provenance import Provenance, file_digest

SIDECAR_SUFFIX = ".provenance.json"
NO_RECORD = "no provenance record stood beside the counts"


@dataclass(frozen=True)
class WordCounts:
    """Words, how often each is used, and what that says about people.

    Shapes
        counts  (words,)  float64  over 0, the most frequent first
    """

    words: tuple[str, ...]
    counts: npt.NDArray[np.float64]
    provenance: Provenance

    def probabilities(self) -> npt.NDArray[np.float64]:
        """Counts over their sum."""
        over_most = self.counts / self.counts.max()  # whose sum is finite, whatever the counts are
        shares: npt.NDArray[np.float64] = over_most / over_most.sum()
        return shares


def ranked(words: Sequence[str], counts: npt.NDArray[np.float64], least: float) -> WordCounts:
    """Those words whose count is over `least` (0 at the least), the most frequent first.

    Returns      counts with no record yet that says more than that nothing is guaranteed
    """
    order = [p for p in np.argsort(-counts, kind="stable").tolist() if counts[p] > max(least, 0.0)]
    return WordCounts(
        tuple(words[p] for p in order), counts[order], Provenance.none("not said yet")
    )


def sidecar(path: str | Path) -> Path:
    """Where the record of a counts file stands."""
    return Path(str(path) + SIDECAR_SUFFIX)


def write_counts(path: str | Path, counts: WordCounts) -> None:
    """Writes counts and their record; the record names the digest of the counts.

    Raises
        FormatError   a word with white space, which the file could not hold
    """
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        for word, count in zip(counts.words, counts.counts.tolist(), strict=True):
            if not word or word.split() != [word]:
                raise FormatError(f"{word!r} holds white space, or nothing; it is no word of a TSV")
            file.write(f"{word}\t{count:.9g}\n")
        file.flush()
        os.fsync(file.fileno())
    record = {"counts_sha256": file_digest(partial), "provenance": counts.provenance.to_dict()}
    side = sidecar(target)
    side.unlink(missing_ok=True)  # counts without a record promise nothing; the reverse would lie
    partial.replace(target)
    partial = side.with_name(side.name + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(side)


def read_counts(path: str | Path) -> WordCounts:
    """Reads counts with their record; without a record, they promise nothing.

    Raises
        FormatError    a line that is no word and count over 0, a word twice, no words
        PrivacyError   the counts are others than the record is of, or the record was changed
    """
    words: list[str] = []
    values: list[float] = []
    first: dict[str, int] = {}
    try:
        with Path(path).open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                word, tab, text = line.rstrip("\r\n").partition("\t")
                try:
                    count = float(text)
                except ValueError:
                    count = math.nan
                if not tab or word.split() != [word] or not (0 < count < math.inf):
                    raise FormatError(
                        f"{path}, line {number}: {line[:80]!r} is not a word, a tab and a count "
                        "over 0"
                    )
                if first.setdefault(word, number) != number:
                    raise FormatError(
                        f"{path}, line {number}: {word[:80]!r} comes twice, first in line "
                        f"{first[word]}; a word has one count"
                    )
                words.append(word)
                values.append(count)
    except UnicodeDecodeError as exc:
        raise FormatError(f"{path} is not UTF-8: {exc}") from exc
    if not words:
        raise FormatError(f"{path} is empty; it must hold a word, a tab and a count a line")
    side = sidecar(path)
    if not side.exists():
        return WordCounts(tuple(words), np.array(values), Provenance.none(NO_RECORD))
    try:
        record = json.loads(side.read_text(encoding="utf-8"))
        digest, body = record["counts_sha256"], record["provenance"]
    except (ValueError, KeyError, TypeError) as exc:
        raise FormatError(f"{side} is no record of counts: {exc!r}") from exc
    provenance = Provenance.from_dict(body, str(side))
    if digest != file_digest(path):
        raise PrivacyError(
            f"{path} is not the file that {side.name} is of; nothing can be claimed of it. Count "
            "again, or remove the record to go on without any guarantee"
        )
    return WordCounts(tuple(words), np.array(values), provenance)
