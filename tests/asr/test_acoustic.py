"""The packaged acoustic model gives posteriors of phonemes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("hama", reason="pip install -e '.[asr]'")
pytest.importorskip("flashlight.lib.text", reason="pip install -e '.[asr]'")

from dlm.asr.speech.audio import SAMPLE_RATE
from dlm.asr.speech.transcribe import FRAME_S, AcousticModel
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
