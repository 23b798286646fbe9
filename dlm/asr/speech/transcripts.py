"""Reads files of references and hypotheses: the words of each utterance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlm.asr.lines import finite, read_utf8
from dlm.asr.rescoring.nbest import read_nbest
from dlm.client.api.splitting import split_text
from dlm.errors import TextError
from dlm.units import counted

TEXT_COLUMNS = ("text", "transcript", "sentence")
NAME_COLUMNS = ("id", "file", "utterance", "path")
# The end of an id of `dlm transcribe --json`: where in its file a later segment begins.
_SEGMENT = re.compile(r":\d+\.\d\d$")


@dataclass(frozen=True, slots=True)
class TranscriptFile:
    """The utterances of a file.

    texts     by name, or by number from 1 if lines have no names
    speakers  by name; empty if the file does not say
    numbered  True if lines have no names
    """

    texts: Mapping[str, str] = field(repr=False)
    speakers: Mapping[str, str]
    numbered: bool = False


def read_transcripts(path: Path) -> TranscriptFile:
    """Reads one of these formats, detected from the first line:

    * JSON lines, as printed by `dlm transcribe --json`; segments of a file are joined
    * n-best lists, as written by `dlm rescore`; the first hypothesis of each counts. As text, only
      if every line has an id and two scores with a decimal point
    * a tab-separated table with a header: text, a name (id or file), optionally speaker
    * a name, a tab, the text, as printed by `dlm transcribe` for several files
    * only the text, one line per utterance

    Raises  OSError;  TextError  empty, not UTF-8, or a line of another format than the first
            LatticeError  an n-best list is malformed
    """
    lines = read_utf8(path).splitlines()
    if not any(line.strip() for line in lines):
        raise TextError(f"{path} has no utterances; expected one line for each")
    if _is_nbest(lines):
        return _named(path, list(_nbest_rows(path)), join=True)
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
                f"line {number} of {path} is not an object with text and file; expected the output "
                "of `dlm transcribe --json`"
            ) from exc
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
    """Whether an id and two scores come first; words can be whole numbers, but not scores."""
    scores = split_text(line)[1:3]
    return len(scores) == 2 and all(
        not score.isdigit() and finite(score) is not None for score in scores
    )


def _nbest_rows(path: Path) -> Iterator[_Row]:
    for one in read_nbest(path):
        yield _SEGMENT.sub("", one.id), " ".join(one.hypotheses[0].words), ""


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
    """The two files with names, if their lines begin with a name without a tab, as in Kaldi's
    `text`.

    Otherwise unchanged. First words count as names if there are at least two lines, they are all
    different, each has a digit, and all names of one file are in the other.
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
    """Reference and hypothesis of each utterance in the reference.

    Names match if they are equal, or paths with the same file name: "audio/a1.flac" matches "a1"
    and "a1.wav".

    Args    subset  leave out utterances without a hypothesis
    Raises  TextError  an utterance without a hypothesis (with `subset`, all of them), or a
                       hypothesis without an utterance
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
            f"{len(missing)} of {len(keys)} utterances of the reference have no hypothesis, such "
            f"as {missing[0]!r}; expected one for each (--subset scores only those that have one)"
        )
    unknown = given.keys() - set(keys.values())
    if unknown:
        raise TextError(
            f"{len(unknown)} hypotheses have no utterance in the reference, such as "
            f"{min(unknown)!r}; remove them, or add their references"
        )
    if len(set(keys.values())) < len(keys):
        raise TextError(
            "two utterances of the reference have the same file name in different folders; rename "
            "one"
        )
    return {name: (reference.texts[name], given[key]) for name, key in keys.items() if key in given}


def _stem(name: str) -> str:
    return Path(name).stem
