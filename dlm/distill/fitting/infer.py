"""Infers a topology from the source itself, or from it and another model (FNG section 7.2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.distill.fitting.topology import closed, without_values
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.estimate.merge import merge_models, unite
from dlm.estimate.pipeline import estimate, resident_bytes
from dlm.estimate.prune import Goal, prune
from dlm.estimate.settings import DEFAULT_FALLBACK, EstimationSettings
from dlm.files import naming, scratch_folder
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE, UNK_ID, Vocabulary

U32 = np.uint32
MOST_ORDER = 5
LEAST_BYTES = 256 << 20
_WORDS_AT_ONCE = 1 << 20
Tell = Callable[[str], None]


def infer_topology(
    said: NDArray[np.uint32],
    vocabulary: Vocabulary,
    order: int,
    *,
    ngrams: int | None = None,
    scratch: Path | None = None,
    memory_bytes: int = 1 << 30,
    threads: int = 2,
    progress: Tell | None = None,
) -> ModelColumns:
    """Returns the n-grams of a model that is estimated from sampled sentences and pruned. They are
    closed under prefixes and suffixes. An `<unk>` from the source counts as an ordinary word.

    Args
        said          (n,)  uint32  words by id, with `</s>` after each sentence
        ngrams        n-grams to keep in all orders together, including words; None keeps all
        memory_bytes  limit for estimation, besides what the process already uses; at least 256 MiB
    Raises   ConfigError   the order is outside 1 to 5; `ngrams` is less than the number of words
    """
    tell = progress or (lambda _: None)
    words = check_inferred(vocabulary, order, ngrams)
    with scratch_folder(scratch, "inferred") as folder:
        text, arpa = folder / "sentences", folder / "model.arpa"
        # Words are written as their ids: a word may have any bytes, and <unk> is an ordinary word.
        _write_ids(said, vocabulary.end_id, text)
        tell(f"estimating a model of order {order} from the sentences")
        settings = EstimationSettings(
            order=order,
            fallback=DEFAULT_FALLBACK,
            # Meanwhile the source, for example a network and its compiled code, stays in memory.
            memory_bytes=resident_bytes() + max(memory_bytes, LEAST_BYTES),
            threads=threads,
        )
        estimate([str(text)], arpa, settings, tmp=folder)
        model = ModelColumns.read(arpa)
    if ngrams is not None:
        size = ngrams - words + model.counts[0]
        if size < sum(model.counts):
            model = prune(
                model, Goal(ngrams=size), keep_suffixes=True, threads=threads, progress=tell
            ).model
    marks = {
        b"<unk>": UNK_ID,
        BEGIN_SENTENCE: vocabulary.begin_id,
        END_SENTENCE: vocabulary.end_id,
    }
    own = np.array(
        [marks[word] if word in marks else int(word) for word in model.vocabulary.words], U32
    )
    sections = [own[columns.ids] for columns in model.orders[1:]]
    return closed(_topology(vocabulary, sections), threads)


def check_inferred(vocabulary: Vocabulary, order: int, ngrams: int | None) -> int:
    """Counts the words of the topology that `infer_topology` would return; raises its errors."""
    if not 1 <= order <= MOST_ORDER:
        raise ConfigError(
            f"order {order} was requested for an inferred topology; expected 1 to {MOST_ORDER}"
        )
    words = len(vocabulary) - (not vocabulary.unk_in_model)
    if ngrams is not None and ngrams < words:
        raise ConfigError(
            f"{ngrams:,} n-grams were requested for an inferred topology, but the source alone has "
            f"{words:,} words, all of which are kept; request at least that many"
        )
    return words


def _topology(vocabulary: Vocabulary, sections: list[NDArray[np.uint32]]) -> ModelColumns:
    words = np.arange(len(vocabulary), dtype=U32)[:, None]
    return ModelColumns.of(vocabulary, [without_values(ids) for ids in (words, *sections)])


def _write_ids(said: NDArray[np.uint32], end: int, path: Path) -> None:
    with naming(path), path.open("wb") as file:
        for first in range(0, len(said), _WORDS_AT_ONCE):
            some = said[first : first + _WORDS_AT_ONCE].tolist()
            file.write(b"".join(b"\n" if word == end else b"%d " % word for word in some))


def interpolate(
    models: list[ModelColumns],
    *,
    ngrams: int | None = None,
    threads: int = 2,
    progress: Tell | None = None,
) -> ModelColumns:
    """Interpolates a source's approximations with equal weights (A_m), and prunes the model to
    `ngrams`, words included (None keeps all). The result is closed under prefixes and suffixes."""
    merged = merge_models(
        unite(models), [1 / len(models)] * len(models), threads=threads, progress=progress
    ).columns()
    if ngrams is None or ngrams >= sum(merged.counts):
        return merged
    goal = Goal(ngrams=ngrams)
    return prune(merged, goal, keep_suffixes=True, threads=threads, progress=progress).model
