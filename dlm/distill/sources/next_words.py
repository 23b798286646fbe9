"""Computes the full next-word distributions of a backoff model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlm.distill.sources import word_kernels as kernels
from dlm.estimate.columns import ModelColumns


class NextWords:
    """Distributions of a model's next word. A history takes 8 bytes per word of the vocabulary, so
    pass only a few histories at a time."""

    def __init__(self, model: ModelColumns) -> None:
        self._model = model
        self._prob = [10.0 ** c.log10_prob.astype(np.float64) for c in model.orders]
        self._weight = [10.0 ** c.log10_backoff.astype(np.float64) for c in model.orders]
        self._last = [np.ascontiguousarray(c.ids[:, -1]) for c in model.orders]

    def after(self, histories: NDArray[np.uint32]) -> NDArray[np.float64]:
        """Returns P of each word after each history, (b, v). `histories` (b, m) has the most recent
        word last, and `MISSING` in front of shorter histories."""
        out = np.repeat(self._prob[0][None, :], len(histories), axis=0)
        length = histories.shape[1]
        for k in range(1, min(self._model.order - 1, length) + 1):
            kernels.back_off_to(
                self._model.rows_of(np.ascontiguousarray(histories[:, length - k :])),
                self._model.orders[k - 1].first_child,
                self._last[k],
                self._prob[k],
                self._weight[k - 1],
                out,
            )
        return out
