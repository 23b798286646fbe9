"""Restricts a model to a vocabulary: keeps the n-grams whose words are all in it.

As in KenLM's `filter single`, probabilities and backoff weights do not change, so a context's words
sum to 1 minus the probability of dropped words. `renormalised` gives P(word | context, the word is
in the vocabulary), exactly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns, memory_bytes
from dlm.estimate.merge.union import Walk, unite
from dlm.files import scratch_folder
from dlm.kenlm.open import open_ngrams
from dlm.kenlm.reader import NgramReader
from dlm.ngram.arpa import NgramBatch, SectionColumns, by_order, write_arpa
from dlm.ngram.vocab import Vocabulary
from dlm.units import counted

U32, F32, F64 = np.uint32, np.float32, np.float64

# Takes a model's comments, and counts before and after filtering; returns comments to write.
Comment = Callable[[list[str], tuple[int, ...], tuple[int, ...]], list[str]]

_RENORMALISE_BYTES = 60  # bytes per n-gram of the two largest adjacent orders, besides the model


@dataclass(frozen=True)
class FilterResult:
    """N-grams by order, before and after filtering; how many vocabulary words the model lacks."""

    counts_before: tuple[int, ...]
    counts: tuple[int, ...]
    words_missing: int


def read_words(path: str | os.PathLike[str]) -> set[bytes]:
    return set(Path(path).read_bytes().split())


def filter_arpa(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    words: Collection[bytes],
    *,
    contexts: bool = False,
    tmp: str | os.PathLike[str] | None = None,
    comment: Comment | None = None,
    progress: Callable[[str], None] | None = None,
) -> FilterResult:
    """Writes the n-grams of a model whose words are all in a vocabulary.

    Args
        words       to keep; words in angle brackets (<s>, </s>, <unk> and tags) always stay
        contexts    true if an n-gram's last word may be outside `words`: then every word is kept
        tmp         folder for the kept n-grams, 4 * (order + 2) bytes each, until the counts are
                    known; by default beside the output
    Raises          ConfigError  the model has no word of the vocabulary
    Guarantees      the n-grams of KenLM's `filter single` (with `contexts`, of its `context` mode)
                    in order, values unchanged; the output is written whole, or stays as it was
    Cost            memory: the words, and 64 MiB
    """
    say = progress or (lambda line: None)
    place = Path(output)
    folder = Path(tmp) if tmp is not None else place.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; create it, or name another folder with --tmp")
    say(f"reading {os.fspath(model)}")
    with (
        scratch_folder(folder, "dlm-filter") as scratch,
        open_ngrams(model, folder=scratch, progress=say) as reader,
        ExitStack() as opened,
    ):
        files = [
            opened.enter_context((scratch / f"{k}").open("wb")) for k in range(1, reader.order + 1)
        ]
        orders = by_order(reader.batches(), reader.order)
        kept = _KeptNgrams(reader, words, contexts, files, list(next(orders)))
        for batch in chain.from_iterable(orders):
            kept.add(batch)
        sections = kept.sections()
        counts = tuple(len(section[0]) for section in sections)
        before = tuple(reader.counts)
        comments = list(reader.comments)
        say(f"writing {sum(counts):,} of {counted(sum(before), 'n-gram')} to {place}")
        write_arpa(
            place,
            kept.vocabulary,
            sections,
            comments=comments if comment is None else comment(comments, before, counts),
        )
        return FilterResult(before, counts, kept.words_missing)


class _KeptNgrams:
    """The n-grams that are kept, in files: rows of ids and values, as 32-bit numbers."""

    def __init__(
        self,
        reader: NgramReader,
        words: Collection[bytes],
        contexts: bool,
        files: Sequence[IO[bytes]],
        unigrams: Iterable[NgramBatch],
    ) -> None:
        self._contexts = contexts
        self._keep, self.words_missing = kept_words(reader.vocabulary, words, reader.path)
        stays = np.ones_like(self._keep) if contexts else self._keep
        self._new_id = (np.cumsum(stays) - 1).astype(U32)
        self.vocabulary = Vocabulary(
            [w for w, stay in zip(reader.vocabulary.words, stays.tolist(), strict=True) if stay],
            unk_in_model=reader.vocabulary.unk_in_model,
        )
        self._files = files
        for batch in unigrams:
            self.add(batch)

    def add(self, batch: NgramBatch) -> None:
        tested = batch.ids[:, :-1] if self._contexts else batch.ids
        passes = self._keep[tested].all(axis=1)
        rows = np.empty((int(passes.sum()), batch.order + 2), U32)
        rows[:, :-2] = self._new_id[batch.ids[passes]]
        rows[:, -2] = batch.log10_prob[passes].view(U32)
        rows[:, -1] = batch.log10_backoff[passes].view(U32)
        self._files[batch.order - 1].write(rows.tobytes())

    def sections(self) -> list[SectionColumns]:
        out: list[SectionColumns] = []
        for k, file in enumerate(self._files, 1):
            file.close()
            rows = np.zeros((0, k + 2), U32)
            if Path(file.name).stat().st_size:
                rows = np.memmap(file.name, U32, "r").reshape(-1, k + 2)
            values = rows[:, k:].view(F32)
            top = k == len(self._files)
            out.append((rows[:, :k], values[:, 0], None if top else values[:, 1]))
        return out


def kept_words(
    vocabulary: Vocabulary, words: Collection[bytes], path: str
) -> tuple[NDArray[np.bool_], int]:
    """Returns which words of a model are kept, by id, and how many of `words` the model lacks;
    ConfigError if only words in angle brackets are kept."""
    wanted = frozenset(words)
    found = [word in wanted for word in vocabulary.words]
    keep = np.array(found, np.bool_)
    tags = [word.startswith(b"<") and word.endswith(b">") for word in vocabulary.words]
    of_words = int((keep & ~np.array(tags, np.bool_)).sum())
    if not of_words:
        raise ConfigError(
            f"{path} has none of the {len(wanted):,} words of the vocabulary; list words separated "
            "by white space, in the model's spelling, case and encoding"
        )
    keep |= np.array(tags, np.bool_)
    return keep, len(wanted) - sum(found)


def renormalised_bytes(counts: Iterable[int]) -> int:
    sizes = list(counts)
    pairs = [sum(sizes[k : k + 2]) for k in range(len(sizes))]
    return memory_bytes(sizes) + _RENORMALISE_BYTES * max(pairs)


def renormalised(
    model: ModelColumns, words: Collection[bytes], *, path: str = "the model", threads: int = 2
) -> tuple[Vocabulary, list[SectionColumns], int]:
    """Keeps the n-grams whose words are all in a vocabulary, with P conditional on that vocabulary.

    If Z(h) is the probability after h of all words that stay, p'(w | h) = p(w | h) / Z(h). This is
    a backoff model with weights gamma'(h) = gamma(h) Z(h') / Z(h), where h' is h without its oldest
    word: for a word that h does not list, gamma'(h) p'(w | h') = gamma(h) p(w | h') / Z(h).

    Returns     the vocabulary, the sections for `write_arpa`, and how many `words` the model lacks
    Raises      ConfigError  the model has no word of the vocabulary
    Guarantees  every context sums to 1, <s> left out, as far as float32 allows
    """
    keep, missing = kept_words(model.vocabulary, words, path)
    new_id = (np.cumsum(keep) - 1).astype(U32)
    vocabulary = Vocabulary(
        [w for w, k in zip(model.vocabulary.words, keep.tolist(), strict=True) if k],
        unk_in_model=model.vocabulary.unk_in_model,
    )
    predicted = keep.copy()
    predicted[model.vocabulary.begin_id] = False
    union = unite([model])
    out: list[SectionColumns] = []
    z_empty = 0.0
    before: tuple[Any, ...] | None = None
    with ThreadPoolExecutor(threads, thread_name_prefix="filter") as pool:
        for nodes in Walk(union, pool, threads).orders():
            k = nodes.ids.shape[1]
            columns = model.orders[k - 1]
            real = nodes.real.astype(np.bool_)
            prob = np.zeros(len(nodes), F64)
            gamma = np.ones(len(nodes), F64)
            prob[real] = 10.0 ** columns.log10_prob[nodes.row[0][real]].astype(F64)
            gamma[real] = 10.0 ** columns.log10_backoff[nodes.row[0][real]].astype(F64)
            last = nodes.ids[:, -1]
            if before is None:
                listed = predicted[last] & real
                z_empty = float(prob[listed].sum())
                divisor = np.full(len(nodes), z_empty)
                divisor[model.vocabulary.begin_id] = 1.0
            else:
                below, prob_below, gamma_below, z_shorter, ids_kept, divisor_below = before
                blank = ~real
                shorter = prob_below[nodes.suffix]
                prob[blank] = gamma_below[nodes.prefix[blank]] * shorter[blank]
                listed = predicted[last] & real
                size = len(below)
                own = np.bincount(nodes.prefix[listed], prob[listed], size)
                same = np.bincount(nodes.prefix[listed], shorter[listed], size)
                z = own + gamma_below * np.maximum(z_shorter - same, 0.0)
                # A context without mass keeps no word, and backs off completely.
                safe = np.where(z > 0.0, z, 1.0)
                weight = np.where(z > 0.0, gamma_below * z_shorter / safe, 1.0)
                z = safe
                out.append(_rows(below, ids_kept, prob_below, divisor_below, weight, new_id))
                divisor = z[nodes.prefix]
                z_of_context = z
            z_next = np.full(len(nodes), z_empty) if before is None else z_of_context[nodes.suffix]
            passes = keep[nodes.ids].all(axis=1) & (real | (k == 1))
            before = nodes, prob, gamma, z_next, passes, divisor
    assert before is not None
    nodes, prob, _, _, passes, divisor = before
    out.append(_rows(nodes, passes, prob, divisor, None, new_id))
    return vocabulary, out, missing


def _rows(
    nodes: Any,
    passes: NDArray[np.bool_],
    prob: NDArray[np.float64],
    divisor: NDArray[np.float64],
    weight: NDArray[np.float64] | None,
    new_id: NDArray[np.uint32],
) -> SectionColumns:
    with np.errstate(divide="ignore"):
        log10_prob = np.maximum(np.log10(prob[passes] / divisor[passes]), -99.0)
        backoff = None if weight is None else np.maximum(np.log10(weight[passes]), -99.0)
    return (
        new_id[nodes.ids[passes]],
        np.minimum(log10_prob, 0.0).astype(F32),
        None if backoff is None else backoff.astype(F32),
    )
