"""The study of word errors decides as it says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest

pytest.importorskip("flashlight.lib.text", reason="pip install -e '.[asr]'")
pytest.importorskip("hama", reason="pip install -e '.[asr]'")

from benchmarks import wer
from benchmarks.wer_models import Spoken, normalised, write_text
from benchmarks.wer_plot import Bar, intervals


def spoken(name: str, speaker: str, text: str) -> Spoken:
    """An utterance."""
    return Spoken(name, Path(name), 1.0, speaker, tuple(text.split()))


def test_text_is_normalised_as_references_are() -> None:
    """Lower case; letters and apostrophes inside of words."""
    assert normalised("The “Rock-bound” coast’s 'twas 1912 – O'er!") == [
        "the", "rock", "bound", "coast's", "twas", "o'er",
    ]  # fmt: skip
    assert normalised("1912 -- ''") == []


def test_utterances_that_share_eight_words_with_the_text_are_found(tmp_path: Path) -> None:
    """Within a line; seven words are not enough."""
    source = tmp_path / "text.zst"
    with pa.output_stream(str(source), compression="zstd") as file:
        file.write(b"A b c, d e F g h i\nb c d e f g h\n\n99\n")
    utterances = [
        spoken("eight", "x", "z b c d e f g h i z"),
        spoken("seven", "x", "z b c d e f g h z"),
        spoken("short", "y", "a b c"),
    ]
    for _ in range(2):  # the second time of what is kept
        text, shared = write_text([source], utterances, tmp_path)
        assert shared == {"eight"}
        assert text.read_text() == "a b c d e f g h i\nb c d e f g h\n"
        source.unlink(missing_ok=True)


def test_weights_are_those_that_are_best_for_all_other_speakers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A speaker's own errors do not count."""
    first, second = wer.GRID[:2]
    monkeypatch.setattr(wer, "GRID", (first, second))
    study: Any = SimpleNamespace(
        work=tmp_path, spoken=[spoken(name, name, "a") for name in ("x", "y", "z")]
    )
    rows = [{"x": 0, "y": 0, "z": 5}, {"x": 2, "y": 2, "z": 0}]
    wer.cached(tmp_path / "tuned" / "full.clean.json", lambda: rows)
    chosen = wer.tune(study, "full", "clean", lambda: None)
    assert chosen == {"x": second, "y": second, "z": first}


def test_loud_noise_takes_weights_of_10_db_and_every_second_utterance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is tuned there."""
    monkeypatch.setattr(wer, "GRID", wer.GRID[:2])
    study: Any = SimpleNamespace(
        work=tmp_path, spoken=[spoken(name, name, "a") for name in ("x", "y", "z")]
    )
    rows = [{"x": 1, "y": 1, "z": 1}, {"x": 0, "y": 0, "z": 0}]
    wer.cached(tmp_path / "tuned" / "full.10.json", lambda: rows)
    for condition in ("10", "5", "0"):
        assert set(wer.tune(study, "full", condition, lambda: None).values()) == {wer.GRID[1]}
    assert [one.name for one in wer.Study.spoken_in(study, "0")] == ["x", "z"]
    assert wer.Study.spoken_in(study, "10") == study.spoken


def test_a_plot_is_drawn_of_what_was_measured() -> None:
    """Well-formed; a dot for each model and condition."""
    rows = {"clean": {"<2-grams>": Bar(1, -0.5, 2), "words": Bar(9, 7, 11)}, "0 dB": {}}
    drawn = intervals("WER", rows)
    assert len(ElementTree.fromstring(drawn).findall(".//{*}circle")) == 2
    assert "+11" in drawn
