"""The acoustic model, the phoneme CTC network in the package `hama`: a probability per 20 ms."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError, QueryError

FRAME_S = 0.02


class AcousticModel:
    """The packaged phoneme CTC model; thread-safe, on one core, releases the GIL.

    labels    IPA phonemes, the word boundary and the blank, by id
    boundary, blank  ids of the label that ends a word, and of CTC's blank

    Raises  ConfigError  the package has no native library for this platform
    """

    def __init__(self) -> None:
        from hama.asr import ASRModel

        try:
            self._model = ASRModel()
        except RuntimeError as exc:
            raise ConfigError(
                f"the acoustic model in the package hama does not run here ({exc}); it has native "
                "libraries only for Linux and macOS, x86-64 and arm64"
            ) from exc
        self.labels: tuple[str, ...] = tuple(self._model.decoder_tokens)
        self.boundary = self.labels.index("<wb>")
        self.blank = self.labels.index("<blank>")

    def log_probs(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Natural log-probabilities of the labels, one row per frame of 20 ms.

        Shapes  samples (N,) float32, 16 kHz, in -1..1; returns (N // 320 + 1, labels) float32
        Raises  QueryError
        Cost    0.09 CPU-seconds per second of audio
        """
        if samples.ndim != 1 or samples.dtype != np.float32 or not len(samples):
            raise QueryError(
                f"samples are {samples.dtype} of shape {samples.shape}; expected float32 of shape "
                "(N,), N above 0, as from dlm.asr.speech.audio.read_audio"
            )
        model = self._model
        names = [model._log_probs_output_name, model._out_lengths_output_name]
        log_probs, lengths = model.session.run(
            names,
            {
                model._waveform_input_name: samples[None],
                model._waveform_lengths_input_name: np.array([len(samples)], np.int64),
            },
        )
        return np.ascontiguousarray(log_probs[0, : int(lengths[0])], dtype=np.float32)

    def phonemes(self, log_probs: NDArray[np.float32]) -> list[list[str]]:
        """The phonemes heard, word by word, without a language model: each frame's best label."""
        best = self.collapse(log_probs.argmax(axis=1).tolist())
        words: list[list[str]] = [[]]
        for label in best:
            if label == self.boundary:
                words.append([])
            else:
                words[-1].append(self.labels[label])
        return [word for word in words if word]

    def collapse(self, path: Iterable[int]) -> list[int]:
        """The labels of a path of frames by CTC's rule: repeats merged, blanks removed."""
        out, before = [], self.blank
        for label in path:
            if label not in (before, self.blank):
                out.append(label)
            before = label
        return out
