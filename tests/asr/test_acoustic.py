"""The packaged acoustic model gives posteriors of phonemes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("hama", reason="pip install -e '.[asr]'")

from dlm.asr.speech.acoustic import FRAME_S, AcousticModel
from dlm.asr.speech.audio import SAMPLE_RATE
from dlm.errors import QueryError


@pytest.fixture(scope="module")
def model() -> AcousticModel:
    """The model."""
    return AcousticModel()


@pytest.mark.parametrize("samples", [1, 320, 1_600, 16_000, 16_001])
def test_each_frame_of_20_ms_has_a_distribution(model: AcousticModel, samples: int) -> None:
    """Whatever is heard, however short."""
    noise = np.random.default_rng(1).normal(0.0, 0.1, samples).astype(np.float32)
    log_probs = model.log_probs(noise)
    assert log_probs.dtype == np.float32
    assert log_probs.shape == (samples // int(FRAME_S * SAMPLE_RATE) + 1, len(model.labels))
    assert np.allclose(np.exp(log_probs).sum(axis=1), 1.0, atol=1e-4)


def test_samples_of_another_kind_are_refused(model: AcousticModel) -> None:
    """The native library would read past them."""
    for samples in (np.zeros(0), np.zeros((2, 5)), np.zeros(5, np.int16), np.zeros(5)):
        with pytest.raises(QueryError, match="float32"):
            model.log_probs(samples)


def test_a_path_collapses_as_ctc_reads_it(model: AcousticModel) -> None:
    """A repeat is one label, unless a blank lies between."""
    blank = model.blank
    assert model.collapse([blank, 7, 7, blank, 7, 8, 8, blank]) == [7, 7, 8]
    assert model.collapse([]) == []


def test_the_best_labels_are_phonemes_word_by_word(model: AcousticModel) -> None:
    """Boundaries at the ends and in a row hold no word."""
    place = {label: i for i, label in enumerate(model.labels)}
    path = [place[label] for label in ["<wb>", "ð", "ð", "ɛ", "<wb>", "<blank>", "<wb>", "ə"]]
    log_probs = np.full((len(path), len(model.labels)), -9.0, np.float32)
    log_probs[np.arange(len(path)), path] = 0.0
    assert model.phonemes(log_probs) == [["ð", "ɛ"], ["ə"]]
