"""Counts on disk: counting that is killed goes on, and parts that were counted apart add up.

A file holds the sums so far, where the source is (random numbers, sentences under way), and the
settings that all depends on, with digests of what was read. It is replaced whole every few minutes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError, FormatError
from dlm.estimate.columns import ModelColumns
from dlm.federated import checkpoint
from dlm.files import try_lock
from dlm.progress import ProgressReporter
from dlm.units import counted

COUNTS = "counts.dlmcounts"
SENTENCES = "sentences.dlmcounts"
SAVED_EVERY_S = 120.0
# Of a part's settings, those in which parts that add up differ.
SHARE = "share"


class Position(NamedTuple):
    """Where work stands that can be left and taken up: arrays, and JSON."""

    arrays: Sequence[NDArray[Any]]
    facts: Mapping[str, Any]


class Counting(Protocol):
    """Work that adds up, and that can be left and taken up."""

    def step(self) -> int | None:
        """Does a little more; returns how many sentences it began, None where all are done."""

    @property
    def can_stop(self) -> bool:
        """Whether it can be left here."""

    def sums(self) -> list[NDArray[Any]]:
        """What adds up over parts; the arrays themselves."""

    def position(self) -> Position:
        """Where it is, beside its sums."""

    def restore(self, sums: Sequence[NDArray[Any]], at: Position | None) -> None:
        """Goes on from `sums` and `position`; None where all was done."""


def count_all(
    counting: Counting,
    settings: Mapping[str, Any],
    *,
    file: Path | None = None,
    total: int = 0,
    stage: str = "counting",
    reporter: ProgressReporter | None = None,
    saved_every_s: float = SAVED_EVERY_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Counts to the end, and keeps where it is.

    Args
        settings       all that the counts depend on, as JSON; with `SHARE`, what of it is a part's
        file           what is kept, and gone on from where it is there; None keeps nothing
        total          sentences, for progress; 0 where that is not known
        saved_every_s  seconds between two savings
    Raises
        ConfigError   `file` is of other settings: each that differs is named; another process is
                      at work on it
        FormatError   it is damaged
    Guarantees
        the same sums to the bit, whenever it was killed
    """
    reporter = reporter or ProgressReporter(lambda _: None)
    with contextlib.nullcontext() if file is None else _locked(file):
        done, is_whole = 0, False
        if file is not None and file.exists():
            done, is_whole = _resume(counting, settings, file)
            stage = f"{stage}, of which {done:,} were counted before"
        reporter.stage(stage, max(total - done, 0), "sentences")
        saved = clock()
        while not is_whole and (begun := counting.step()) is not None:
            done += begun
            reporter.step(begun)
            if file is not None and counting.can_stop and clock() - saved >= saved_every_s:
                _save(counting, settings, file, done, is_whole=False)
                saved = clock()
        if file is not None and not is_whole:
            _save(counting, settings, file, done, is_whole=True)


def _save(
    counting: Counting, settings: Mapping[str, Any], file: Path, done: int, *, is_whole: bool
) -> None:
    sums = counting.sums()
    at = Position([], {}) if is_whole else counting.position()
    about = {"sums": len(sums), "sentences": done, "whole": is_whole, "at": at.facts}
    # For its owner alone: it may be of a text, and hold words of the sentences under way.
    checkpoint.save(file, [*sums, *at.arrays], settings, facts=about, mode=0o600)


def _resume(counting: Counting, settings: Mapping[str, Any], file: Path) -> tuple[int, bool]:
    found = _read(file)
    found.refuse_other_settings(settings)
    try:
        size, is_whole = int(found.facts["sums"]), bool(found.facts["whole"])
        at = None if is_whole else Position(found.arrays[size:], found.facts["at"])
        counting.restore(found.arrays[:size], at)
        return int(found.facts["sentences"]), is_whole
    except (ArithmeticError, IndexError, KeyError, StopIteration, TypeError, ValueError) as exc:
        raise FormatError(
            f"{file} does not hold where this counting was ({exc!r}): it was changed, or written "
            "by another version of dlm. Remove it to count anew"
        ) from exc


def add_parts(
    files: Sequence[Path], settings: Mapping[str, Any], sums: Sequence[NDArray[np.float64]]
) -> None:
    """Adds the counts of several workers to `sums`.

    Args
        files     of `count_all`, or the folders of `--work` that hold them
        settings  what all must have in common, without `SHARE`
    Raises
        ConfigError  counts of another source, topology or text; samples and a text; the same
                     sentences or the same counts twice; counting that has not ended
        FormatError  a damaged file, or one of numbers that are no counts
    """
    common: dict[str, Any] = {}
    shares: list[dict[str, Any]] = []
    digests: list[str] = []
    for given in files:
        found = _read(_file(given))
        own = {name: value for name, value in found.settings.items() if name != SHARE}
        # A text, which the first file names, is that of all; if it names none, none may.
        common = common or own | checkpoint.canonical(settings)
        if differing := checkpoint.differences(own, common):
            raise ConfigError(
                f"{given} holds counts of something else: {'; '.join(differing)}. Only counts of "
                "one source on one topology add up"
            )
        if not found.facts["whole"]:
            raise ConfigError(
                f"{given} is not done: {counted(found.facts['sentences'], 'sentence')} so far. "
                "Run its "
                "command again, which goes on"
            )
        share = {k: v for k, v in found.settings[SHARE].items() if k != "samples"}
        if share in shares:
            raise ConfigError(
                f"{given} and {files[shares.index(share)]} hold the same sentences; give another "
                "--seed or --part to each worker"
            )
        shares.append(share)
        _check_counts(found, sums)
        digest = checkpoint.digest(found.arrays)
        if digest in digests and any(array.any() for array in found.arrays):
            raise ConfigError(
                f"{given} and {files[digests.index(digest)]} hold the same counts to the last bit, "
                "which a copy does, or a source that samples the same sentences for each seed; "
                "give one of them"
            )
        digests.append(digest)
        for total, more in zip(sums, found.arrays, strict=True):
            total += more


def _check_counts(found: checkpoint.Checkpoint, sums: Sequence[NDArray[np.float64]]) -> None:
    """Passes where a file has numbers that can be added to `sums`.

    Raises
        FormatError  other shapes, or what no counting gives
    """
    checkpoint.check_shapes(found.arrays, sums, found.path)
    for array in found.arrays:
        # One number may be unknown: the entropy in words of a network of wordpieces.
        if (array < 0).any() or np.isinf(array).any() or (np.isnan(array).any() and len(array) > 1):
            raise FormatError(
                f"{found.path} holds counts that are negative, infinite or NaN; expected finite "
                "ones of 0 or more. Count that part again"
            )


def missing_parts(counted: Sequence[Mapping[str, Any]]) -> list[str]:
    """Parts that are not among some whose settings these are, as "2/3 of seed 0"; in order."""
    given: dict[str, set[str]] = {}
    for settings in counted:
        share = settings[SHARE]
        whole, part = f"seed {share.get('seed')}", str(share.get("part"))
        if "text" in settings:
            whole, part = "the text", f"{part}/{settings.get('parts')}"
        _, _, most = part.partition("/")
        if most.isdecimal():
            given.setdefault(f"{whole} {most}", set()).add(part)
    found = []
    for name, parts in sorted(given.items()):
        whole, _, most = name.rpartition(" ")
        every = (f"{place}/{most}" for place in range(1, int(most) + 1))
        found += [f"{part} of {whole}" for part in every if part not in parts]
    return found


def settings_of(given: Path) -> Mapping[str, Any]:
    """With which a file, or a folder of `--work`, was counted; raises as `add_parts`."""
    return _read(_file(given)).settings


def _file(given: Path) -> Path:
    return given / COUNTS if given.is_dir() else given


def ngrams_digest(topology: ModelColumns) -> str:
    """SHA-256 of the n-grams of a topology and their words."""
    text = hashlib.sha256(b"\n".join(topology.vocabulary.words))
    for columns in topology.orders:
        text.update(f"\n{columns.ids.shape}".encode())
        text.update(columns.ids.astype("<u4").tobytes())
    return text.hexdigest()


def model_digest(model: ModelColumns) -> str:
    """SHA-256 of a model: its n-grams, their words and values."""
    text = hashlib.sha256(ngrams_digest(model).encode())
    for columns in model.orders:
        text.update(columns.log10_prob.astype("<f4").tobytes())
        text.update(columns.log10_backoff.astype("<f4").tobytes())
    return text.hexdigest()


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Holds the lock of a folder's counting.

    Raises
        ConfigError  another process has it
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file.with_name(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            is_ours = try_lock(handle)
        except OSError:
            is_ours = True  # no locks on this file system
        if not is_ours:
            raise ConfigError(
                f"another process is counting in {file.parent}; give each worker its own --work"
            )
        yield
    finally:
        os.close(handle)


def _read(file: Path) -> checkpoint.Checkpoint:
    """A file of counts.

    Raises
        ConfigError  it is not there
        FormatError  it is damaged, or a checkpoint of something else
    """
    if not file.exists():
        raise ConfigError(f"{file} does not exist; --counts takes what --work wrote")
    found = checkpoint.read(file)
    is_ours = {"sums", "sentences", "whole", "at"} <= found.facts.keys()
    if not is_ours or not isinstance(found.settings.get(SHARE), dict):
        raise FormatError(f"{file} holds no counts of dlm distill")
    return found
