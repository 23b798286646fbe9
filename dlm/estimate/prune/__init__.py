"""Relative-entropy pruning: drops the n-grams that matter least."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.estimate.goal import Goal
from dlm.estimate.prune.criterion import ln_histories, own_scores, raised_scores
from dlm.estimate.prune.measure import PerplexityChange, measure
from dlm.estimate.prune.renormalise import new_weights
from dlm.estimate.prune.run import PruneResult, file_bytes, least_bytes, needed_bytes, prune
from dlm.kenlm.open import open_ngrams
from dlm.ngram.arpa import is_reopenable, provenance_line
from dlm.resources import available_bytes, check_disk
from dlm.spill.arrays import IN_MEMORY, Storage

__all__ = [
    "Goal",
    "PerplexityChange",
    "PruneResult",
    "PrunedFile",
    "file_bytes",
    "least_bytes",
    "ln_histories",
    "measure",
    "needed_bytes",
    "new_weights",
    "own_scores",
    "prune",
    "prune_file",
    "raised_scores",
]


@dataclass(frozen=True)
class PrunedFile:
    result: PruneResult
    measured: PerplexityChange | None


def prune_file(
    model: Path,
    output: Path,
    goal: Goal,
    *,
    history: Path | None = None,
    keep_suffixes: bool = False,
    text: Iterable[bytes] | None = None,
    memory_bytes: int | None = None,
    tmp: Path | None = None,
    threads: int = 2,
    progress: Callable[[str], None] = lambda line: None,
) -> PrunedFile:
    """Writes a model without the n-grams that matter least.

    Args
        text          blocks of lines, as `measure.measure` takes them; None measures nothing
        memory_bytes  limit; None means the free memory. Arrays that do not fit are files in `tmp`
    Raises      ConfigError  too little memory or disk space; `model` is a pipe
    Guarantees  the output has the comments of `model`, including its privacy record
    """
    if threads < 1:
        raise ConfigError(f"--threads is {threads}; expected 1 or more")
    limit = available_bytes() if memory_bytes is None else memory_bytes
    counts = _counts(model)
    heard = () if history is None else _counts(history)
    storage = IN_MEMORY
    if needed_bytes(counts, heard) > limit:
        least, room = least_bytes(counts, heard), file_bytes(counts, heard)
        if least > limit:
            raise ConfigError(
                f"pruning {sum(counts):,} n-grams, {counts[0]:,} of them words, needs at least "
                f"{least:,} bytes of memory, but the limit is {limit:,}; raise --memory"
            )
        folder = output.parent if tmp is None else tmp
        check_disk(folder, room, f"pruning with {limit:,} bytes of memory")
        progress(
            f"keeping arrays in files in {folder}: in memory they would take "
            f"{needed_bytes(counts):,} bytes"
        )
        storage = Storage(folder)
    other = None
    if history is not None:
        progress(f"reading {history}")
        other = ModelColumns.read(
            history, storage=storage, search_bytes=limit // 4, progress=progress
        )
    progress(f"reading {model}")
    columns = ModelColumns.read(model, storage=storage, search_bytes=limit // 4, progress=progress)
    about: dict[str, object] = {
        "method": "relative entropy",
        **goal.facts(),
        "histories": None if history is None else history.name,
        "keep_suffixes": keep_suffixes,
        "from": model.name,
        "from_ngrams": columns.counts,
    }
    line = provenance_line("prune", **about)
    columns = replace(columns, comments=[*columns.comments, line])
    result = prune(
        columns,
        goal,
        history=other,
        keep_suffixes=keep_suffixes,
        threads=threads,
        progress=progress,
    )
    progress(f"writing {output}")
    result.model.write(output)
    measured = None if text is None else measure(columns, result.model, text)
    return PrunedFile(result, measured)


def _counts(path: Path) -> tuple[int, ...]:
    if path.exists() and not path.is_dir() and not is_reopenable(path):
        raise ConfigError(
            f"{path} is not a regular file; dlm reads the model twice, so write it to a file first"
        )
    with open_ngrams(path) as reader:
        return tuple(reader.counts)
