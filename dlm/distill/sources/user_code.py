"""Calls a user's own model, and reports what its code raises and where."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts.count import Visit, WordMass
from dlm.errors import DlmError, SourceError


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turns what a user's code raises, including `SystemExit`, into a `SourceError`, which names
    `what` was called."""
    try:
        yield
    except DlmError:
        raise
    except (Exception, SystemExit) as exc:
        error = SourceError(f"{what} raised {type(exc).__name__}: {exc}")
        for frame in _places(exc)[-1:]:
            error.add_note(f"in {frame.filename}, line {frame.lineno}, {frame.name}")
        raise error from exc


def _places(exc: BaseException) -> list[traceback.FrameSummary]:
    """Where it was raised, innermost last: only frames outside installed packages, if any."""
    ours = str(Path(__file__).parents[1])
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if f.filename[:1] != "<"]
    theirs = [f for f in frames if not f.filename.startswith(ours)]
    return [f for f in theirs if not f.filename.startswith(libraries)] or theirs


class UserSource:
    """A user's object that implements `source.Source`; SourceError for what its code raises."""

    def __init__(self, source: Any, name: str) -> None:
        self._source, self._name = source, name

    def __getattr__(self, attribute: str) -> Any:
        what = f"{attribute} of {self._name}"
        with user_code(what):
            is_there = not attribute.startswith("_") and hasattr(self._source, attribute)
            found: Any = getattr(self._source, attribute) if is_there else None
        if not is_there:
            raise AttributeError(f"{self._name} has no {attribute}")
        if attribute not in ("log_probs", "sample", "histories", "visits"):
            return found

        def call(*arguments: Any) -> Any:
            with user_code(what):
                given = found(*arguments)
                # A tensor's package may refuse to convert it to an array.
                return np.asarray(given) if attribute == "log_probs" else given

        if attribute == "histories":
            return lambda places: UserHistories(call(places), what)
        if attribute == "visits":
            return lambda samples, seed: _visits(call(samples, seed), what)
        return call


def _visits(given: Any, what: str) -> Iterator[Visit | WordMass]:
    with user_code(what):
        rest = iter(given)
    while True:
        with user_code(what):
            visit = next(rest, None)
        if visit is None:
            return
        if not isinstance(visit, Visit | WordMass):
            raise SourceError(
                f"{what} returned a {type(visit).__name__}; expected dlm.distill.counts.count.Visit"
            )
        yield visit


class UserHistories:
    def __init__(self, histories: Any, what: str) -> None:
        self._histories, self._what = histories, what

    def advance(
        self, words: NDArray[np.uint32], places: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        with user_code(self._what):
            given, entropy = self._histories.advance(words, places)
            return np.asarray(given), np.asarray(entropy)
