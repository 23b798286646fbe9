"""Checks a served model against the oracle: whole sentences, and rescoring as a decoder does."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.client import Client, State, Utterance
from dlm.client.core import Core
from dlm.client.metrics import Stats
from dlm.client.phrases import split_words
from dlm.ngram.backoff import DictModel
from dlm.wire._pb import shard_pb2 as pb

# Maps the state of each hypothesis to its total log10 P and its words so far.
Beam: TypeAlias = dict[State, tuple[float, tuple[int, ...]]]

HYPOTHESES = 10
CANDIDATES = 20


@dataclass
class Checked:
    queries: int = 0
    differences: int = 0
    calls_ms: list[float] = field(default_factory=list)

    def call_ms(self, quantile: float) -> float:
        return float(np.quantile(self.calls_ms or [0.0], quantile))


def check_sentences(
    client: Client, oracle: DictModel, lines: list[bytes]
) -> tuple[Checked, tuple[Stats, Stats]]:
    utterance = client.utterance()
    utterance.score_sentences([b"warm up"])
    before = replace(client.stats)
    checked = Checked()
    for line in lines:
        began = time.perf_counter()
        (result,) = utterance.score_sentences([line])
        checked.calls_ms.append((time.perf_counter() - began) * 1e3)
        expected = oracle.score_sentence(split_words(line))
        checked.queries += len(expected)
        for want, prob, order in zip(
            expected, result.token_log10_prob, result.token_matched_order, strict=True
        ):
            same = want.log10_prob.tobytes() == prob.tobytes() and want.matched_order == order
            checked.differences += not same
    return checked, (before, replace(client.stats))


def check_rescoring(
    client: Client, oracle: DictModel, lines: list[bytes]
) -> tuple[Checked, tuple[Stats, Stats]]:
    """Walks each sentence with a beam. At each position, one call extends every hypothesis by every
    candidate (the true word, and words that could be confused with it), and the best hypotheses
    with distinct states are kept (DLM 3.3)."""
    before = replace(client.stats)
    checked = Checked()
    rng = random.Random(1)
    utterance = client.utterance()
    # A shard set numbers the words in a different order from the ARPA file.
    ids = oracle.vocabulary.ids_of(utterance.vocabulary.words)
    for line in lines:
        beam: Beam = {utterance.begin(): (0.0, (oracle.vocabulary.begin_id,))}
        for word in split_words(line):
            common = [rng.randrange(min(len(ids), 400)) for _ in range(CANDIDATES // 2)]
            rare = [rng.randrange(len(ids)) for _ in range(CANDIDATES - 1 - len(common))]
            candidates = np.array([utterance.vocabulary.id_of(word), *common, *rare], np.uint32)
            beam = _position(utterance, oracle, beam, candidates, ids[candidates], checked)
    return checked, (before, replace(client.stats))


def _position(
    utterance: Utterance,
    oracle: DictModel,
    beam: Beam,
    candidates: NDArray[np.uint32],
    ids: NDArray[np.uint32],
    checked: Checked,
) -> Beam:
    """Extends the beam by one position, and compares scores with the oracle's for `ids`."""
    began = time.perf_counter()
    extension = utterance.extend(list(beam), candidates)
    checked.calls_ms.append((time.perf_counter() - began) * 1e3)
    best: Beam = {}
    for row, (total, history) in enumerate(beam.values()):
        for column, word in enumerate(ids.tolist()):
            prob = extension.log10_prob[row, column]
            want = oracle.score(history, word)
            checked.queries += 1
            checked.differences += want.log10_prob.tobytes() != prob.tobytes()
            state = extension.states[row, column]
            reached = total + float(prob)
            if state not in best or reached > best[state][0]:
                best[state] = (reached, (*history, word))
    ranked = sorted(best.items(), key=lambda item: -item[1][0])
    return dict(ranked[:HYPOTHESES])


def counted_by_servers(client: Client, addresses: list[str], timeout_s: float) -> tuple[int, int]:
    core = client._core
    assert isinstance(core, Core)
    beats = [
        core.connection(a).heartbeat(pb.HeartbeatRequest(sequence=1), timeout_s) for a in addresses
    ]
    return sum(b.messages for b in beats), sum(b.queries for b in beats)
