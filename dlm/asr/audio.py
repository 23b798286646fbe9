"""Audio files as the acoustic model takes them: one channel, 16,000 samples per second."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import AudioError

SAMPLE_RATE = 16_000
# Shorter than any word; the acoustic model makes frames even of one sample.
SHORTEST_S = 0.1
# Below this, consonants are gone. Telephones have 8,000.
LOWEST_RATE = 4_000
# The acoustic model learnt from utterances; longer audio is cut at pauses into segments of at most
# this. Each is decoded by itself, so that its words are shown before the next one is listened to.
SEGMENT_S = 20.0
_PAUSE_S = 0.2  # a cut is the middle of the quietest stretch of this length
_BLOCK = 1 << 16  # samples read at a time
# libsndfile's own log, where a file of WAV, AIFF or AU is shorter than its header promises.
_SHORTER = re.compile(r"^\s*(?:data|SSND|Data Size)\s*: (\d+) \(should be (\d+)\)", re.MULTILINE)
_UNKNOWN_BYTES = 0x7FFF0000  # headers of streams promise this or more


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of audio that is decoded by itself.

    start_s  where it begins in the whole
    samples  (N,) float32 in -1..1, 16 kHz
    """

    start_s: float
    samples: NDArray[np.float32]


def read_audio(path: str | os.PathLike[str]) -> NDArray[np.float32]:
    """The samples of an audio file, its channels averaged, resampled to 16 kHz.

    Samples of files of floats may exceed full scale; all are then divided by the largest.

    Shapes  returns (N,) float32 in -1..1
    Raises
        OSError     there is no such file, or it cannot be read
        AudioError  it is empty, too short, cut off, damaged, not a regular file, has a rate below
                    `LOWEST_RATE`, or is in no format that libsndfile reads
    """
    import soundfile

    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise AudioError(f"{path} is a folder, a pipe or a device; an audio file is expected")
    with Path(path).open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise AudioError(f"{path} is an empty file; audio is expected, such as WAV or FLAC")
        try:
            with soundfile.SoundFile(file) as audio:
                rate = audio.samplerate
                if rate < LOWEST_RATE:
                    raise AudioError(
                        f"{path} has {rate:,} samples per second; {LOWEST_RATE:,} or more are "
                        "expected of speech, 16,000 are best"
                    )
                promised = max(audio.frames, _promised(audio))
                samples = _mono_16k(audio)
                read = audio.tell()
        except (soundfile.LibsndfileError, soundfile.SoundFileRuntimeError) as exc:
            reason = getattr(exc, "error_string", str(exc)).strip().rstrip(".")
            raise AudioError(
                f"{path} could not be read as audio ({reason}); a file that libsndfile reads is "
                "expected, such as WAV, FLAC, OGG or MP3"
            ) from exc
    if read < promised:
        raise AudioError(
            f"{path} ends after {read / rate:.2f} s of the {promised / rate:.2f} s that its header "
            "promises; it was cut off, copy it again"
        )
    if not np.isfinite(samples).all():
        raise AudioError(f"{path} holds samples that are not numbers; convert it again")
    if len(samples) < SHORTEST_S * SAMPLE_RATE:
        raise AudioError(
            f"{path} lasts {len(samples) / SAMPLE_RATE:.3f} s; {SHORTEST_S:g} s or more are "
            "expected, since no word is shorter"
        )
    loudest = max(samples.max(), -samples.min())
    if loudest > 1.0:
        samples /= loudest
    return samples


def _promised(audio: Any) -> int:
    """Samples that the header of an open `soundfile.SoundFile` promises; 0 where it does not say.

    libsndfile takes what there is, and only its log tells. Sizes that are off by less than a word
    are mistakes of whoever wrote the header: nothing is lost.
    """
    found = _SHORTER.search(audio.extra_info)
    if found is None:
        return 0
    promised, there = map(int, found.groups())
    if promised >= _UNKNOWN_BYTES or not there:
        return 0
    frames = audio.frames * promised // there
    return frames if frames - audio.frames > SHORTEST_S * audio.samplerate else 0


def _mono_16k(audio: Any) -> NDArray[np.float32]:
    """All that is left of an open `soundfile.SoundFile`, a block at a time."""
    import soxr

    rate: int = audio.samplerate
    resampler = None if rate == SAMPLE_RATE else soxr.ResampleStream(rate, SAMPLE_RATE, 1)
    parts: list[NDArray[np.float32]] = []
    while True:
        block = audio.read(_BLOCK, dtype="float32", always_2d=True)
        mono = block.mean(axis=1, dtype=np.float32)
        ended = len(block) < _BLOCK
        parts.append(mono if resampler is None else resampler.resample_chunk(mono, last=ended))
        if ended:
            return np.concatenate(parts)


def cut_at_pauses(samples: NDArray[np.float32], longest_s: float = SEGMENT_S) -> Iterator[Segment]:
    """Audio in segments of at most `longest_s`, cut where it is quietest.

    Each cut lies in the second half of what a segment may be, so that no segment but the last is
    shorter than half of it. Joined, the segments are the audio.

    Shapes  samples (N,) float32, 16 kHz
    """
    longest = int(longest_s * SAMPLE_RATE)
    begin = 0
    while len(samples) - begin > longest:
        end = begin + longest // 2 + _quietest(samples[begin + longest // 2 : begin + longest])
        yield Segment(begin / SAMPLE_RATE, samples[begin:end])
        begin = end
    yield Segment(begin / SAMPLE_RATE, samples[begin:])


def _quietest(samples: NDArray[np.float32]) -> int:
    """The middle of the stretch of `_PAUSE_S` with the least energy."""
    width = min(int(_PAUSE_S * SAMPLE_RATE), len(samples))
    total = np.concatenate(([0.0], np.cumsum(np.square(samples, dtype=np.float64))))
    return int(np.argmin(total[width:] - total[:-width])) + width // 2
