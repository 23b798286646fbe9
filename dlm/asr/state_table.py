"""States by number, so that a decoder compares and stores integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.client import States


class StateTable:
    """The states of one model that occurred, each once, numbered from those of `first`, 1-D."""

    def __init__(self, first: States) -> None:
        self._numbers: dict[bytes, int] = {}
        self._states = first[:0]
        self.add(first)

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, states: States) -> list[int]:
        """The number of each state of an array, flattened; new ones get the next numbers."""
        numbers, known = self._numbers, len(self._numbers)
        found: list[int] = []
        fresh: list[int] = []
        for place, key in enumerate(states.keys()):
            number = numbers.setdefault(key, len(numbers))
            if number == known + len(fresh):
                fresh.append(place)
            found.append(number)
        if fresh:
            self._states = States.joined([self._states, states.reshape(-1)[fresh]])
        return found

    def take(self, numbers: Sequence[int] | NDArray[np.integer[Any]]) -> States:
        taken: States = self._states[np.asarray(numbers, np.int64)]
        return taken
