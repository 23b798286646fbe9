"""The decoders that `record` runs, each on the utterances of its input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dlm.asr.lattice import Scales
from dlm.asr.rescore import PositionBatch, Search, rescore
from dlm.asr.slf import read_slf, utterance_id
from dlm.client import Utterance
from dlm.errors import TextError
from loadtest import rescoring
from loadtest.recorder import Recorder

ENDINGS = (".slf", ".lat", ".htk")
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")


@dataclass(frozen=True, slots=True)
class Decoding:
    """What is to be recorded.

    name   of the decoder, with its settings
    steps  one per utterance, each of which decodes it
    """

    name: str
    steps: Sequence[Callable[[], None]]


def lattice_files(source: Path) -> list[Path]:
    """The SLF files that `source` is or holds; none where it is something else.

    Raises  TextError  a folder without any
    """
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    found = [file for file in files if _is_lattice(file.name)]
    if source.is_dir() and not found:
        raise TextError(f"{source} holds no lattice; files that end in {', '.join(ENDINGS)} do")
    return found


def _is_lattice(name: str) -> bool:
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name.endswith(ENDINGS)


def lattices_of(recorder: Recorder, files: Sequence[Path], lm_scale: float) -> Decoding:
    """On-the-fly rescoring of lattices, `dlm rescore`'s own: one call per position, at its time.

    Speakers are the beginnings of names, as LibriSpeech has them: 19 of 19-198-0034.
    """
    search = Search(Scales(lm=lm_scale))
    name = f"dlm rescore, lm scale {lm_scale:g}, beam {search.beam:g}"
    return Decoding(name, [partial(_rescore_lattice, recorder, file, search) for file in files])


def _rescore_lattice(recorder: Recorder, file: Path, search: Search) -> None:
    lattice = read_slf(file)
    name = utterance_id(file.name)

    def watch(batch: PositionBatch) -> None:
        # What is asked of the whole lattice, before its search, has no time.
        recorder.at_s = 0.0 if math.isnan(batch.time_s) else batch.time_s

    seconds = lattice.duration_s or 1e-3
    with recorder.spoken(name, speaker=name.split("-")[0], seconds=seconds, kind="lattice"):
        handle = recorder.utterance()
        rescore(lattice, _as_utterance(handle), search, watch)


def _as_utterance(handle: object) -> Utterance:
    """A recording handle has the methods of an utterance that a decoder asks."""
    return handle  # type: ignore[return-value]


def transcripts_of(
    recorder: Recorder, source: Path, as_spoken: bool, limit: int, contexts: int, words: int
) -> Decoding:
    """Rescoring of known text, see `rescoring`."""
    said = rescoring.read_transcripts(source, as_spoken=as_spoken)[: limit or None]
    confusions = rescoring.Confusions(recorder.vocabulary.words)
    steps = [partial(rescoring.rescore, recorder, one, confusions, contexts, words) for one in said]
    return Decoding(f"rescoring of known text, {contexts} contexts x {words} words", steps)
