"""What distilling costs: CPU time and memory, by the size of the topology.

    python tests/benchmarks/distill_cost.py --work runs/distill_cost [--ngrams 1e6 5e6]

The source is a 3-gram model of Wikipedia (`dlm estimate`), the topologies are what `dlm prune
--ngrams N --keep-suffixes` leaves of it. Of each, in a process of its own, so that its peak of
memory is its own:

    counts     expected counts of the source, exactly; once per source
    fit        the KL step to its end, all contexts
    step       one step of all contexts together: 10 of them after the first
    in numpy   the same step as array operations (the whole model at once), what we would run
               without compiled code; both must say the same
    copy       of as many bytes as a step touches: no step is quicker
    samples    a million sentences of the source, walked; and of a network of 10,000 words and 1.4
               million parameters (GDP 1's), whose biases make its words as frequent as the source's

CPU seconds, user and system, of the process: what else the machine does hardly changes them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.settings import DATA, DLM
from dlm.distill.counts.count import LocalCounts, NgramCounts, local_counts
from dlm.distill.counts.sampling import Sampling
from dlm.distill.fitting import fit as fitting
from dlm.distill.fitting.fit import fit
from dlm.distill.fitting.topology import closed, restricted, united
from dlm.distill.sampled import SampledSource, count_source
from dlm.distill.sources.backoff import BackoffSource, exact_counts
from dlm.estimate.columns import ModelColumns
from dlm.ngram.vocab import MARKS, Vocabulary

TEXT = DATA / "text" / "wikipedia_en.txt.zst"
STEPS = 10
WALKED, FOLLOWED = 100_000, 1_000  # sentences, whose cost is taken between so many and thrice that
NETWORK, NETWORK_WORDS = "gdp-tied-10k", 10_000
MILLION = 1_000_000


def cpu_s() -> float:
    """CPU seconds of this process so far, all threads, user and system."""
    return time.process_time()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and its CPU seconds."""
    began = cpu_s()
    found = work()
    return found, cpu_s() - began


def main() -> None:
    """Prints a row for each size."""
    parser = argparse.ArgumentParser(description="CPU time and memory of dlm distill.")
    parser.add_argument("--work", type=Path, required=True, help="where models are kept")
    parser.add_argument("--ngrams", type=float, nargs="+", default=[1e6, 5e6])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    source = options.work / "source.arpa.zst"
    if options.one is not None:
        print(json.dumps(measured(source, topology_of(options.work, options.one), options.threads)))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        command("estimate", TEXT, "--order", 3, "--output", source)
    rows = []
    for size in map(int, options.ngrams):
        arpa = topology_of(options.work, size)
        if not arpa.exists():
            command("prune", source, "--ngrams", size, "--keep-suffixes", "--output", arpa)
        given = [sys.executable, __file__, "--work", options.work, "--one", size]
        given += ["--threads", options.threads]
        done = subprocess.run(list(map(str, given)), check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout))
    print(table(rows))


def topology_of(work: Path, size: int) -> Path:
    """Where the topology of a size stands."""
    return work / f"{size}.arpa.zst"


def command(*arguments: object) -> None:
    """Runs dlm."""
    subprocess.run([*DLM, *map(str, arguments)], check=True)


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown, a column for each size."""
    lines = ["| | " + " | ".join(f"{row['ngrams']:,} n-grams" for row in rows) + " |"]
    lines.append("| --- |" + " ---: |" * len(rows))
    for name, text in (
        ("contexts with n-grams", "{contexts:,}"),
        ("expected counts of the source ({source:,} n-grams)", "{counts_s:.1f} s"),
        ("fit, all contexts to 1e-6", "{fit_s:.1f} s"),
        ("steps of a context: the most; mean over n-grams", "{most}; {mean:.1f}"),
        ("one step of all contexts", "{step_s:.3f} s"),
        ("the same step in numpy", "{numpy_s:.3f} s"),
        ("the most by which the two differ after ten", "{differ:.1g}"),
        ("copying as many bytes", "{copy_s:.3f} s ({bytes:,})"),
        ("a million sentences, walked", "{walk_s:.1f} s"),
        ("a million words of the network", "{network_s:.0f} s"),
        ("a million of its sentences", "{sentences_s:.0f} s"),
        ("peak of memory", "{peak:.2f} GB"),
    ):
        name = name.format(**rows[-1])
        lines.append(f"| {name} | " + " | ".join(text.format(**row) for row in rows) + " |")
    return "\n".join(lines)


def measured(source_arpa: Path, arpa: Path, threads: int) -> dict[str, Any]:
    """Figures of one topology."""
    source = ModelColumns.read(source_arpa)
    target = closed(restricted(ModelColumns.read(arpa), source.vocabulary).model, threads)
    found: dict[str, Any] = {
        "ngrams": sum(target.counts),
        "source": sum(source.counts),
        "contexts": 1 + sum(int((np.diff(c.first_child) > 0).sum()) for c in target.orders[:-1]),
    }

    def expected() -> NgramCounts:
        whole = united([source, target], threads)
        return exact_counts(BackoffSource.of(source, whole)).of(whole, target)

    counts, found["counts_s"] = timed(expected)
    fit(target, counts.scaled(1e-3), threads=threads)  # compiles
    steps: list[NDArray[np.int64]] = []
    plain = fitting._fit_length

    def noted(*arguments: Any) -> Any:
        out = plain(*arguments)
        steps.append(out[2])
        return out

    fitting._fit_length = noted
    _, found["fit_s"] = timed(lambda: fit(target, counts, threads=threads))
    fitting._fit_length = plain
    listed = [np.diff(fitting._first_child(target, k)) for k in range(target.order)]
    total = sum(int((n * s).sum()) for n, s in zip(listed, steps, strict=True))
    found |= {"most": int(max(s.max() for s in steps)), "mean": total / sum(target.counts)}
    found |= one_step(target, counts, threads)
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

    walked = SampledSource(source)
    spent_s, _ = per_sample(walked, target, WALKED)
    found["walk_s"] = spent_s * MILLION
    network = SampledSource(a_network(source))
    own = closed(restricted(target, network.vocabulary).model, threads)
    spent_s, words = per_sample(network, own, FOLLOWED)
    found["sentences_s"], found["network_s"] = spent_s * MILLION, spent_s / words * MILLION
    return found


def one_step(target: ModelColumns, counts: NgramCounts, threads: int) -> dict[str, float]:
    """Of all contexts together: ours, in numpy, and the bytes of it copied."""
    spent = {}
    for most in (1, 1 + STEPS):
        fitting.MOST_STEPS = most
        found, spent[most] = timed(lambda: fit(target, counts, tolerance=0.0, threads=threads))
    steps = NumpySteps(target, local_counts(target, counts))
    steps.step()
    _, numpy_s = timed(lambda: [steps.step() for _ in range(STEPS)])
    size = steps.touched
    into, out_of = np.ones(size // 2, np.uint8), np.ones(size // 2, np.uint8)
    _, copying_s = timed(lambda: [np.copyto(into, out_of) for _ in range(STEPS)])
    return {
        "step_s": (spent[1 + STEPS] - spent[1]) / STEPS,
        "numpy_s": numpy_s / STEPS,
        "differ": steps.most_off(found.model),
        "bytes": size,
        "copy_s": copying_s / STEPS,
    }


def per_sample(source: SampledSource, topology: ModelColumns, samples: int) -> tuple[float, float]:
    """CPU seconds and words of a sentence: what thrice as many cost more."""
    spent, words = [], []
    for count in (samples, 3 * samples):
        (counts, _), seconds = timed(lambda n=count: count_source(source, topology, Sampling(n)))
        spent.append(seconds)
        words.append(counts.words)
    return (spent[1] - spent[0]) / (2 * samples), (words[1] - words[0]) / (2 * samples)


def a_network(model: ModelColumns) -> Any:
    """A network of the model's most frequent words, whose biases are their frequencies."""
    import jax

    from dlm.distill.sources.network import NetworkHistories
    from dlm.federated.training import rnn
    from dlm.federated.training.presets import preset

    config = preset(NETWORK)
    assert config.vocab_size == NETWORK_WORDS
    log10 = model.orders[0].log10_prob
    texts = model.vocabulary.words
    order = [int(i) for i in np.argsort(-log10, kind="stable") if texts[i] not in MARKS]
    rows = [model.vocabulary.id_of(mark.decode()) for mark in MARKS]
    rows += order[: NETWORK_WORDS - len(MARKS)]
    params = rnn.init(jax.random.key(0), config)
    params["output_bias"] = np.log(10.0) * np.maximum(log10[np.array(rows)], -20.0)

    class Network:
        vocabulary = Vocabulary([texts[row] for row in rows], unk_in_model=True)

        def histories(self, places: int) -> NetworkHistories:
            return NetworkHistories(config, params, places)

    return Network()


class NumpySteps:
    """The KL step of a whole model as operations on arrays.

    y(w) = C(w, h) / (lambda - sum of C(phi, h') / d(h') over children h' that list w), scaled to
    sum to 1, d(h') being what h leaves to words that h' does not list.
    """

    def __init__(self, topology: ModelColumns, local: LocalCounts) -> None:
        self.topology, self.local = topology, local
        self.prob: list[NDArray[np.float64]] = []
        self.back: list[NDArray[np.float64]] = []
        self._size = [1, *map(len, topology.orders)]
        for k in range(topology.order):
            prefix = self._prefix(k)
            own, back = local.found[k], local.backed[k]
            total = np.bincount(prefix, own, self._size[k]) + back
            with np.errstate(all="ignore"):
                self.prob.append(own / total[prefix])
                self.back.append(back / total)

    def _prefix(self, k: int) -> Any:
        return self.topology.orders[k].prefix if k else np.zeros(self._size[1], np.intp)

    @property
    def touched(self) -> int:
        """Bytes that a step reads and writes: of each n-gram its count, its probability and what
        its children take, each read and all but the count written; of each n-gram of a child its
        place, a probability, and what it takes, twice."""
        here = sum(self._size[1:-1])
        return here * 5 * 8 + sum(self._size[2:]) * (4 + 8 + 4 + 16)

    def step(self) -> None:
        """Of all contexts that others back off to; those of the longest are as they were."""
        orders, local = self.topology.orders, self.local
        with np.errstate(all="ignore"):
            for k in range(len(orders) - 1):
                here, longer = orders[k], orders[k + 1]
                y = self.prob[k]
                left = 1.0 - np.bincount(longer.prefix, y[longer.suffix], len(here))
                rate = np.where(local.backed[k + 1] > 0, local.backed[k + 1] / left, 0.0)
                taken = np.bincount(longer.suffix, rate[longer.prefix], len(here))
                prefix = self._prefix(k)
                parent = here.suffix if k else np.zeros(len(here), np.intp)
                weight = local.direct[k] + np.bincount(parent, rate, self._size[k])
                y = np.where(local.found[k] > 0, local.found[k] / (weight[prefix] - taken), 0.0)
                back = np.where(local.backed[k] > 0, local.backed[k] / weight, 0.0)
                total = np.bincount(prefix, y, self._size[k]) + back
                self.prob[k], self.back[k] = y / total[prefix], back / total

    def most_off(self, model: ModelColumns) -> float:
        """The largest difference to a model's probabilities."""
        worst = 0.0
        for k, columns in enumerate(model.orders):
            given = np.where(columns.log10_prob > -90, 10.0 ** columns.log10_prob.astype(float), 0)
            off = np.abs(given - self.prob[k])
            worst = max(worst, float(off[np.isfinite(off)].max()))
        return worst


if __name__ == "__main__":
    main()
