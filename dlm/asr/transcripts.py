"""Files of references and hypotheses: which words each utterance has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlm.errors import TextError
from dlm.units import counted

TEXT_COLUMNS = ("text", "transcript", "sentence")
NAME_COLUMNS = ("id", "file", "utterance", "path")


@dataclass(frozen=True, slots=True)
class TranscriptFile:
    """The utterances of a file.

    texts     by name; by number from 1 where lines have no names
    speakers  by name; empty where the file does not say
    numbered  whether lines had no names
    """

    texts: Mapping[str, str] = field(repr=False)
    speakers: Mapping[str, str]
    numbered: bool = False


def read_transcripts(path: Path) -> TranscriptFile:
    """Reads one of these, which the first line tells apart:

    * JSON lines, as `dlm transcribe --json` prints them: segments of a file are joined
    * a table with a header, columns parted by tabs: text, a name (id or file), perhaps speaker
    * a name, a tab, the text, as `dlm transcribe` prints several files
    * the text alone, a line per utterance

    Raises
        OSError    the file cannot be read
        TextError  it is empty, not UTF-8, or a line is not as the first
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as exc:
        raise TextError(f"{path} is not UTF-8 ({exc.reason} at byte {exc.start})") from exc
    if not any(line.strip() for line in lines):
        raise TextError(f"{path} has no utterance; a line for each is expected")
    header = lines[0].lower().split("\t")
    if lines[0].startswith("{"):
        return _named(path, list(_json_rows(path, lines)), join=True)
    if _column(header, TEXT_COLUMNS) is not None and _column(header, NAME_COLUMNS) is not None:
        return _named(path, list(_table_rows(path, lines, header)))
    if "\t" in lines[0]:
        return _named(path, list(_tab_rows(path, lines)))
    texts = {str(number): line for number, line in enumerate(lines, 1)}
    return TranscriptFile(texts, {}, numbered=True)


_Row = tuple[str, str, str]  # name, text, speaker


def _named(path: Path, rows: list[_Row], *, join: bool = False) -> TranscriptFile:
    texts: dict[str, str] = {}
    for name, text, _ in rows:
        if name in texts and not join:
            raise TextError(f"{path} has {name!r} twice; a line for each utterance is expected")
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
                f"line {number} of {path} is not an object with text and file, as `dlm transcribe "
                "--json` prints them"
            ) from exc
        yield str(name), str(text), str(speaker)


def _table_rows(path: Path, lines: list[str], header: list[str]) -> Iterator[_Row]:
    text, name = _column(header, TEXT_COLUMNS), _column(header, NAME_COLUMNS)
    speaker = _column(header, ("speaker",))
    assert text is not None and name is not None
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        row = line.split("\t")  # quotes are text: one that is not closed takes no line with it
        if len(row) != len(header):
            raise TextError(
                f"line {number} of {path} has {counted(len(row), 'column')}; {len(header)} are "
                "expected, as in its first line"
            )
        yield row[name], row[text], "" if speaker is None else row[speaker]


def _tab_rows(path: Path, lines: list[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        name, tab, text = line.partition("\t")
        if not tab:
            raise TextError(
                f"line {number} of {path} has no tab; a name, a tab and the text are expected, as "
                "in its first line"
            )
        yield name, text, ""


def _column(header: list[str], names: tuple[str, ...]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def with_kaldi_names(
    reference: TranscriptFile, hypothesis: TranscriptFile
) -> tuple[TranscriptFile, TranscriptFile]:
    """The two files with names, where lines without a tab begin with one, as in Kaldi's `text`.

    As they are where nothing speaks for that: the first words of two lines or more must be
    different from each other, have a digit each, and all of one file be in the other.
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


def paired(reference: TranscriptFile, hypothesis: TranscriptFile) -> dict[str, tuple[str, str]]:
    """Reference and hypothesis of each utterance that the reference has.

    Names are equal, or are paths of files of one name: "audio/a1.flac" is "a1" and "a1.wav".

    Raises  TextError  an utterance without a hypothesis, or a hypothesis of none
    """
    if reference.numbered != hypothesis.numbered:
        alone, named = (
            ("reference", "hypothesis") if reference.numbered else ("hypothesis", "reference")
        )
        raise TextError(
            f"the {named} names its utterances, the {alone} has text alone; names in both, or in "
            "neither, are expected: a name, a tab and the text"
        )
    given = dict(hypothesis.texts)
    if not reference.texts.keys() & given.keys():
        given = {_stem(name): text for name, text in given.items()}
        keys = {name: _stem(name) for name in reference.texts}
    else:
        keys = {name: name for name in reference.texts}
    missing = [name for name, key in keys.items() if key not in given]
    if missing:
        raise TextError(
            f"{len(missing)} of {len(keys)} utterances of the reference have no hypothesis, such "
            f"as {missing[0]!r}; one for each is expected"
        )
    unknown = given.keys() - set(keys.values())
    if unknown:
        raise TextError(
            f"{len(unknown)} hypotheses are of no utterance of the reference, such as "
            f"{min(unknown)!r}"
        )
    if len(set(keys.values())) < len(keys):
        raise TextError("two utterances of the reference have the same file name")
    return {name: (reference.texts[name], given[key]) for name, key in keys.items()}


def _stem(name: str) -> str:
    return Path(name).stem
