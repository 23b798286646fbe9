"""What SampleApprox is worth, against what anybody would do instead with the same samples.

    python tests/benchmarks/learning.py --work runs/learning --only "books first" --seeds 1
    python tests/benchmarks/distillation.py --learning runs/learning --work runs/distilled
    python tests/benchmarks/distillation.py --learning runs/learning --work runs/distilled --table

The networks are those of `learning.py`: 2,000 words, trained on users' text after books, with and
without noise. Of each, sentences are sampled and made into 3-gram models of one size:

    Kneser-Ney          estimated from the sampled text, pruned to the size
    Witten-Bell         the same with raw counts in the lower orders, which pruning harms less
                        (Chelba et al. 2010)
    ... on books        both, on the n-grams of a model of books that was pruned to the size
    raw-count KL        the KL step on those n-grams, each drawn word counting 1
    SampleApprox        the KL step on them, the network's whole distribution counting
    SampleApprox, own   the same on the n-grams that the pruned Kneser-Ney model kept (FNG's A_i);
                        and on those that the pruned Witten-Bell model kept

Reported are the cross-entropy to the network, on histories of other samples and over its whole
distribution; perplexity and top-1 accuracy on users who were held out; and CPU seconds. A result is
a file of its own in the folder, so that the command goes on where it stopped. Intervals are over
the seeds of sampling.

Paper   Suresh et al. 2021, section 5; Deoras et al. 2011 and Adel et al. 2014 sample text
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import learning
import numpy as np
from numpy.typing import NDArray

ORDER = 3
NGRAMS = 40_000
SAMPLES = (1_000, 10_000, 100_000, 1_000_000)
SEEDS = 5
JUDGED_BY = 2_000  # sentences of the network, drawn with another seed
JUDGING_SEED = 1 << 20
NETWORKS = ("blt, rho 1, books first", "no noise, books first")
PRIOR = 0.01
MEMORY = 4 << 30
F32, U32 = np.float32, np.uint32
Ids = NDArray[np.uint32]


class DenseModel:
    """A 3-gram model over a few thousand words that gives whole distributions."""

    def __init__(self, model: Any) -> None:
        first = model.orders[0]
        self.size = len(first)
        self.root = 10.0 ** first.log10_prob.astype(float)
        self.root[model.vocabulary.begin_id] = 0.0
        self.model = model
        words = np.arange(self.size, dtype=U32)
        self.pairs = np.stack([self._below(self.root, 1, row) for row in words])

    def _below(self, shorter: NDArray[np.float64], length: int, row: int) -> NDArray[np.float64]:
        """The distribution after the context in a row, from that after its suffix."""
        columns = self.model.orders
        found = shorter * 10.0 ** float(columns[length - 1].log10_backoff[row])
        if length < len(columns):
            begin, end = columns[length - 1].first_child[row : row + 2]
            longer = columns[length]
            found[longer.ids[begin:end, -1]] = 10.0 ** longer.log10_prob[begin:end].astype(float)
        return found

    def rows(self, contexts: Ids) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """For each different context, where it stands and its distribution; (n, 2) uint32."""
        keys = contexts[:, 0].astype(np.int64) * self.size + contexts[:, 1]
        order = np.argsort(keys, kind="stable")
        ends = np.flatnonzero(np.diff(keys[order], append=-1)) + 1
        found = self.model.rows_of(np.ascontiguousarray(contexts[order[ends - 1]]))
        missing = np.iinfo(U32).max
        begin = 0
        for end, row in zip(ends.tolist(), found.tolist(), strict=True):
            here = order[begin:end]
            shorter = self.pairs[contexts[here[0], 1]]
            yield here, shorter if row == missing else self._below(shorter, 2, row)
            begin = end


def witten_bell(text: Ids, vocabulary: Any) -> Any:
    """Interpolated Witten-Bell: P(w | h) = (c(hw) + T(h) P(w | h')) / (c(h) + T(h)), where T(h) is
    how many words follow h; words never seen share T evenly."""
    from dlm.estimate.columns import ModelColumns

    size = len(vocabulary)
    begin, end = vocabulary.begin_id, vocabulary.end_id
    starts = np.flatnonzero(np.concatenate([[True], text[:-1] == end]))
    padded = np.insert(text, starts, begin).astype(np.int64)
    grams: list[NDArray[np.int64]] = [padded]
    for _ in range(1, ORDER):
        grams.append(grams[-1][:-1] * size + padded[len(padded) - len(grams[-1]) + 1 :])
    counted = []
    for order, keys in enumerate(grams, 1):
        last = keys % size
        inside = last != begin
        if order > 1:  # no n-gram across an end, or with the begin behind its first word
            for back in range(1, order):
                inside &= (keys // size**back) % size != end
            for back in range(order - 1):
                inside &= (keys // size**back) % size != begin
        counted.append(np.unique(keys[inside], return_counts=True))
    keys, count = counted[0]
    prob = np.zeros(size)
    seen, total = len(keys), count.sum()
    prob[:] = seen / (total + seen) / (size - 1)
    prob[keys] += count / (total + seen)
    prob[begin] = 0.0
    lower, lower_keys = prob, np.arange(size)
    sections = []
    for order in range(2, ORDER + 1):
        keys, count = counted[order - 1]
        context = keys // size
        contexts, at = np.unique(context, return_inverse=True)
        types, total = np.bincount(at), np.bincount(at, count)
        weight = types / (total + types)
        suffix = keys % size ** (order - 1)
        here = count / (total + types)[at] + weight[at] * lower[np.searchsorted(lower_keys, suffix)]
        backoff = np.zeros(len(lower_keys))
        backoff[np.searchsorted(lower_keys, contexts)] = np.log10(weight)
        sections.append(_section(lower_keys, order - 1, size, lower, backoff))
        lower, lower_keys = here, keys
    sections.append(_section(lower_keys, ORDER, size, lower, np.zeros(len(lower_keys))))
    return ModelColumns.of(vocabulary, sections)


def _section(
    keys: NDArray[np.int64], order: int, size: int, prob: Any, backoff: Any
) -> tuple[Any, Any, Any]:
    ids = np.stack([keys // size**back % size for back in range(order - 1, -1, -1)], axis=1)
    with np.errstate(divide="ignore"):
        log10 = np.maximum(np.log10(prob), -99.0)
    return ids.astype(U32), log10.astype(F32), backoff.astype(F32)


def kneser_ney(text: Ids, vocabulary: Any, folder: Path) -> Any:
    """`dlm estimate` of the text, over the words of the network; those not seen share <unk>'s."""
    from dlm.estimate.columns import ModelColumns
    from dlm.estimate.pipeline import estimate
    from dlm.estimate.settings import DEFAULT_FALLBACK, EstimationSettings

    plain, arpa = folder / "sampled.txt", folder / "sampled.arpa"
    # Words are written as their ids, since the network says <unk> as any other word.
    with plain.open("w") as out:
        line: list[str] = []
        for word in text.tolist():
            if word == vocabulary.end_id:
                out.write(" ".join(line) + "\n")
                line = []
            else:
                line.append(str(word))
    settings = EstimationSettings(order=ORDER, fallback=DEFAULT_FALLBACK, memory_bytes=MEMORY)
    estimate([str(plain)], arpa, settings)
    found = ModelColumns.read(arpa)
    marks = {b"<s>": vocabulary.begin_id, b"</s>": vocabulary.end_id}
    own = np.array(
        [marks[w] if w in marks else 0 if w == b"<unk>" else int(w) for w in found.vocabulary.words]
    ).astype(U32)
    first = found.orders[0]
    prob = np.zeros(len(vocabulary))
    is_unk = np.array([w == b"<unk>" for w in found.vocabulary.words])
    prob[own[~is_unk]] = 10.0 ** first.log10_prob[~is_unk].astype(float)
    unseen = prob == 0
    unseen[vocabulary.begin_id] = False
    left = float(10.0 ** first.log10_prob[is_unk].astype(float).sum())
    if unseen.any():
        prob[unseen] = left / unseen.sum()
    else:
        prob /= prob[np.arange(len(prob)) != vocabulary.begin_id].sum()
    backoff = np.zeros(len(vocabulary), F32)
    backoff[own[~is_unk]] = first.log10_backoff[~is_unk]
    words = np.arange(len(vocabulary), dtype=U32)[:, None]
    with np.errstate(divide="ignore"):
        log10 = np.maximum(np.log10(prob), -99.0).astype(F32)
    log10[vocabulary.begin_id] = -99.0
    sections = [(words, log10, backoff)]
    sections += [(own[c.ids], c.log10_prob, c.log10_backoff) for c in found.orders[1:]]
    return ModelColumns.of(vocabulary, sections)


def pruned(model: Any, ngrams: int) -> Any:
    """By relative entropy, suffixes kept, as all topologies here have them."""
    from dlm.estimate.prune import Goal, prune

    if sum(model.counts) <= ngrams:
        return model
    return prune(model, Goal(ngrams=ngrams), keep_suffixes=True).model


def on_topology(model: Any, topology: Any) -> Any:
    """The probabilities that a model gives to the n-grams of a topology, backing off normalised."""
    from dlm.estimate.columns import ModelColumns

    dense = DenseModel(model)
    size = dense.size
    log10 = [model.orders[0].log10_prob]
    pairs = topology.orders[1].ids
    log10.append(np.log10(dense.pairs[pairs[:, 0], pairs[:, 1]]).astype(F32))
    triples = topology.orders[2].ids
    given = np.zeros(len(triples))
    for at, row in dense.rows(np.ascontiguousarray(triples[:, :2])):
        given[at] = row[triples[at, 2]]
    log10.append(np.log10(given).astype(F32))
    probs = [10.0 ** values.astype(float) for values in log10]
    backoff = []
    for order in (2, 3):
        columns = topology.orders[order - 1]
        shorter = len(topology.orders[order - 2])
        own = np.bincount(columns.prefix, probs[order - 1], shorter)
        below = np.bincount(columns.prefix, probs[order - 2][columns.suffix], shorter)
        with np.errstate(divide="ignore", invalid="ignore"):
            weight = np.log10(np.maximum(1 - own, 1e-12) / np.maximum(1 - below, 1e-12))
        backoff.append(weight.astype(F32))
    backoff.append(np.zeros(len(triples), F32))
    assert size == len(topology.orders[0])
    parts = zip(topology.orders, log10, backoff, strict=True)
    return ModelColumns.of(topology.vocabulary, [(c.ids, p, b) for c, p, b in parts])


class TextRecorder:
    """What is said by visits that something else looks at."""

    def __init__(self, vocabulary: Any) -> None:
        self._vocabulary = vocabulary
        self._places: list[NDArray[np.int32]] = []
        self._words: list[Ids] = []

    def watch(self, visits: Iterator[Any]) -> Iterator[Any]:
        """The visits, one after the other."""
        for visit in visits:
            self._places.append(visit.places.astype(np.int32))
            self._words.append(visit.words.astype(U32))
            yield visit

    def text(self) -> Ids:
        """Sentence after sentence, an end after each; a cut one is ended, too."""
        order = np.argsort(np.concatenate(self._places), kind="stable")
        said = np.concatenate(self._words)[order]
        # Each begin but the first ends what stood before it.
        said[said == self._vocabulary.begin_id] = self._vocabulary.end_id
        return np.append(said[1:], U32(self._vocabulary.end_id))


def sampled_text(visits: Iterator[Any], vocabulary: Any) -> Ids:
    """What was said, sentence after sentence."""
    recorder = TextRecorder(vocabulary)
    for _ in recorder.watch(visits):
        pass
    return recorder.text()


def drawn_alone(text: Ids, vocabulary: Any) -> Iterator[Any]:
    """The text as visits whose distributions hold the word that followed, and no other."""
    from dlm.distill.counts.count import Visit

    ends = np.flatnonzero(text == vocabulary.end_id)
    begins = np.concatenate([[0], ends[:-1] + 1])
    lines = [text[b : e + 1] for b, e in zip(begins.tolist(), ends.tolist(), strict=True)]
    for first in range(0, len(lines), 512):
        some = sorted(lines[first : first + 512], key=len, reverse=True)
        longest = len(some[0])
        table = np.full((len(some), longest + 1), vocabulary.begin_id, U32)
        for row, line in enumerate(some):
            table[row, 1 : len(line) + 1] = line
        lengths = np.array([len(line) for line in some])
        for at in range(longest):
            n = int((lengths > at).sum())
            given = np.zeros((n, len(vocabulary)), F32)
            given[np.arange(n), table[:n, at + 1]] = 1.0
            yield Visit(table[:n, at], np.arange(n), given, np.zeros(n, F32))


class Judge:
    """What models are compared by: the network's distributions, and users who were held out."""

    def __init__(self, source: Any, held_out: list[NDArray[np.int32]]) -> None:
        self.vocabulary = source.vocabulary
        begin = self.vocabulary.begin_id
        windows: dict[int, list[int]] = {}
        contexts, given = [], []
        entropy = 0.0
        for visit in source.visits(JUDGED_BY, JUDGING_SEED):
            for place, word in zip(visit.places.tolist(), visit.words.tolist(), strict=True):
                windows[place] = [begin] if word == begin else [*windows[place], word][-2:]
                contexts.append(([begin, *windows[place]])[-2:])
            given.append(np.asarray(visit.given))
            entropy += float(visit.entropy.sum(dtype=float))
        self.contexts = np.array(contexts, U32)
        self.given = np.concatenate(given)
        self.entropy = entropy / len(self.contexts)
        text_contexts, targets = [], []
        for line in held_out:
            words = [begin, begin, *line.tolist(), self.vocabulary.end_id]
            text_contexts += [words[at : at + 2] for at in range(len(line) + 1)]
            targets += words[2:]
        self.text_contexts = np.array(text_contexts, U32)
        self.targets = np.array(targets, U32)

    def figures(self, model: Any) -> dict[str, float]:
        """Nats per word above the network's entropy, perplexity and top-1 in per cent."""
        dense = DenseModel(model)
        begin = self.vocabulary.begin_id
        lost = 0.0
        for at, row in dense.rows(self.contexts):
            with np.errstate(divide="ignore"):
                ln = np.log(np.maximum(row, 1e-99))
            ln[begin] = 0.0
            lost -= float((self.given[at] @ ln).sum())
        ln_said, right = 0.0, 0
        is_word = (self.targets != self.vocabulary.end_id) & (self.targets != 0)
        for at, row in dense.rows(self.text_contexts):
            targets = self.targets[at]
            ln_said += float(np.log(np.maximum(row[targets], 1e-99)).sum())
            right += int((is_word[at] & (targets == row.argmax())).sum())
        return {
            "nats_above_network": lost / len(self.contexts) - self.entropy,
            "perplexity": math.exp(-ln_said / len(self.targets)),
            "top1_percent": 100 * right / int(is_word.sum()),
            "ngrams": float(sum(model.counts)),
        }


def counts_of(topology: Any, visits: Iterable[Any]) -> Any:
    """Those of visits, all in one go."""
    from dlm.distill.counts.count import VisitCounter

    counter = VisitCounter(topology)
    for visit in visits:
        counter.add(visit)
    return counter.counts


def methods(
    source: Any, topology: Any, samples: int, seed: int, folder: Path
) -> Iterator[tuple[str, Any, float]]:
    """Each model by name, and the CPU seconds that it took, sampling included.

    The text is recorded while sentences are counted for SampleApprox, so that the seconds of the
    estimated models hold that counting, a tenth of sampling.
    """
    from dlm.distill.fitting.fit import fit
    from dlm.distill.fitting.topology import closed

    vocabulary = source.vocabulary
    size = sum(topology.counts)
    clock = time.process_time
    began = clock()
    recorder = TextRecorder(vocabulary)
    counts = counts_of(topology, recorder.watch(source.visits(samples, seed)))
    text = recorder.text()
    sampling = clock() - began
    chosen = {}
    for name, make in (
        ("Kneser-Ney", lambda: kneser_ney(text, vocabulary, folder)),
        ("Witten-Bell", lambda: witten_bell(text, vocabulary)),
    ):
        began = clock()
        model = make()
        estimating = sampling + clock() - began
        yield f"{name} on books", on_topology(model, topology), estimating
        began = clock()
        small = pruned(model, size)
        yield name, small, estimating + clock() - began
        chosen[name] = closed(small)
    began = clock()
    model = fit(topology, counts, prior=PRIOR).model
    yield "SampleApprox", model, sampling + clock() - began
    began = clock()
    raw = counts_of(topology, drawn_alone(text, vocabulary))
    # Words that were never drawn would have probability 0: half a count for each word.
    raw.ngrams[0][np.arange(len(vocabulary)) != vocabulary.begin_id] += 0.5
    raw.contexts[0] += 0.5 * (len(vocabulary) - 1)
    model = fit(topology, raw, prior=PRIOR).model
    yield "raw-count KL", model, sampling + clock() - began
    # The seconds are those of the counts alone: the n-grams are those of the pruned models.
    for name, own in (("own", "Kneser-Ney"), ("own by Witten-Bell", "Witten-Bell")):
        began = clock()
        counts = counts_of(chosen[own], source.visits(samples, seed))
        model = fit(chosen[own], counts, prior=PRIOR).model
        yield f"SampleApprox, {name}", model, clock() - began


def book_model(work: Path, learnt: Path, vocabulary: Any) -> Any:
    """A model of books over the network's words, pruned to the size."""
    from dlm.estimate.columns import ModelColumns
    from dlm.estimate.pipeline import estimate
    from dlm.estimate.settings import DEFAULT_FALLBACK, EstimationSettings

    arpa = work / "books.arpa"
    if not arpa.exists():
        words = frozenset(vocabulary.words)
        settings = EstimationSettings(
            order=ORDER, vocabulary=words, fallback=DEFAULT_FALLBACK, memory_bytes=MEMORY
        )
        estimate([str(learnt / "public.txt")], arpa, settings)
    return pruned(ModelColumns.read(arpa), NGRAMS)


def held_out_text(learnt: Path, name: str) -> list[NDArray[np.int32]]:
    """Utterances by id of the users that the run kept out, as its own evaluation takes them."""
    from dlm.federated.training.settings import TrainingSettings
    from dlm.federated.users import UserDataset
    from dlm.federated.words import WordList

    file = learnt / f"{learning.folder_of(learnt, name, 0).parent.name}-0.toml"
    settings = TrainingSettings.read(file, environ={})
    users = UserDataset.open(learnt / "users.tsv", store=learnt / "store")
    _, held_out = users.split(settings.data.held_out)
    encode = WordList.read(learnt / "words.txt").encoder()
    left = settings.data.held_out_tokens
    found: list[NDArray[np.int32]] = []
    for user in range(len(held_out)):
        found += held_out.tokens(user, encode, cap=settings.data.max_tokens)
        if sum(map(len, found)) >= left:
            break
    return found


def yardsticks(learnt: Path, name: str, small: Any, judge: Judge) -> dict[str, Any]:
    """The network itself, and the model of books that the n-grams are of."""
    from dlm.estimate.columns import ModelColumns
    from dlm.federated.training.metrics import evaluate
    from dlm.federated.training.trained import load_model

    loaded = load_model(learning.folder_of(learnt, name, 0))
    own = evaluate(loaded.params, loaded.network, sorted(held_out_text(learnt, name), key=len))
    ids = judge.vocabulary.ids_of(small.vocabulary.words)
    sections = [(ids[c.ids], c.log10_prob, c.log10_backoff) for c in small.orders]
    network = {
        "nats_above_network": 0.0,
        "perplexity": own.perplexity,
        "top1_percent": 100 * own.top1_in_vocabulary,
    }
    return {"network": network, "books": judge.figures(ModelColumns.of(judge.vocabulary, sections))}


def run(work: Path, learnt: Path, most_samples: int, until: float) -> None:
    """Does what is left: few samples first, then seed by seed."""
    from dlm.distill.fitting.topology import closed, restricted
    from dlm.distill.sources.network import NetworkSource

    work.mkdir(parents=True, exist_ok=True)
    for name in NETWORKS:
        source = NetworkSource(learning.folder_of(learnt, name, 0))
        small = book_model(work, learnt, source.vocabulary)
        topology = closed(restricted(small, source.vocabulary).model)
        judge = Judge(source, held_out_text(learnt, name))
        beside = work / f"{learning.folder_of(work, name, 0).parent.name}.json"
        if not beside.exists():
            beside.write_text(json.dumps(yardsticks(learnt, name, small, judge)))
        for samples in (n for n in SAMPLES if n <= most_samples):
            for seed in range(SEEDS):
                file = (
                    work / f"{learning.folder_of(work, name, 0).parent.name}-{samples}-{seed}.json"
                )
                if file.exists():
                    continue
                if time.monotonic() > until:
                    return
                found = {}
                for method, model, seconds in methods(source, topology, samples, seed, work):
                    found[method] = {**judge.figures(model), "cpu_seconds": round(seconds, 1)}
                    print(name, samples, seed, method, found[method], flush=True)
                file.write_text(json.dumps(found))


def table(work: Path) -> str:
    """What is done so far, in Markdown."""
    rows = []
    for name in NETWORKS:
        prefix = learning.folder_of(work, name, 0).parent.name
        if (beside := work / f"{prefix}.json").exists():
            for what, one in json.loads(beside.read_text()).items():
                rows.append(
                    f"\n{name}, the {what}: perplexity {one['perplexity']:.2f}, top-1 "
                    f"{one['top1_percent']:.2f} %, {one['nats_above_network']:.4f} nats above"
                )
        for samples in SAMPLES:
            files = sorted(work.glob(f"{prefix}-{samples}-*.json"))
            if not files:
                continue
            found = [json.loads(file.read_text()) for file in files]
            rows += [
                "",
                f"**{name}; {samples:,} sentences, {len(files)} seeds**",
                "",
                "| model | nats per word above the network | perplexity, held-out users | top-1, % "
                "| n-grams | CPU seconds |",
                "| --- | --- | --- | --- | --- | --- |",
            ]
            for method in (one for one in found[0] if all(one in other for other in found)):
                columns = {key: [one[method][key] for one in found] for key in found[0][method]}
                mean, half = learning.bounds(columns["nats_above_network"])
                worst = max(columns["perplexity"])
                perplexity = learning.interval(columns["perplexity"]) if worst < 1e5 else "∞"
                rows.append(
                    f"| {method} | {mean:.4f} ± {half:.4f} | {perplexity} "
                    f"| {learning.interval(columns['top1_percent'])} "
                    f"| {np.mean(columns['ngrams']):,.0f} | {np.mean(columns['cpu_seconds']):.0f} |"
                )
    return "\n".join(rows).strip()


def main() -> None:
    """Goes on with what is left, or prints what is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--learning", type=Path, required=True, help="--work of learning.py")
    parser.add_argument("--samples", type=float, default=1e6, help="the most sentences")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so long")
    parser.add_argument("--table", action="store_true", help="print what is done and end")
    given = parser.parse_args()
    if given.table:
        print(table(given.work))
        return
    run(given.work, given.learning, int(given.samples), time.monotonic() + 60 * given.minutes)


if __name__ == "__main__":
    main()
