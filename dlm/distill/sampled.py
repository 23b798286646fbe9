"""A source that is sampled, and the nearest model on a topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dlm.distill.count import Visit, sampled_counts
from dlm.distill.fit import DistilledModel, fit
from dlm.distill.source import Source
from dlm.distill.topology import closed, restricted
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.progress import ProgressReporter


def distill_samples(
    source: Source,
    topology: ModelColumns,
    *,
    samples: int,
    seed: int = 0,
    prior: float = 0.01,
    threads: int = 2,
    progress: Callable[[str], None] | None = None,
) -> DistilledModel:
    """The model with the n-grams of a topology that is nearest to a source, by its samples.

    Args
        topology  as for `backoff.distill_backoff`
        samples   sentences
        seed      of sampling; the same seed gives the same model
        prior     as for `fit.fit`
    Raises
        ConfigError  the topology has no n-gram in the source's words; no samples
    Paper         Suresh et al. 2021, section 4; FNG section 4
    """
    if samples < 1:
        raise ConfigError(f"{samples} samples; take 1 or more")
    reporter = ProgressReporter(progress or (lambda _: None))
    part = restricted(topology, source.vocabulary)
    target = closed(part.model, threads)
    reporter.stage(f"sampling {samples:,} sentences", samples, "sentences")
    entropy = 0.0

    def listened(visits: Iterator[Visit]) -> Iterator[Visit]:
        nonlocal entropy
        for visit in visits:
            entropy += float(visit.entropy.sum(dtype=float))
            yield visit

    visits = listened(source.visits(samples, seed))
    counts = sampled_counts(target, visits, progress=lambda _, begun: reporter.step(begun))
    found = fit(target, counts, prior=prior, threads=threads, progress=progress)
    words = counts.words
    lost = -found.ln_likelihood - entropy
    return DistilledModel(found, entropy / words, lost / words, part.foreign_words, part.dropped)
