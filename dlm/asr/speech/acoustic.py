"""Acoustic models: the one in the package `hama`, and any other that Python code can run."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders.labels import BEGIN, BLANKS
from dlm.errors import ConfigError, QueryError

BOUNDARIES = ("<wb>", "|", " ")  # names of the label that ends a word
FAR_FROM_1 = 0.05  # tolerance for the sum of a frame's probabilities; 8-bit models are slightly off


class PhonemeModel:
    """The packaged phoneme CTC model; thread-safe, uses one core, releases the GIL. It takes 0.09
    CPU-seconds per second of audio. ConfigError if there is no native library for this platform."""

    frame_s = 0.02

    def __init__(self) -> None:
        from hama.asr import ASRModel

        try:
            self._model = ASRModel()
        except RuntimeError as exc:
            raise ConfigError(
                f"the acoustic model in the package hama does not run here ({exc}); it has native "
                "libraries only for Linux and macOS, x86-64 and arm64"
            ) from exc
        self.labels = self._model.decoder_tokens

    def log_probs(self, samples: NDArray[np.float32]) -> Any:
        model = self._model
        log_probs, lengths = model.session.run(
            [model._log_probs_output_name, model._out_lengths_output_name],
            {
                model._waveform_input_name: samples[None],
                model._waveform_lengths_input_name: np.array([len(samples)], np.int64),
            },
        )
        return log_probs[0, : int(lengths[0])]


class AcousticModel:
    """A CTC acoustic model, by default a `PhonemeModel`; ConfigError if it is unusable.

    labels    the label of each output, a phoneme, letter or piece of a word; one is in `BLANKS`.
              U+2581 begins a word, or one of `BOUNDARIES` ends it
    frame_s   seconds of audio per frame
    blank, boundary  indices of the blank, and of the label that ends words (None: no label does)
    """

    def __init__(self, model: Any = PhonemeModel) -> None:
        self._model = model = PhonemeModel() if model is PhonemeModel else model
        lacking = [one for one in ("labels", "frame_s", "log_probs") if not hasattr(model, one)]
        if lacking:
            raise ConfigError(
                f"the acoustic model is of the type {type(model).__name__}, which lacks "
                f"{', '.join(lacking)}; expected labels, frame_s and log_probs(samples)"
            )
        self.labels: tuple[str, ...] = tuple(model.labels)
        self.frame_s = float(model.frame_s)
        blanks = [label for label in BLANKS if label in self.labels]
        ends = [label for label in BOUNDARIES if label in self.labels]
        if not blanks:
            raise ConfigError(
                "none of the acoustic model's labels is the blank; expected one of "
                f"{', '.join(map(repr, BLANKS))} as a label"
            )
        if not 0 < self.frame_s < 1:
            raise ConfigError(
                f"the acoustic model's frame_s is {self.frame_s:g}; expected seconds above 0 and "
                "below 1, such as 0.02"
            )
        self.blank = self.labels.index(blanks[0])
        of_pieces = any(label.startswith(BEGIN) for label in self.labels)
        self.boundary = None if of_pieces or not ends else self.labels.index(ends[0])

    def log_probs(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Natural log-probabilities of the labels, one row per frame.

        Shapes  samples (N,) float32, 16 kHz, in -1..1; returns (T, labels) float32
        Raises  QueryError  wrong samples; or the model returns a wrong shape, or no probabilities
        """
        if samples.ndim != 1 or samples.dtype != np.float32 or not len(samples):
            raise QueryError(
                f"samples are {samples.dtype} of shape {samples.shape}; expected float32 of shape "
                "(N,), N above 0, as dlm.asr.speech.audio.read_audio returns"
            )
        found = np.ascontiguousarray(self._model.log_probs(samples), np.float32)
        if found.shape != (len(found), len(self.labels)):
            raise QueryError(
                f"the acoustic model's log_probs have the shape {found.shape}; expected (frames, "
                f"{len(self.labels)}), one column per label"
            )
        sums = np.exp(np.minimum(found, 80.0)).sum(axis=1)  # logits may be too large for exp
        wrong = np.flatnonzero(~(np.abs(sums - 1.0) < FAR_FROM_1))
        if len(wrong):
            raise QueryError(
                f"the acoustic model's probabilities of frame {wrong[0]} sum to "
                f"{sums[wrong[0]]:g}; expected 1. log_probs must return natural logarithms, as "
                "log_softmax does"
            )
        return found


def load_acoustic(named: str) -> AcousticModel:
    """Returns the acoustic model that `module:function` makes. The current folder is added to
    Python's path. Raises ConfigError if the function cannot be imported, or `AcousticModel`
    rejects its result."""
    module, _, name = named.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:  # an empty name raises ValueError
        raise ConfigError(
            f"--acoustic is {named!r}, which cannot be imported: {exc}; expected module:function, "
            "where the module is installed or in the current folder"
        ) from exc
    return AcousticModel(make())
