"""Samples a source, or runs it over a text, and fits the models nearest to it. For a network or a
model in Python, visited histories are counted; for a backoff model, states of its automaton."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts import work
from dlm.distill.counts.count import (
    NgramCounts,
    Visit,
    VisitCounter,
)
from dlm.distill.counts.sampling import GIVEN, Sampling
from dlm.distill.counts.visits import own_sentences, visits_of
from dlm.distill.fitting.fit import DistilledModel, FitResult, distilled, evaluate_model, fit
from dlm.distill.fitting.infer import check_inferred, infer_topology, interpolate
from dlm.distill.fitting.prior import Prior, as_backed_off
from dlm.distill.fitting.topology import Restriction, closed, restricted, united
from dlm.distill.sources.backoff import BackoffSource
from dlm.distill.sources.source import Source, SourceReader
from dlm.distill.sources.walk import Automaton
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.ngram.vocab import END_SENTENCE, Vocabulary
from dlm.progress import ProgressReporter
from dlm.units import counted

Tell = Callable[[str], None]

U32 = np.uint32
# (number of sentences that were begun, ids of words, with `</s>` after each sentence).
Said: TypeAlias = tuple[int, NDArray[np.uint32]]
SentenceBlocks: TypeAlias = Callable[[Sampling], Iterator[Iterator[Said]]]
WHOLE_PRIOR = 0.01  # default prior, in visits, for sources that give full distributions


class SampledSource:
    """Wraps a `Source` or a backoff model for counting; raises the errors of `SourceReader`.
    Without the `sha256` of its file, the source is identified by its answers."""

    def __init__(
        self, source: Source | ModelColumns, name: str = "the source", sha256: str | None = None
    ) -> None:
        self.counting: Callable[[ModelColumns], NgramCounting]
        self.sentences: Callable[[], SentenceBlocks]
        self._base: NDArray[np.float64] | None = None
        self._identity: Callable[[], dict[str, object]]
        if isinstance(source, ModelColumns):
            if END_SENTENCE not in source.vocabulary.ids:
                raise ConfigError(
                    f"{name} has no </s>, so its sentences never end; estimate the model again, "
                    "from whole sentences"
                )
            self.vocabulary: Vocabulary = source.vocabulary
            self.counting = partial(WalkCounting, source)
            self.sentences = partial(walked_sentences, source)
            self._identity = lambda: {"model": work.model_digest(source)}
        else:
            reader = SourceReader(source, name)
            self.vocabulary = reader.vocabulary
            self.counting = partial(VisitCounting, reader)
            self.sentences = partial(sentences_of, reader)
            self._identity = reader.identity
            self._base = getattr(source, "base", None)
        self._sha256 = sha256

    def identity(self) -> dict[str, object]:
        """Returns the facts that must not have changed when a run resumes."""
        return self._identity() if self._sha256 is None else {"sha256": self._sha256}

    def prior(
        self, topology: ModelColumns, counts: NgramCounts, visits: float | None
    ) -> float | Prior:
        """Returns the prior for the source's counts: `visits`, or else the source's default."""
        if self._base is not None:
            return as_backed_off(topology, counts, self._base, visits)
        return WHOLE_PRIOR if visits is None else visits


@dataclass(frozen=True)
class Inference:
    """How to infer a topology: its `order`, 1 to 5, and its number of `ngrams`, including words.

    If `ngrams` is None, all sampled n-grams are kept. With an external topology, `interpolated`
    selects the interpolation (A_m) itself, not the model fitted again on its n-grams (A_r).
    """

    order: int = 3
    ngrams: int | None = None
    interpolated: bool = False


def count_source(
    source: SampledSource,
    topology: ModelColumns,
    sampling: Sampling | None,
    *,
    folder: Path | None = None,
    added: Sequence[Path] = (),
    progress: Tell | None = None,
) -> tuple[NgramCounts, float]:
    """Returns the counts for a closed topology, and the source's entropy summed over all visits, in
    nats. Saves them in `folder`; if `sampling` is None, sums up several workers' counts, `added`,
    instead. Raises the errors of `work.count_all` and `work.add_parts`."""
    counting = source.counting(topology)
    common = {"source": source.identity(), "topology": work.ngrams_digest(topology)}
    if sampling is None:
        work.add_parts(added, common, counting.sums())
    else:
        total = sampling.own_samples if sampling.text is None else 0
        what = counted(total, "sentence") if total else "the histories of the text"
        work.count_all(
            counting.blocks(sampling),
            counting,
            {**common, **sampling.settings()},
            file=None if folder is None else folder / work.COUNTS,
            total=total,
            stage=f"sampling {what}" if total else f"counting {what}",
            reporter=ProgressReporter(progress or (lambda _: None)),
        )
    return counting.result()


def collect_sentences(
    source: SampledSource,
    sampling: Sampling,
    *,
    folder: Path | None = None,
    progress: Tell | None = None,
) -> NDArray[np.uint32]:
    """Samples sentences: ids of words, with `</s>` after each; saves them in `folder` if given."""
    collection = SentenceCollection(source.sentences())
    settings: Mapping[str, Any] = {"source": source.identity(), **sampling.settings()}
    work.count_all(
        collection.blocks(sampling),
        collection,
        settings,
        file=None if folder is None else folder / work.SENTENCES,
        total=sampling.own_samples,
        stage=f"sampling {counted(sampling.own_samples, 'sentence')} for a topology",
        reporter=ProgressReporter(progress or (lambda _: None)),
    )
    (said,) = collection.sums()
    return np.asarray(said)


def count_restricted(
    source: SampledSource,
    topology: ModelColumns,
    sampling: Sampling | None,
    *,
    folder: Path | None = None,
    added: Sequence[Path] = (),
    threads: int = 2,
    progress: Tell | None = None,
) -> tuple[Restriction, ModelColumns, NgramCounts, float]:
    """Restricts a topology to the source's words, closes it, and counts as `count_source` does."""
    part = restricted(topology, source.vocabulary)
    target = closed(part.model, threads)
    counts, entropy = count_source(
        source, target, sampling, folder=folder, added=added, progress=progress
    )
    return part, target, counts, entropy


def distill_samples(
    source: Source | ModelColumns | SampledSource,
    topology: ModelColumns,
    *,
    samples: int = 0,
    seed: int = 0,
    sampling: Sampling | None = None,
    prior: float | None = None,
    threads: int = 2,
    folder: Path | None = None,
    added: Sequence[Path] = (),
    progress: Tell | None = None,
) -> DistilledModel:
    """Fits the model nearest to a source, from samples of it, on the n-grams of a topology.

    Args
        sampling       a part of the samples, or a text; replaces `samples` and `seed`
        prior          visits to add to a visited context. None means 0.01 or, if the source spells
                       words, the number of distinct words after the context (`as_backed_off`)
        folder, added  see `count_source`
    Raises
        ConfigError  the topology has no n-gram in the source's words; there are no samples
        SourceError  the source does not return distributions
    Paper         Suresh et al. 2021, section 4; FNG section 4
    """
    if not isinstance(source, SampledSource):
        source = SampledSource(source)
    if sampling is None and not added:
        sampling = Sampling(samples, seed)
    part, target, counts, entropy = count_restricted(
        source, topology, sampling, folder=folder, added=added, threads=threads, progress=progress
    )
    found = fit(
        target,
        counts,
        prior=source.prior(target, counts, prior),
        threads=threads,
        progress=progress,
    )
    return distilled(found, counts, entropy, part.foreign_words, part.dropped)


def distill_inferred(
    source: Source | ModelColumns | SampledSource,
    inference: Inference,
    sampling: Sampling,
    *,
    external: ModelColumns | None = None,
    prior: float | None = None,
    threads: int = 2,
    folder: Path | None = None,
    scratch: Path | None = None,
    memory_bytes: int = 1 << 30,
    progress: Tell | None = None,
) -> DistilledModel:
    """Fits the nearest model to a source, on n-grams that the source itself produces often.

    The source is sampled twice, with the same seed: for its n-grams, then for their counts.

    Args    external  a model with additional n-grams. One model is fitted on these (A_e), one
                      on the source's n-grams (A_i), from counts of both. The two models are
                      interpolated with equal weights and pruned to `inference.ngrams` (A_m); the
                      same counts give the nearest model on the remaining n-grams (A_r)
    Raises  ConfigError  `sampling` is a part or a text; or raised by `infer.infer_topology` or
                         `distill_samples`
    Paper   FNG section 7.2, Algorithm 1
    """
    if not isinstance(source, SampledSource):
        source = SampledSource(source)
    if sampling.text is not None or sampling.part != (1, 1):
        raise ConfigError(
            "a topology can only be inferred from all samples in one process; distill once without "
            "parts or text, then give that model as the topology"
        )
    # Checked before anything is sampled.
    check_inferred(source.vocabulary, inference.order, inference.ngrams)
    part = None if external is None else restricted(external, source.vocabulary)
    said = collect_sentences(source, sampling, folder=folder, progress=progress)
    own = infer_topology(
        said, source.vocabulary, inference.order, ngrams=inference.ngrams, scratch=scratch,
        memory_bytes=memory_bytes, threads=threads, progress=progress,
    )  # fmt: skip
    del said

    def fitted(topology: ModelColumns, counts: NgramCounts) -> FitResult:
        return fit(
            topology,
            counts,
            prior=source.prior(topology, counts, prior),
            threads=threads,
            progress=progress,
        )

    if part is None:
        counts, entropy = count_source(source, own, sampling, folder=folder, progress=progress)
        return distilled(fitted(own, counts), counts, entropy)
    theirs = closed(part.model, threads)
    whole = united([own, theirs], threads)
    counts, entropy = count_source(source, whole, sampling, folder=folder, progress=progress)
    mixed = interpolate(
        [fitted(each, counts.of(whole, each)).model for each in (theirs, own)],
        ngrams=inference.ngrams, threads=threads, progress=progress,
    )  # fmt: skip
    if not inference.interpolated:
        target = closed(restricted(mixed, source.vocabulary).model, threads)
        kept = counts.of(whole, target)
        found = fitted(target, kept)
        return distilled(found, kept, entropy, part.foreign_words, part.dropped)
    kept = counts.of(whole, mixed)
    return distilled(evaluate_model(mixed, kept), kept, entropy, part.foreign_words, part.dropped)


class SentenceCollection:
    """A `work.Summed` that keeps sentences; its single sum is the array of all words."""

    def __init__(self, sentences: SentenceBlocks) -> None:
        self._sentences = sentences
        self._said: list[NDArray[np.uint32]] = []

    def blocks(self, sampling: Sampling) -> Iterator[Iterator[int]]:
        for block in self._sentences(sampling):
            yield map(self._keep, block)

    def _keep(self, said: Said) -> int:
        self._said.append(said[1])
        return said[0]

    def sums(self) -> list[NDArray[Any]]:
        self._said = [np.concatenate([np.zeros(0, U32), *self._said])]
        return list(self._said)

    def restore(self, sums: Sequence[NDArray[Any]]) -> None:
        self._said = [sums[0]]


def sentences_of(reader: SourceReader) -> SentenceBlocks:
    """Returns the function that yields a source's sentences; ConfigError for a source that yields
    visits, which do not show where sentences end."""
    if reader.makes_visits:
        raise ConfigError(
            f"{reader.name} yields visits, not sentences, so no topology can be inferred; give "
            "a topology"
        )
    end = reader.vocabulary.end_id

    def own(samples: int, seed: np.random.SeedSequence) -> Iterator[Said]:
        lines = own_sentences(reader, samples, seed)
        yield samples, np.concatenate([np.append(line, U32(end)) for line in lines])

    def blocks(sampling: Sampling) -> Iterator[Iterator[Said]]:
        if hasattr(reader.source, "sample"):
            return (own(*block) for block in sampling.drawn(GIVEN))
        begin = reader.vocabulary.begin_id
        return (_visited(visits, begin, end) for visits in visits_of(reader, sampling))

    return blocks


def _visited(visits: Iterator[Any], begin: int, end: int) -> Iterator[Said]:
    unfinished: dict[int, list[int]] = {}
    for visit in visits:
        assert isinstance(visit, Visit)
        said: list[int] = []
        for place, word in zip(visit.places.tolist(), visit.words.tolist(), strict=True):
            if word == begin:
                said += unfinished.get(place, [])
                unfinished[place] = [end]
            else:
                unfinished[place].insert(-1, word)
        yield int((visit.words == begin).sum()), np.array(said, U32)
    yield 0, np.array([word for line in unfinished.values() for word in line], U32)


def walked_sentences(model: ModelColumns) -> SentenceBlocks:
    automaton = Automaton(BackoffSource.of(model, united([model])))

    def drawn(samples: int, seed: np.random.SeedSequence) -> Iterator[Said]:
        yield samples, automaton.draw(samples, seed, keep=True)

    return lambda sampling: (drawn(*block) for block in sampling.drawn())


class NgramCounting(work.Summed, Protocol):
    """Counts in blocks, and gives the counts for a topology at the end."""

    def blocks(self, sampling: Sampling) -> Iterator[Iterator[int]]:
        """Returns the blocks for `work.count_all`."""

    def result(self) -> tuple[NgramCounts, float]:
        """Returns the counts, and the source's entropy summed over all visits, in nats."""


class VisitCounting:
    def __init__(self, reader: SourceReader, topology: ModelColumns) -> None:
        self._reader, self._counter = reader, VisitCounter(topology)

    def blocks(self, sampling: Sampling) -> Iterator[Iterator[int]]:
        for visits in visits_of(self._reader, sampling):
            yield map(self._counter.add, visits)

    def sums(self) -> list[NDArray[Any]]:
        counts = self._counter.counts
        return [*counts.ngrams, *counts.contexts, self._counter.entropy]

    def restore(self, sums: Sequence[NDArray[Any]]) -> None:
        _fill(self.sums(), sums)

    def result(self) -> tuple[NgramCounts, float]:
        return self._counter.counts, float(self._counter.entropy[0])


class WalkCounting:
    """Counts how often a backoff model's own sentences, or a text's, visit its states; words
    have the ids of `topology`, which is closed."""

    def __init__(self, model: ModelColumns, topology: ModelColumns) -> None:
        self._target = topology
        self._whole = united([model, topology])
        self._known = BackoffSource.of(model, self._whole)
        self._automaton = Automaton(self._known)

    def blocks(self, sampling: Sampling) -> Iterator[Iterator[int]]:
        if sampling.text is not None:
            for lines in sampling.given(self._whole.vocabulary):
                yield self._followed(lines)
            return
        for samples, seed in sampling.drawn():
            yield self._drawn(samples, seed)

    def _followed(self, lines: list[NDArray[np.uint32]]) -> Iterator[int]:
        self._automaton.follow(np.concatenate(lines), np.cumsum([0, *map(len, lines)]))
        yield len(lines)

    def _drawn(self, samples: int, seed: np.random.SeedSequence) -> Iterator[int]:
        self._automaton.draw(samples, seed)
        yield samples

    def sums(self) -> list[NDArray[Any]]:
        return [self._automaton.visits]

    def restore(self, sums: Sequence[NDArray[Any]]) -> None:
        _fill(self.sums(), sums)

    def result(self) -> tuple[NgramCounts, float]:
        counts = self._automaton.counts()
        return counts.of(self._whole, self._target), self._known.entropy(counts)


def _fill(into: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]]) -> None:
    for array, value in zip(into, values, strict=True):
        array[...] = value
