"""The rows of the table: each asks one system the whole workload once, and says what it answered.

A row is timed from outside by `cpu_clock`, so that all are timed alike: the CPU time of this
process and what kenlm_driver says it spent, since that runs beside it.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import settings
from benchmarks.settings import MissingError
from benchmarks.workload import Workload
from dlm.index.search.local import LocalModel
from dlm.ngram.query import QueryGroups

SENTENCES_A_CALL = 250

_driver_cpu_s = 0.0


def cpu_clock() -> float:
    """Seconds of CPU spent by this process and, inside its timed loops, by kenlm_driver."""
    return time.process_time() + _driver_cpu_s


@dataclass(frozen=True, eq=False)
class Row:
    """One line of a table."""

    name: str
    queries: int
    exact: bool  # answers are those of the ARPA file; a quantised model's are not
    ask: Callable[[], float]  # asks everything once; the sum of the log10 probabilities


@cache
def local_model(arpa: Path, encoding: str) -> LocalModel:
    """dlm's index of a model, mapped here."""
    return LocalModel.open(settings.shard_set(arpa, encoding), verify=False)


# Batches.


def batch_rows(arpa: Path) -> dict[str, Callable[[], Row]]:
    """Rows of the batches by name; each is made when it is called, or raises MissingError."""
    rows: dict[str, Callable[[], Row]] = {}
    for encoding in settings.ENCODINGS:
        rows[f"dlm {encoding}"] = lambda encoding=encoding: dlm_batches(arpa, encoding)
    for kind in settings.KENLM_KINDS:
        for mode, input_ in (("contexts", ""), ("states", ", states given")):
            name = f"KenLM {kind}{input_}"
            rows[name] = lambda n=name, k=kind, m=mode: driver_row(n, arpa, k, m)
    name = "KenLM probing, Python package, BaseScore, states given"
    rows[name] = lambda: package_batches(name, arpa)
    return rows


def dlm_batches(arpa: Path, encoding: str) -> Row:
    """One call of `score_groups` a batch."""
    model = local_model(arpa, encoding)
    batches = groups_of(settings.workload(), model)
    scores = np.empty(len(settings.workload().words), np.float32)

    def ask() -> float:
        end = 0
        for groups in batches:
            begin, end = end, end + len(groups.words)
            scores[begin:end] = model.score_groups(groups).log10_prob
        return float(scores.sum(dtype=np.float64))

    return Row(f"dlm {encoding}", len(scores), encoding == "exact", ask)


def groups_of(work: Workload, model: LocalModel) -> list[QueryGroups]:
    """The batches in a model's ids, its longest contexts at most."""
    ids = model.vocabulary.ids_of(work.table)
    keep = np.minimum(work.context_lengths, model.order - 1).astype(np.int64)
    ends = np.cumsum(work.context_lengths, dtype=np.int64)
    context_ends = np.concatenate([[0], np.cumsum(keep)])
    offset = np.repeat(ends - keep - context_ends[:-1], keep)
    contexts = ids[work.context_words[np.arange(len(offset)) + offset]]
    words = ids[work.words]
    size, asked = work.mix.contexts, work.mix.words
    return [
        QueryGroups(
            keep[i : i + size].astype(np.uint8),
            contexts[context_ends[i] : context_ends[i + size]].copy(),
            work.word_counts[i : i + size].copy(),
            words[i * asked : (i + size) * asked].copy(),
        )
        for i in range(0, len(keep), size)
    ]


def package_batches(name: str, arpa: Path) -> Row:
    """KenLM's Python package, in the loop that it offers for queries that are not sentences."""
    kenlm, model = package_model(arpa)
    work = settings.workload()
    spelled = [word.decode() for word in work.table]
    words = [spelled[w] for w in work.words]
    states, begin = [], 0
    for length in work.context_lengths.tolist():
        state, after = kenlm.State(), kenlm.State()
        model.NullContextWrite(state)
        for place, word in enumerate(work.context_words[begin : begin + length].tolist()):
            if place == 0 and spelled[word] == "<s>":
                model.BeginSentenceWrite(after)
            else:
                model.BaseScore(state, spelled[word], after)
            state, after = after, kenlm.State()
        states.append(state)
        begin += length
    counts = work.word_counts.tolist()

    def ask() -> float:
        total, begin, out = 0.0, 0, kenlm.State()
        score = model.BaseScore
        for state, count in zip(states, counts, strict=True):
            for word in words[begin : begin + count]:
                total += score(state, word, out)
            begin += count
        return total

    return Row(name, len(words), True, ask)


# Sentences.


def sentence_rows(arpa: Path) -> dict[str, Callable[[], Row]]:
    """Rows of the sentences, strings in, as `batch_rows`."""
    rows: dict[str, Callable[[], Row]] = {}
    for encoding in settings.ENCODINGS:
        rows[f"dlm {encoding}"] = lambda encoding=encoding: dlm_sentences(arpa, encoding)
    name = "KenLM probing, Python package, Model.score"
    rows[name] = lambda: package_sentences(name, arpa)
    for kind in settings.KENLM_KINDS:
        for mode in ("strings", "ids"):
            label = f"KenLM {kind}, C++, {mode}"
            rows[label] = lambda n=label, k=kind, m=mode: driver_row(n, arpa, k, m)
    return rows


def dlm_sentences(arpa: Path, encoding: str) -> Row:
    """`score_text`, some sentences a call."""
    model: Any = local_model(arpa, encoding)
    if not hasattr(model, "score_text"):
        raise MissingError("LocalModel has no score_text")
    lines = settings.workload().sentences()
    step = SENTENCES_A_CALL
    texts = [b"\n".join(lines[i : i + step]) for i in range(0, len(lines), step)]
    scores = np.empty(len(lines), np.float32)

    def ask() -> float:
        for i, text in enumerate(texts):
            scores[i * step : (i + 1) * step] = model.score_text(text)
        return float(scores.sum(dtype=np.float64))

    return Row(f"dlm {encoding}", settings.workload().scored_tokens, encoding == "exact", ask)


def package_sentences(name: str, arpa: Path) -> Row:
    """KenLM's Python package: one call of `Model.score` a sentence."""
    model = package_model(arpa)[1]
    lines = [line.decode() for line in settings.workload().sentences()]

    def ask() -> float:
        score = model.score
        return sum([score(line) for line in lines])

    return Row(name, settings.workload().scored_tokens, True, ask)


# KenLM, both ways.


@cache
def package_model(arpa: Path) -> tuple[Any, Any]:
    """The package and its model: the probing structure, its fastest."""
    try:
        import kenlm
    except ImportError as exc:
        raise MissingError("kenlm is not installed (pip install -e '.[peers]')") from exc
    return kenlm, kenlm.Model(str(settings.kenlm_binary(arpa, "probing")))


class Driver:
    """kenlm_driver with one model: running, and idle until it is asked."""

    def __init__(self, arpa: Path, kind: str) -> None:
        command = [settings.kenlm_driver(), settings.KENLM_KINDS[kind][0]]
        command += [settings.kenlm_binary(arpa, kind), settings.workload_file()]
        self.process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def ask(self, mode: str) -> float:
        """Times one round; the sum of the log10 probabilities."""
        global _driver_cpu_s
        assert self.process.stdin
        self.process.stdin.write(mode + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        _driver_cpu_s += answer["cpu_s"]
        return answer["sum"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@cache
def driver(arpa: Path, kind: str) -> Driver:
    """The one process of a model and kind."""
    started = Driver(arpa, kind)
    _running.append(started)
    return started


_running: list[Driver] = []


def close() -> None:
    """Ends what was started for a model and lets go of what was mapped."""
    while _running:
        _running.pop().close()
    driver.cache_clear()
    local_model.cache_clear()
    package_model.cache_clear()


def driver_row(name: str, arpa: Path, kind: str, mode: str) -> Row:
    """KenLM in C++."""
    work, process = settings.workload(), driver(arpa, kind)
    queries = len(work.words) if mode in ("contexts", "states") else work.scored_tokens
    return Row(name, queries, kind not in settings.QUANTISED, lambda: process.ask(mode))


# What a model answers, rather than how fast.


def matched_shares(arpa: Path) -> tuple[list[float], float]:
    """Shares of the batches' queries by matched order, 1 first, and of words not in the model."""
    model = local_model(arpa, "exact")
    count = np.zeros(model.order + 1, np.int64)
    unknown = 0
    for groups in groups_of(settings.workload(), model):
        count += np.bincount(model.score_groups(groups).matched_order, minlength=len(count))
        unknown += int((groups.words == 0).sum())
    return (count[1:] / count.sum()).tolist(), unknown / int(count.sum())


@dataclass(frozen=True)
class Perplexity:
    """Of a text by a model: 10 ** (-sum / tokens), each `</s>` counted."""

    with_oovs: float
    without_oovs: float
    tokens: int
    oovs: int


def dlm_perplexity(arpa: Path, encoding: str) -> Perplexity:
    """By dlm, token for token through the query kernel."""
    model = local_model(arpa, encoding)
    ids, width = model.vocabulary, model.order - 1
    total = total_oov = 0.0
    tokens = oovs = 0
    lines = settings.held_out()
    for begin in range(0, len(lines), SENTENCES_A_CALL):
        contexts: list[int] = []
        lengths: list[int] = []
        words: list[int] = []
        for line in lines[begin : begin + SENTENCES_A_CALL]:
            sentence = [ids.begin_id, *map(ids.id_of, line.split()), ids.end_id]
            for i in range(1, len(sentence)):
                history = sentence[max(i - width, 0) : i]
                contexts += history
                lengths.append(len(history))
            words += sentence[1:]
        groups = QueryGroups(
            np.array(lengths, np.uint8),
            np.array(contexts, np.uint32),
            np.ones(len(words), np.uint32),
            np.array(words, np.uint32),
        )
        scores = model.score_groups(groups).log10_prob.astype(np.float64)
        unknown = groups.words == 0
        total += scores.sum()
        total_oov += scores[unknown].sum()
        tokens += len(words)
        oovs += int(unknown.sum())
    known = tokens - oovs
    return Perplexity(10 ** (-total / tokens), 10 ** ((total_oov - total) / known), tokens, oovs)


def kenlm_perplexity(arpa: Path, kind: str) -> Perplexity:
    """By KenLM's own program."""
    command = [settings.kenlm_tool("query"), "-v", "summary", settings.kenlm_binary(arpa, kind)]
    printed = settings.run(list(map(str, command)), b"\n".join(settings.held_out()) + b"\n")
    said = dict(line.split(":") for line in printed.splitlines() if ":" in line)
    return Perplexity(
        float(said["Perplexity including OOVs"]),
        float(said["Perplexity excluding OOVs"]),
        int(said["Tokens"]),
        int(said["OOVs"]),
    )


def agree(sums: dict[str, float], exact: set[str], relative: float = 1e-5) -> None:
    """Raises where exact rows summed differently.

    Raises
        AssertionError  with the sums
    """
    values = {name: sums[name] for name in sums if name in exact}
    if values:
        least, most = min(values.values()), max(values.values())
        assert math.isclose(least, most, rel_tol=relative), f"sums differ: {values}"
