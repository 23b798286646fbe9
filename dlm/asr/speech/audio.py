"""Reads audio files in the acoustic model's format: one channel, 16,000 samples per second."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import AudioError

SAMPLE_RATE = 16_000
# No word is shorter than this. The acoustic model makes frames even from one sample.
SHORTEST_S = 0.1
# Below this rate, consonants are lost. Telephone audio has 8,000 samples per second.
LOWEST_RATE = 4_000
# The acoustic model was trained on utterances, so longer audio is cut at pauses into segments of at
# most this length. Each is decoded separately, and its words are shown before the next one starts.
SEGMENT_S = 20.0
_PAUSE_S = 0.2  # audio is cut in the middle of the quietest stretch of this length
_BLOCK = 1 << 16  # samples read at a time
STREAM_S = 0.1  # seconds of streamed audio read at a time
# How libsndfile's log shows that a file is shorter than its header says: `_SHORTER` for WAV, AU,
# AIFF, SVX and 64-bit files (W64, RF64); `_NO_END` for VOC and MAT4 files, and for Ogg files with
# no last page. For NIST files (SPHERE), whose header is text, the log shows nothing.
_SHORTER = re.compile(
    r"^\s*(?:data|SSND|BODY|Data Size|(riff|Riff size))\s*: (\d+) \(should be (\d+)\)",
    re.MULTILINE,
)
_NO_END = re.compile(
    r"^Ogg ?: (?:Last page lacks an end-of-stream|Junk after the last)"
    r"|^(?:\*\*\* File s|S)eems to be (?:a )?truncated",
    re.MULTILINE,
)
_NIST_FRAMES = re.compile(rb"^sample_count -i (\d+)$", re.MULTILINE)
_NIST_HEADER_BYTES = 1024
_UNKNOWN_BYTES = 0x7FFF0000  # headers of streams state this 32-bit size or a larger one
_UNKNOWN_FRAMES = 2**63 - 1  # libsndfile's number of frames for FLAC from a stream


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of the audio that is decoded separately; samples are (N,) float32 in -1..1, 16 kHz."""

    start_s: float
    samples: NDArray[np.float32]


def read_audio(path: str | os.PathLike[str]) -> NDArray[np.float32]:
    """Reads an audio file as (N,) float32 in -1..1: averages the channels, resamples to 16 kHz.

    If a float file exceeds full scale, all samples are divided by the largest.
    Raises  OSError;  AudioError  empty, too short, cut off, damaged, not a regular file, a rate
            below `LOWEST_RATE`, or a format that libsndfile does not read
    """
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise AudioError(f"{path} is a folder, a pipe or a device; expected an audio file")
    with Path(path).open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise AudioError(f"{path} is empty; expected audio, such as WAV or FLAC")
        with _opened(path, file.fileno()) as audio:
            rate = audio.samplerate
            promised = _promised(audio, file.fileno())
            parts, counts = zip(*_mono_16k(audio, _BLOCK), strict=True)
            has_end = not _NO_END.search(audio.extra_info)
    samples, read = np.concatenate(parts), sum(counts)
    if read < promised:
        raise AudioError(
            f"{path} ends after {read / rate:.2f} s of the {promised / rate:.2f} s that its header "
            "promises, so it was cut off; copy it again"
        )
    if not has_end:
        raise AudioError(
            f"{path} ends after {read / rate:.2f} s, without an end marker, so it was cut off; "
            "copy it again"
        )
    if not np.isfinite(samples).all():
        raise AudioError(f"{path} has samples that are not finite numbers; convert it again")
    if len(samples) < SHORTEST_S * SAMPLE_RATE:
        raise AudioError(
            f"{path} lasts {len(samples) / SAMPLE_RATE:.3f} s; expected at least {SHORTEST_S:g} s, "
            "since no word is shorter"
        )
    loudest = max(samples.max(), -samples.min())
    if loudest > 1.0:
        samples /= loudest
    return samples


def stream_audio(path: str | os.PathLike[str]) -> Iterator[NDArray[np.float32]]:
    """The samples of a file or a pipe (`-` is standard input) as they arrive: like `read_audio`'s,
    but neither scaled nor checked at the end. The call or iteration raises AudioError, OSError."""
    blocks = _blocks(path)
    return chain([next(blocks)], blocks)


def _blocks(path: str | os.PathLike[str]) -> Iterator[NDArray[np.float32]]:
    with (
        open(0 if path == Path("-") else path, "rb", closefd=path != Path("-")) as file,
        _opened(path, file.fileno()) as audio,
    ):
        for block, _ in _mono_16k(audio, int(STREAM_S * audio.samplerate)):
            yield block


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], file: int) -> Iterator[Any]:
    import soundfile

    try:
        # Given a file object, soundfile would print errors of the object's methods, not raise them.
        with soundfile.SoundFile(file, closefd=False) as audio:
            rate = audio.samplerate
            if rate < LOWEST_RATE:
                raise AudioError(
                    f"{path} has {rate:,} samples per second; speech needs at least "
                    f"{LOWEST_RATE:,}, and 16,000 is best"
                )
            # soundfile seeks to its current position after each read, which fails for FLAC from a
            # stream.
            audio.seekable = lambda: False
            yield audio
    except (soundfile.LibsndfileError, soundfile.SoundFileRuntimeError) as exc:
        reason = getattr(exc, "error_string", str(exc)).strip().rstrip(".")
        raise AudioError(
            f"{path} could not be read as audio ({reason}); expected a file that libsndfile "
            "reads, such as WAV, FLAC, OGG or MP3"
        ) from exc


def promised_s(path: str | os.PathLike[str]) -> float:
    """Returns the seconds of audio that a file's header promises, for progress; 0 if unknown."""
    import soundfile

    with contextlib.suppress(OSError, soundfile.SoundFileError):
        if not Path(path).is_file():
            return 0.0
        with (
            Path(path).open("rb") as file,
            soundfile.SoundFile(file.fileno(), closefd=False) as audio,
        ):
            return float(audio.frames / audio.samplerate * (audio.frames < _UNKNOWN_BYTES))
    return 0.0


def _promised(audio: Any, file: int) -> int:
    """Returns how many samples the header of an open `soundfile.SoundFile` promises; 0 if unknown.
    Only libsndfile's log shows how much is missing; a gap shorter than any word is ignored."""
    frames: int = audio.frames if audio.frames != _UNKNOWN_FRAMES else 0
    if audio.format == "NIST":
        count = _NIST_FRAMES.search(os.pread(file, _NIST_HEADER_BYTES, 0))
        return frames if count is None else int(count[1])
    found = _SHORTER.search(audio.extra_info)
    if found is None:
        return frames
    promised, there = int(found[2]), int(found[3])
    if (promised >= _UNKNOWN_BYTES and not found[1]) or not there:
        return frames
    longer = frames * promised // there
    return longer if longer - frames > SHORTEST_S * audio.samplerate else frames


def _mono_16k(audio: Any, size: int) -> Iterator[tuple[NDArray[np.float32], int]]:
    """Yields the blocks of an open `soundfile.SoundFile`, each with the number of samples
    read for it; some codecs, such as GSM 6.10, do not know this number in advance."""
    import soxr

    rate: int = audio.samplerate
    resampler = None if rate == SAMPLE_RATE else soxr.ResampleStream(rate, SAMPLE_RATE, 1)
    ended = False
    while not ended:
        block = audio.read(size, dtype="float32", always_2d=True)
        with np.errstate(over="ignore", invalid="ignore"):  # `read_audio` refuses the result
            mono = block.mean(axis=1, dtype=np.float32)
        ended = len(block) < size
        made = mono if resampler is None else resampler.resample_chunk(mono, last=ended)
        yield made, len(block)


def cut_at_pauses(
    blocks: Iterable[NDArray[np.float32]], longest_s: float = SEGMENT_S
) -> Iterator[tuple[Segment, bool]]:
    """Cuts audio where it is quietest, into segments of at most `longest_s` and, except for the
    last, at least half as long. `blocks` are (N,) float32 at 16 kHz; no sample is lost. Yields
    (segment, True) for each segment and, after each block, (the unfinished segment, False)."""
    longest, begin, held = int(longest_s * SAMPLE_RATE), 0, np.empty(0, np.float32)
    for block in blocks:
        held = np.concatenate([held, block]) if len(held) else block
        while len(held) > longest:
            end = longest // 2 + _quietest(held[longest // 2 : longest])
            yield Segment(begin / SAMPLE_RATE, held[:end]), True
            begin, held = begin + end, held[end:]
        yield Segment(begin / SAMPLE_RATE, held), False
    yield Segment(begin / SAMPLE_RATE, held), True


def _quietest(samples: NDArray[np.float32]) -> int:
    width = min(int(_PAUSE_S * SAMPLE_RATE), len(samples))
    total = np.concatenate(([0.0], np.cumsum(np.square(samples, dtype=np.float64))))
    return int(np.argmin(total[width:] - total[:-width])) + width // 2
