"""Audio of every kind becomes 16 kHz mono, or an error that says what is wrong with the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("soundfile", reason="pip install -e '.[asr]'")
pytest.importorskip("soxr", reason="pip install -e '.[asr]'")

import soundfile

from dlm.asr.speech.audio import (
    SAMPLE_RATE,
    SEGMENT_S,
    Segment,
    cut_at_pauses,
    promised_s,
    read_audio,
    stream_audio,
)
from dlm.errors import AudioError


def tone(seconds: float, rate: int = SAMPLE_RATE, hertz: float = 440.0) -> np.ndarray:
    """A sine of half the full scale."""
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(
        np.float32
    )


def test_samples_of_16_khz_are_as_in_the_file(tmp_path: Path) -> None:
    """A file longer than what is read at a time."""
    samples = tone(9.5)
    soundfile.write(tmp_path / "a.wav", samples, SAMPLE_RATE, subtype="FLOAT")
    assert np.array_equal(read_audio(tmp_path / "a.wav"), samples)


@pytest.mark.parametrize(("kind", "codec"), [("WAV", "GSM610"), ("AU", "G721_32")])
def test_codecs_of_telephones_are_read(tmp_path: Path, kind: str, codec: str) -> None:
    """libsndfile can neither seek in them nor say where it is."""
    soundfile.write(tmp_path / "a", tone(2.0, 8_000), 8_000, format=kind, subtype=codec)
    assert 2 * SAMPLE_RATE <= len(read_audio(tmp_path / "a")) < 2.05 * SAMPLE_RATE


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("name", ["a.wav", "a.flac"])
def test_other_rates_are_resampled_and_channels_averaged(
    tmp_path: Path, rate: int, name: str
) -> None:
    """A tone stays that tone, as loud as the mean of its channels, and as long."""
    left = tone(3.0, rate)
    soundfile.write(tmp_path / name, np.stack([left, np.zeros_like(left)], axis=1), rate)
    samples = read_audio(tmp_path / name)
    assert samples.dtype == np.float32
    assert abs(len(samples) - 3 * SAMPLE_RATE) <= 2
    middle = slice(SAMPLE_RATE, 2 * SAMPLE_RATE)
    assert np.abs(samples[middle] - tone(3.0)[middle] / 2).max() < 0.01
    assert promised_s(tmp_path / name) == 3.0
    assert np.array_equal(np.concatenate(list(stream_audio(tmp_path / name))), samples)


def write_empty(path: Path) -> None:
    """No bytes."""
    path.touch()


def write_text(path: Path) -> None:
    """No audio."""
    path.write_text("what was said\n" * 100)


def write_header(path: Path) -> None:
    """Audio without samples."""
    soundfile.write(path, tone(0.0), SAMPLE_RATE, format="WAV")


def write_blip(path: Path) -> None:
    """Audio of 50 ms."""
    soundfile.write(path, tone(0.05), SAMPLE_RATE, format="WAV")


def write_nan(path: Path) -> None:
    """Samples that are not numbers."""
    samples = np.full(SAMPLE_RATE, np.nan, np.float32)
    soundfile.write(path, samples, SAMPLE_RATE, format="WAV", subtype="FLOAT")


def write_loud(path: Path) -> None:
    """Channels whose sum is beyond float32."""
    samples = np.full((SAMPLE_RATE, 2), 3e38, np.float32)
    soundfile.write(path, samples, SAMPLE_RATE, format="WAV", subtype="FLOAT")


def half(kind: str) -> Callable[[Path], None]:
    """Writes the first half of a file, which libsndfile reads without an error except for FLAC."""

    def write(path: Path) -> None:
        noise = np.random.default_rng(0).normal(scale=0.1, size=2 * SAMPLE_RATE)
        soundfile.write(path, noise, SAMPLE_RATE, format=kind)
        os.truncate(path, path.stat().st_size // 2)

    return write


def write_slow(path: Path) -> None:
    """A header that says one sample per second: hours of audio in a file of 32 kB."""
    soundfile.write(path, tone(1.0), 1, format="WAV")


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (write_empty, "empty"),
        (write_text, "libsndfile"),
        (write_header, "lasts 0.000 s"),
        (write_blip, "lasts 0.050 s"),
        (write_nan, "finite"),
        (write_loud, "finite"),
        (half("FLAC"), "libsndfile|cut off"),
        (half("WAV"), "1.00 s of the 2.00 s"),
        (half("AIFF"), "1.00 s of the 2.00 s"),
        (half("RF64"), "1.00 s of the 2.00 s"),
        (half("W64"), "1.00 s of the 2.00 s"),
        (half("NIST"), "0.98 s of the 2.00 s"),
        (half("SVX"), "1.00 s of the 2.00 s"),
        *((half(kind), r"\d s, without") for kind in ("VOC", "MAT4", "OGG")),
        (write_slow, "1 samples .*4,000"),
        (Path.mkdir, "folder.*pipe"),
        (os.mkfifo, "folder.*pipe"),
    ],
)
def test_bad_audio_is_a_typed_error_that_names_the_file(
    tmp_path: Path, write: object, says: str
) -> None:
    """Whatever is wrong with it."""
    path = tmp_path / "spoken"
    write(path)  # type: ignore[operator]
    with pytest.raises(AudioError, match=says) as caught:
        read_audio(path)
    assert str(path) in str(caught.value)


def test_a_header_that_points_before_the_file_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only the error speaks."""
    path = tmp_path / "a.aiff"
    soundfile.write(path, tone(1.0), SAMPLE_RATE)
    content = bytearray(path.read_bytes())
    content[35:39] = b"\xff" * 4
    path.write_bytes(content)
    with pytest.raises(AudioError):
        read_audio(path)
    assert capfd.readouterr().err == ""


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    """As for every other command."""
    with pytest.raises(FileNotFoundError):
        read_audio(tmp_path / "none.flac")
    assert promised_s(tmp_path / "nothing") == 0.0


@pytest.mark.parametrize("size", [0x7FFFFFFF, 0xFFFFFFFF, SAMPLE_RATE * 2 + 44])
def test_a_header_that_does_not_know_the_length_loses_nothing(tmp_path: Path, size: int) -> None:
    """As those of streams; or one whose writer counted the header, too."""
    path = tmp_path / "a.wav"
    soundfile.write(path, tone(1.0), SAMPLE_RATE)
    content = bytearray(path.read_bytes())
    place = content.index(b"data") + 4
    content[place : place + 4] = size.to_bytes(4, "little")
    path.write_bytes(content)
    assert len(read_audio(path)) == SAMPLE_RATE


def test_a_flac_file_that_does_not_know_its_length_is_read_to_its_end(tmp_path: Path) -> None:
    """As encoders write it to a pipe: 0 samples, which means unknown."""
    path = tmp_path / "a.flac"
    soundfile.write(path, tone(9.5), SAMPLE_RATE)
    content = bytearray(path.read_bytes())
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    path.write_bytes(content)
    assert len(read_audio(path)) == 9.5 * SAMPLE_RATE


def test_samples_above_full_scale_are_scaled_down(tmp_path: Path) -> None:
    """A file of floats that holds numbers of 16 bits sounds as it should."""
    soundfile.write(tmp_path / "a.wav", tone(1.0) * 32768, SAMPLE_RATE, subtype="FLOAT")
    assert np.allclose(read_audio(tmp_path / "a.wav"), 2 * tone(1.0), atol=1e-3)


def whole_segments(blocks: list[Any]) -> list[Segment]:
    return [segment for segment, is_whole in cut_at_pauses(blocks) if is_whole]


def test_long_audio_is_cut_in_its_pauses() -> None:
    """Joined the segments are the audio, none is too long, and cuts lie where it is quiet; they are
    the same where the audio comes bit by bit."""
    samples = tone(47.0)
    for pause_s in (15.0, 31.0):
        begin = int(pause_s * SAMPLE_RATE)
        samples[begin : begin + SAMPLE_RATE // 2] = 0.0
    segments = whole_segments([samples])
    parts = np.split(samples, range(0, len(samples), 7000))
    for one, other in zip(segments, whole_segments(parts), strict=True):
        assert one.start_s == other.start_s
        assert np.array_equal(one.samples, other.samples)
    assert np.array_equal(np.concatenate([segment.samples for segment in segments]), samples)
    assert 15.0 < segments[1].start_s < 15.5
    assert 31.0 < segments[2].start_s < 31.5
    assert all(len(segment.samples) <= SEGMENT_S * SAMPLE_RATE for segment in segments)


def test_short_audio_is_one_piece() -> None:
    """Up to the longest that a segment may be."""
    for seconds in (0.1, SEGMENT_S):
        (segment,) = whole_segments([tone(seconds)])
        assert segment.start_s == 0.0
        assert len(segment.samples) == int(seconds * SAMPLE_RATE)
    assert len(whole_segments([tone(SEGMENT_S + 1.0)])) == 2
