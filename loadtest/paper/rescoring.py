"""Section 3.3: on-the-fly rescoring, K hypotheses by W words at each position, and multi-pass.

Multi-pass rescoring first builds whole sentences with the client's 1- and 2-grams, and at the end
asks the model about the best N of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dlm.client import Client, ClientConfig, State, Utterance
from loadtest.paper.clusters import serving
from loadtest.paper.result import BARS, MEASURED, Result, Row
from loadtest.paper.setup import Setup
from loadtest.paper.workload import CONTEXTS, NOT_SAID, WORDS, Model, model_of, transcripts
from loadtest.traces.rescoring import CANDIDATES_END, Confusions, Transcript

PAPER: list[Row] = [
    {"where": "3.3: smaller storage and more efficient than multi-pass", "method": "on the fly"},
    {"where": "section 4: all of DLM's overhead", "method": "on the fly", "query_s": 0.1},
]
DEADLINE_S = 60.0
N_BEST = (10, 100)


@dataclass
class Found:
    """A method's result for an utterance: the best total, log10, and the most words it kept."""

    total: float
    kept: int


Method = Callable[[Utterance, Model, Transcript, Confusions], Found]


def run(setup: Setup) -> Result:
    """For the texts of the bundled traces, on the largest cluster of the setup."""
    setup.progress.tell("rescoring: reading the model")
    model, said = model_of(setup), transcripts(setup)
    confusions = Confusions(model.frequent())
    methods: dict[str, Method] = {f"on the fly, {CONTEXTS} x {WORDS}": on_the_fly}
    for best in N_BEST[:1] if setup.quick else N_BEST:
        methods[f"multi-pass, {best} best"] = multi_pass(best)
    servers = setup.servers[-1]
    config = ClientConfig(DEADLINE_S, DEADLINE_S, cache_dir=setup.work / "cache")
    with serving(setup, servers) as cluster, Client.connect(cluster, config) as client:
        handle = client.utterance()
        for method in methods.values():  # compiles kernels, opens connections
            method(handle, model, said[0], confusions)
        rows, totals = [], {}
        for name, method in methods.items():
            setup.progress.tell(f"rescoring: {name}, {servers} servers")
            row, totals[name] = row_of(client, model, said, confusions, method)
            rows.append({**row, "method": name, "servers": servers})
    best_totals = np.max(list(totals.values()), axis=0)
    for row in rows:
        as_good = np.array(totals[row["method"]]) >= best_totals - 1e-4
        row["as_good"] = 100.0 * float(as_good.mean())
    return Result(
        name="rescoring",
        title="3.3: on-the-fly against multi-pass rescoring",
        paper=PAPER,
        columns=[
            ("method", "method", ""),
            ("servers", "servers", ""),
            ("calls", "calls per second of audio", "1/s"),
            ("queries", "queries per second of audio", "1/s"),
            ("messages", "messages per second of audio", "1/s"),
            ("query_s", "query time per second of audio", "s"),
            ("wait_s", "of it after the last word", "s"),
            ("cpu_s", "processor time of the client in calls", "s"),
            ("kept", "words kept per utterance, at most", ""),
            ("as_good", "utterances with the best total", "%"),
        ],
        rows=rows,
        plot={
            "kind": BARS,
            "x": "method",
            "y": "query_s",
            "series": None,
            "labels": {"x": "method", "y": "seconds per second of audio"},
        },
        notes=[
            f"{WORDS} candidates at each word of the bundled traces' audio: the word that was "
            "said, and the frequent words with the most similar spelling, each with a penalty of "
            f"{NOT_SAID:g} in log10, as from an acoustic model. A total is the penalties plus the "
            "log10 probability.",
            f"On the fly: {CONTEXTS} hypotheses with distinct states are kept. Multi-pass: a beam "
            "of N sentences scored by 1- and 2-grams, which needs no message, then one call for "
            "all of them. Time is that of the calls only, with one decoder.",
            "Multi-pass sends fewer messages, since a call has whole sentences. But it keeps all "
            "of them, starts when the audio ends, and cannot recover what its first pass lost.",
        ],
    )


def row_of(
    client: Client,
    model: Model,
    said: list[Transcript],
    confusions: Confusions,
    method: Method,
) -> tuple[Row, list[float]]:
    clock = _Clock(client.utterance())
    before = client.stats
    audio_s = sum(one.seconds for one in said)
    totals, kept, last_s = [], 0, 0.0
    for one in said:
        found = method(clock, model, one, confusions)  # type: ignore[arg-type]
        totals.append(found.total)
        kept = max(kept, found.kept)
        last_s += clock.last_s
    after = client.stats
    return {
        "basis": MEASURED,
        "calls": clock.calls / audio_s,
        "queries": (after.queries - before.queries) / audio_s,
        "messages": (after.messages - before.messages) / audio_s,
        "query_s": clock.seconds / audio_s,
        "wait_s": last_s / audio_s,
        "cpu_s": clock.cpu_s / audio_s,
        "kept": kept,
    }, totals


class _Clock:
    def __init__(self, handle: Utterance) -> None:
        self._handle = handle
        self.calls = 0
        self.seconds = self.last_s = self.cpu_s = 0.0

    def begin(self) -> State:
        return self._handle.begin()

    def extend(self, *arguments: object) -> object:
        return self._timed(self._handle.extend, *arguments)

    def score_sentences(self, *arguments: object) -> object:
        return self._timed(self._handle.score_sentences, *arguments)

    def _timed(self, method: Callable[..., object], *arguments: object) -> object:
        began, cpu_began = time.perf_counter(), time.process_time()
        found = method(*arguments)
        self.last_s = time.perf_counter() - began
        self.cpu_s += time.process_time() - cpu_began
        self.seconds += self.last_s
        self.calls += 1
        return found


def on_the_fly(handle: Utterance, model: Model, said: Transcript, confusions: Confusions) -> Found:
    """One call per word; hypotheses with equal states are merged."""
    beam: dict[State, float] = {handle.begin(): 0.0}
    for word in (*said.words, CANDIDATES_END):
        candidates = [word] if word == CANDIDATES_END else confusions.of(word, WORDS)
        found = handle.extend(list(beam), candidates)
        totals = np.array(list(beam.values()))[:, None] + found.log10_prob
        totals[:, 1:] -= NOT_SAID
        keys, order = found.states.keys(), np.argsort(-totals, axis=None)
        seen: set[bytes] = set()
        states = found.states.reshape(-1)
        longer: dict[State, float] = {}
        for at in order.tolist():
            if keys[at] not in seen:
                seen.add(keys[at])
                longer[states[at]] = float(totals.flat[at])
                if len(longer) == CONTEXTS:
                    break
        beam = longer
    return Found(max(beam.values()), CONTEXTS * (model.order - 1))


def multi_pass(best: int) -> Method:
    def method(handle: Utterance, model: Model, said: Transcript, confusions: Confusions) -> Found:
        sentences = first_pass(model, said, confusions, best)
        words = model.vocabulary.words
        asked = [[words[at] for at in ids] for ids, _ in sentences]
        scores = handle.score_sentences(asked)
        totals = [one.log10_prob - lost for one, (_, lost) in zip(scores, sentences, strict=True)]
        return Found(float(max(totals)), best * (len(said.words) + 1))

    return method


def first_pass(
    model: Model, said: Transcript, confusions: Confusions, best: int
) -> list[tuple[list[int], float]]:
    """The best sentences by 1- and 2-grams, and the penalty of each for words not said."""
    begin = model.vocabulary.begin_id
    kept = np.full((1, 1), begin, np.uint32)
    totals, lost = np.zeros(1), np.zeros(1)
    for word in said.words:
        ids = np.array([model.vocabulary.id_of(w) for w in confusions.of(word, WORDS)], np.uint32)
        rows, columns = np.repeat(np.arange(len(kept)), len(ids)), np.tile(ids, len(kept))
        penalty = np.tile(NOT_SAID * (np.arange(len(ids)) > 0), len(kept))
        length = np.ones(len(rows), np.uint8)
        width = model.order - 1
        contexts = np.zeros((len(rows), width), np.uint32)
        contexts[:, -1] = kept[rows, -1]
        found, _, _ = model.cache.index.score(contexts, length, columns)
        longer = totals[rows] + found - penalty
        order = np.argsort(-longer, kind="stable")[:best]
        kept = np.column_stack([kept[rows[order]], columns[order]])
        totals, lost = longer[order], lost[rows[order]] + penalty[order]
    return [(ids[1:], float(one)) for ids, one in zip(kept.tolist(), lost.tolist(), strict=True)]
