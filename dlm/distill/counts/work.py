"""Keeps counts on disk, so that counting can resume after a kill, and parts can be added up."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlm import checkpoint
from dlm.errors import ConfigError, FormatError
from dlm.estimate.columns import ModelColumns
from dlm.files import locked
from dlm.progress import ProgressReporter
from dlm.units import counted

COUNTS = "counts.dlmcounts"
SENTENCES = "sentences.dlmcounts"
SAVED_EVERY_S = 120.0
# The key of the settings that may differ between parts.
SHARE = "share"


class Summed(Protocol):
    """An object whose sums grow while blocks are counted."""

    def sums(self) -> list[NDArray[Any]]:
        """Returns the arrays that add up over parts; they are not copies."""

    def restore(self, sums: Sequence[NDArray[Any]]) -> None:
        """Resumes from `sums`; ValueError if they belong to other counts."""


def count_all(
    blocks: Iterator[Iterator[int]],
    counts: Summed,
    settings: Mapping[str, Any],
    *,
    file: Path | None = None,
    total: int = 0,
    stage: str = "counting",
    reporter: ProgressReporter | None = None,
    saved_every_s: float = SAVED_EVERY_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Counts to the end and saves progress between blocks; the sums are the same to the bit even if
    the process was killed and counting resumed.

    Args
        blocks         iterators that add to `counts`, and yield how many sentences they began
        settings       everything that the counts depend on, as JSON; `SHARE` is for this part alone
        file           to save to, and to resume from if it exists; None saves nothing
        total          number of sentences, for progress reports; 0 if not known
    Raises  ConfigError  `file` has other settings; another process is counting into it
            FormatError  `file` is damaged
    """
    reporter = reporter or ProgressReporter(lambda _: None)
    with contextlib.nullcontext() if file is None else _only_one(file):
        facts = {"sentences": 0, "blocks": 0, "whole": False}
        if file is not None and file.exists():
            facts = _resume(counts, settings, file)
            stage = f"{stage}; {facts['sentences']:,} sentences already counted"
        reporter.stage(stage, max(total - facts["sentences"], 0), "sentences")
        if facts["whole"]:
            return
        saved = clock()
        for block in islice(blocks, facts["blocks"], None):
            if file is not None and clock() - saved >= saved_every_s:
                _save(counts, settings, file, facts)
                saved = clock()
            for begun in block:
                facts["sentences"] += begun
                reporter.step(begun)
            facts["blocks"] += 1
        if file is not None:
            _save(counts, settings, file, facts | {"whole": True})


def _save(counts: Summed, settings: Mapping[str, Any], file: Path, facts: dict[str, Any]) -> None:
    # Only the owner may read the file, since it may contain words of a text.
    checkpoint.save(file, counts.sums(), settings, facts=facts, mode=0o600)


def _resume(counts: Summed, settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    found = _read(file)
    found.refuse_other_settings(settings)
    try:
        counts.restore(found.arrays)
    except (IndexError, TypeError, ValueError) as exc:
        raise FormatError(
            f"cannot resume counting from {file} ({exc!r}): it was changed, or written by another "
            "version of dlm. Remove it to count again"
        ) from exc
    return dict(found.facts)


def add_parts(
    files: Sequence[Path], settings: Mapping[str, Any], sums: Sequence[NDArray[np.float64]]
) -> None:
    """Adds several workers' counts to `sums`; `files` are from `count_all`, or `--work` folders.

    Raises
        ConfigError  sources, topologies or texts differ; only some files have a text; files cover
                     the same sentences, or have identical counts; counting is unfinished
        FormatError  a damaged file, or one whose numbers are not counts
    """
    common: dict[str, Any] = {}
    shares: list[dict[str, Any]] = []
    digests: list[str] = []
    for given in files:
        found = _read(_file(given))
        own = {name: value for name, value in found.settings.items() if name != SHARE}
        # Either all files name the same text as the first, or none names a text.
        common = common or own | checkpoint.canonical(settings)
        if differing := checkpoint.differences(own, common):
            raise ConfigError(
                f"{given} cannot be added to the other counts: {'; '.join(differing)}. All counts "
                "need the same source and the same topology"
            )
        if not found.facts["whole"]:
            raise ConfigError(
                f"{given} is not finished: {counted(found.facts['sentences'], 'sentence')} so far. "
                "To resume, repeat the command that wrote it"
            )
        share = {k: v for k, v in found.settings[SHARE].items() if k != "samples"}
        if share in shares:
            raise ConfigError(
                f"{given} and {files[shares.index(share)]} counted the same sentences; give each "
                "worker a different --seed or --part"
            )
        shares.append(share)
        _check_counts(found, sums)
        digest = checkpoint.digest(found.arrays)
        if digest in digests and any(array.any() for array in found.arrays):
            raise ConfigError(
                f"{given} and {files[digests.index(digest)]} have identical counts: one is a copy, "
                "or the source samples the same sentences for every seed. Give only one of the two"
            )
        digests.append(digest)
        for total, more in zip(sums, found.arrays, strict=True):
            total += more


def _check_counts(found: checkpoint.Checkpoint, sums: Sequence[NDArray[np.float64]]) -> None:
    checkpoint.check_shapes(found.arrays, sums, found.path)
    for array in found.arrays:
        # One number may be nan: the per-word entropy of a network that predicts wordpieces.
        if (array < 0).any() or np.isinf(array).any() or (np.isnan(array).any() and len(array) > 1):
            raise FormatError(
                f"{found.path} has counts that are negative, infinite or NaN; expected finite "
                "numbers, 0 or more. Remove the file, and repeat the command that wrote it"
            )


def missing_parts(counted: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lists the parts that are missing from these settings, such as "2/3 of seed 0", in order."""
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
    """Reads the settings of counts in a file or `--work` folder; raises what `add_parts` raises."""
    return _read(_file(given)).settings


def _file(given: Path) -> Path:
    return given / COUNTS if given.is_dir() else given


def ngrams_digest(topology: ModelColumns) -> str:
    text = hashlib.sha256(b"\n".join(topology.vocabulary.words))
    for columns in topology.orders:
        text.update(f"\n{columns.ids.shape}".encode())
        text.update(columns.ids.astype("<u4").tobytes())
    return text.hexdigest()


def model_digest(model: ModelColumns) -> str:
    text = hashlib.sha256(ngrams_digest(model).encode())
    for columns in model.orders:
        text.update(columns.log10_prob.astype("<f4").tobytes())
        text.update(columns.log10_backoff.astype("<f4").tobytes())
    return text.hexdigest()


def _only_one(file: Path) -> contextlib.AbstractContextManager[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    running = ConfigError(
        f"another process is counting in {file.parent}; give each worker its own --work"
    )
    return locked(file.with_name(".lock"), running, needs_locks=False)


def _read(file: Path) -> checkpoint.Checkpoint:
    if not file.exists():
        raise ConfigError(f"{file} does not exist; --counts takes folders written by --work")
    found = checkpoint.read(file)
    is_ours = {"sentences", "blocks", "whole"} <= found.facts.keys()
    if not is_ours or not isinstance(found.settings.get(SHARE), dict):
        raise FormatError(
            f"{file} does not contain counts from dlm distill; give a folder that --work wrote"
        )
    return found
