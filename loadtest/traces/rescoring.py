"""Makes a rescorer's requests on known text: K hypotheses by W candidates at each word (DLM 3.3).

This is for traces without an acoustic model. A word's candidates are the words spelled most like
it, not those that sound like it; the rest is a beam search as decoders run it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dlm.client import State
from dlm.errors import TextError
from dlm.ngram.vocab import is_mark
from dlm.units import counted
from loadtest.traces.recorder import Recorder, RecordingUtterance

LETTERS_PER_S = 14.0  # letters and spaces of English read aloud; for audio of unknown length
CANDIDATES_END = b"</s>"
COLUMNS = ("seconds", "speaker", "text")
COLUMNS_TEXT = "seconds, speaker and text"


@dataclass(frozen=True, slots=True)
class Transcript:
    name: str
    speaker: str
    seconds: float
    words: tuple[bytes, ...]


_NOT_SPOKEN = re.compile(r"[^a-z' ]+")
_TYPOGRAPHY = str.maketrans({"’": "'", "‘": "'", "“": " ", "”": " ", "—": " ", "–": " ", "-": " "})


def spoken(line: str) -> list[str]:
    """The words of a line as in a recogniser's model: lower case, letters and apostrophes."""
    line = _NOT_SPOKEN.sub(" ", line.translate(_TYPOGRAPHY).lower())
    return [word for word in (w.strip("'") for w in line.split()) if word]


def read_transcripts(path: Path, *, as_spoken: bool) -> list[Transcript]:
    """Reads a TSV file that begins with a column of names, and has `seconds`, `speaker` and `text`;
    or plain text, a sentence per line, with audio lengths guessed from letters.

    Args    as_spoken  whether words are those of `spoken`; otherwise spaces separate words
    Raises  TextError  no line has a word, a table lacks columns, or a length is not a number
                       above 0
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    header = lines[0].split("\t") if lines else []
    is_table = len(header) > 1 or (bool(lines) and path.suffix in (".tsv", ".csv"))
    if is_table and not set(COLUMNS) <= set(header):
        raise TextError(
            f"{path}, line 1: the columns are {', '.join(header)}; expected {COLUMNS_TEXT} "
            "after a first column of names, separated by tabs. If the file has one sentence per "
            "line, remove the tabs and give it the extension .txt"
        )
    found = []
    rows: Iterable[dict[str, str] | str] = _rows(lines, header, path) if is_table else lines
    for number, row in enumerate(rows):
        text = row["text"] if isinstance(row, dict) else row
        words = tuple(word.encode() for word in (spoken(text) if as_spoken else text.split()))
        if not words:
            continue
        if isinstance(row, dict):
            name, speaker, seconds = row[header[0]], row["speaker"], _seconds(row, path, number)
        else:
            name, speaker, seconds = f"line-{number + 1}", "text", len(text) / LETTERS_PER_S
        found.append(Transcript(name, speaker, seconds, words))
    if not found:
        raise TextError(
            f"{path} has no sentences; expected a sentence per line, or TSV with the columns "
            f"{COLUMNS_TEXT}"
        )
    return found


def _rows(lines: list[str], header: list[str], path: Path) -> Iterator[dict[str, str]]:
    for number, line in enumerate(lines[1:], 2):
        row = line.split("\t")  # quotes are text
        if line and len(row) != len(header):
            raise TextError(
                f"{path}, line {number}: found {counted(len(row), 'column')}; expected "
                f"{len(header)}, as in line 1"
            )
        yield dict(zip(header, row, strict=True)) if line else dict.fromkeys(header, "")


def _seconds(row: dict[str, str], path: Path, number: int) -> float:
    try:
        seconds = float(row["seconds"])
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise TextError(
            f"{path}, line {number + 2}: seconds is {row['seconds']!r}; expected a finite number "
            "above 0"
        )
    return seconds


class Confusions:
    """Finds the words of a vocabulary that are spelled most like a given word."""

    def __init__(self, words: Iterable[bytes]) -> None:
        self._sorted = sorted(word for word in words if not is_mark(word))

    def of(self, word: bytes, count: int) -> list[bytes]:
        """`word` and its alphabetical neighbours, `count` in total."""
        at = bisect_left(self._sorted, word)
        first = max(min(at - count // 2, len(self._sorted) - count), 0)
        near = [one for one in self._sorted[first : first + count] if one != word]
        return [word, *near[: count - 1]]


def positions(transcript: Transcript) -> Iterator[tuple[float, bytes]]:
    """Each word with the audio time of its end, as if all letters took the same time."""
    ends, letters = [], 0
    for word in transcript.words:
        letters += len(word) + 1
        ends.append(letters)
    for end, word in zip(ends, transcript.words, strict=True):
        yield transcript.seconds * end / letters, word


def rescore(
    recorder: Recorder, transcript: Transcript, confusions: Confusions, contexts: int, words: int
) -> None:
    """Walks a transcript with a beam, and records the requests as an utterance.

    Args  contexts  K: how many hypotheses are kept;  words  W: how many candidates per position
    """
    with recorder.spoken(
        transcript.name,
        speaker=transcript.speaker,
        seconds=transcript.seconds,
        kind="lattice",
    ):
        handle = recorder.utterance()
        beam: dict[State, float] = {handle.begin(): 0.0}
        for at_s, word in positions(transcript):
            recorder.at_s = at_s
            beam = _extend(handle, beam, confusions.of(word, words), contexts)
        recorder.at_s = transcript.seconds
        _extend(handle, beam, [CANDIDATES_END], contexts)


def _extend(
    handle: RecordingUtterance, beam: dict[State, float], candidates: list[bytes], keep: int
) -> dict[State, float]:
    """Extends every hypothesis by every candidate; keeps the best, with distinct states."""
    found = handle.extend(list(beam), candidates)
    best: dict[State, float] = {}
    for row, total in enumerate(beam.values()):
        for column, prob in enumerate(found.log10_prob[row].tolist()):
            state = found.states[row, column]
            best[state] = max(best.get(state, float("-inf")), total + prob)
    return dict(sorted(best.items(), key=lambda one: -one[1])[:keep])
