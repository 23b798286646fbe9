"""Runs the decoders of `record`, each on the utterances of its input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dlm.asr.rescoring.lattice import Scales
from dlm.asr.rescoring.rescore import PositionBatch, Search, rescore
from dlm.asr.rescoring.slf import read_slf, utterance_id
from dlm.asr.speech.audio import SAMPLE_RATE, read_audio
from dlm.errors import TextError
from dlm.progress import Tell
from loadtest.traces import rescoring
from loadtest.traces.recorder import Recorder

if TYPE_CHECKING:
    from dlm.asr.speech.transcribe import Transcriber

LATTICES = (".slf", ".lat", ".htk")
AUDIO = (".flac", ".wav", ".ogg", ".mp3")
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decoding to record: the decoder's name with its settings, and one step per utterance."""

    name: str
    steps: Sequence[Callable[[], None]]


def files_of(source: Path) -> tuple[list[Path], list[Path]]:
    """The lattices and the audio files that `source` is or contains; none if it is a text.

    Raises  TextError  a folder contains neither kind, or both
    """
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    lattices = [file for file in files if _plain(file.name).endswith(LATTICES)]
    audio = [file for file in files if file.name.endswith(AUDIO)]
    if source.is_dir() and bool(lattices) == bool(audio):
        raise TextError(
            f"{source} holds {len(lattices)} lattices ({', '.join(LATTICES)}) and {len(audio)} "
            f"audio files ({', '.join(AUDIO)}); expected a folder with only one of these kinds"
        )
    return lattices, audio


def _plain(name: str) -> str:
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name


def lattices_of(recorder: Recorder, files: Sequence[Path], lm_scale: float) -> Decoding:
    """Rescores lattices on the fly, as `dlm rescore` does: one call per position, at its time.
    File names begin with the speaker, as in LibriSpeech: 19 in 19-198-0034."""
    search = Search(Scales(lm=lm_scale))
    name = f"dlm rescore, lm scale {lm_scale:g}, beam {search.beam:g}"
    return Decoding(name, [partial(_rescore_lattice, recorder, file, search) for file in files])


def _rescore_lattice(recorder: Recorder, file: Path, search: Search) -> None:
    lattice = read_slf(file)
    name = utterance_id(file.name)

    def watch(batch: PositionBatch) -> None:
        # Requests for the whole lattice, before its search, have no time.
        recorder.at_s = 0.0 if math.isnan(batch.time_s) else batch.time_s

    seconds = lattice.duration_s or 1e-3
    with recorder.spoken(name, speaker=name.split("-")[0], seconds=seconds, kind="lattice"):
        handle = recorder.utterance()
        rescore(lattice, cast(Any, handle), search, watch)


def speech_of(recorder: Recorder, files: Sequence[Path], tell: Tell) -> Decoding:
    """Decodes audio by a CTC beam search, word by word, with the decoder of `dlm transcribe`.

    The decoder does not report the frame of a request, but sends requests in the order of frames,
    so a segment's requests are spread evenly over it.
    """
    from dlm.asr.speech.transcribe import Transcriber

    with recorder.silent():  # does not record queries for the lexicon's unigrams
        transcriber = Transcriber(cast(Any, recorder), tell=tell)
    name = f"dlm transcribe, {transcriber.settings}"
    return Decoding(name, [partial(_transcribe, recorder, transcriber, file) for file in files])


def _transcribe(recorder: Recorder, transcriber: Transcriber, file: Path) -> None:
    samples = read_audio(file)
    seconds = len(samples) / SAMPLE_RATE
    name = file.stem
    with recorder.spoken(name, speaker=name.split("-")[0], seconds=seconds, kind="frame"):
        for segment in transcriber.transcribe(samples):
            recorder.spread(segment.start_s, min(segment.end_s, seconds))


def transcripts_of(
    recorder: Recorder, source: Path, as_spoken: bool, limit: int, contexts: int, words: int
) -> Decoding:
    said = rescoring.read_transcripts(source, as_spoken=as_spoken)[: limit or None]
    confusions = rescoring.Confusions(recorder.vocabulary.words)
    steps = [partial(rescoring.rescore, recorder, one, confusions, contexts, words) for one in said]
    return Decoding(f"rescoring of known text, {contexts} contexts x {words} words", steps)
