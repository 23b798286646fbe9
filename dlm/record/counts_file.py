"""Word counts on disk: a TSV of words and counts, with its privacy record beside it."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlm.errors import FormatError
from dlm.record.provenance import Provenance
from dlm.record.sidecar import SIDECAR_SUFFIX, read_record, write_recorded

DIGEST = "counts_sha256"  # name of the counts' digest in their record
# Endings of the files that `collect` writes beside counts of users' words.
LEDGER, REPORT_MD, REPORT_JSON = ".ledger.json", ".privacy.md", ".privacy.json"
JOURNAL, WORK = ".metrics.jsonl", ".work"


@dataclass(frozen=True)
class WordCounts:
    """Words and their counts, most frequent first: `counts` is (words,) float64, above 0."""

    words: tuple[str, ...]
    counts: npt.NDArray[np.float64]
    provenance: Provenance

    def probabilities(self) -> npt.NDArray[np.float64]:
        over_most = self.counts / self.counts.max()  # divided first, so that the sum is finite
        shares: npt.NDArray[np.float64] = over_most / over_most.sum()
        return shares


def ranked(words: Sequence[str], counts: npt.NDArray[np.float64], least: float) -> WordCounts:
    """Returns words with counts above `least` (>= 0), most frequent first, without a guarantee."""
    order = [p for p in np.argsort(-counts, kind="stable").tolist() if counts[p] > max(least, 0.0)]
    return WordCounts(
        tuple(words[p] for p in order), counts[order], Provenance.none("not said yet")
    )


def traces_of_users(counts: Path) -> list[Path]:
    """Lists files beside counts that show that users' text was counted, even without a record."""
    endings = (SIDECAR_SUFFIX, LEDGER, REPORT_JSON, JOURNAL, WORK)
    names = (f"{place}{end}" for place in (counts, counts.resolve()) for end in endings)
    return [path for name in names if (path := Path(name)).exists()]


def counts_text(counts: WordCounts) -> bytes:
    """Formats counts as the content of a file; FormatError for a word with white space."""
    lines = []
    for word, count in zip(counts.words, counts.counts.tolist(), strict=True):
        if not word or word.split() != [word]:
            raise FormatError(
                f"the word {word!r} is empty or contains white space, so a TSV file cannot hold it"
            )
        lines.append(f"{word}\t{count:.9g}\n")
    return "".join(lines).encode()


def write_counts(path: str | Path, counts: WordCounts) -> None:
    """Writes counts and their record; raises what `counts_text` and `write_recorded` raise."""
    write_recorded(path, counts_text(counts), counts.provenance, digest_name=DIGEST)


def read_counts(path: str | Path, content: bytes | None = None) -> WordCounts:
    """Reads counts and their record, from `path` or its `content`; no record means no guarantee.
    Raises FormatError, and PrivacyError if the record belongs to other counts, or was changed."""
    words: list[str] = []
    values: list[float] = []
    first: dict[str, int] = {}
    content = Path(path).read_bytes() if content is None else content
    try:
        with io.StringIO(content.decode("utf-8-sig"), newline="\n") as file:
            for number, line in enumerate(file, 1):
                word, tab, text = line.rstrip("\r\n").partition("\t")
                try:
                    count = float(text)
                except ValueError:
                    count = math.nan
                if not tab:
                    raise FormatError(
                        f"{path}, line {number} has no count; expected lines of WORD<TAB>COUNT, as "
                        "dlm unigrams writes"
                    )
                if word.split() != [word] or not (0 < count < math.inf):
                    raise FormatError(
                        f"{path}, line {number}: found {line[:80]!r}; expected a word, a tab and "
                        "a finite count above 0"
                    )
                if first.setdefault(word, number) != number:
                    raise FormatError(
                        f"{path}, line {number}: {word[:80]!r} occurs twice, first in line "
                        f"{first[word]}; expected each word once"
                    )
                words.append(word)
                values.append(count)
    except UnicodeDecodeError as exc:
        raise FormatError(f"{path} is not UTF-8: {exc}; convert the file (iconv -t UTF-8)") from exc
    if not words:
        raise FormatError(f"{path} is empty; expected a word, a tab and a count per line")
    provenance = read_record(path, content, digest_name=DIGEST, kind="counts")
    return WordCounts(tuple(words), np.array(values), provenance)
