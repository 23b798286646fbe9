"""The packaged model by every door of a gateway: what `dlm demo` checks by the client."""

from __future__ import annotations

import random
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm.client import AsyncClient
from dlm.index.making import build_shard_set
from dlm.ngram.backoff import DictModel
from gateway.gateways import DOORS, Caller, ThreadGateway

pytestmark = pytest.mark.slow

CANDIDATES, HYPOTHESES = 20, 10


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its shards, and the oracle."""
    folder: Path = tmp_path_factory.mktemp("demo")
    with as_file(files("dlm") / "data" / "books20k.arpa.zst") as arpa:
        build_shard_set(arpa, folder / "shards", 3)
        return folder / "shards", DictModel.from_arpa(arpa)


@pytest.mark.promise("gateway_exact")
@pytest.mark.parametrize("door", DOORS)
def test_the_demos_scores_are_the_oracles_by_every_door(demo: Any, door: str) -> None:
    """Its sentences, and a beam along each: more than 40,000 scores, bit for bit."""
    directory, oracle = demo
    lines = (files("dlm") / "data" / "demo.txt").read_text(encoding="utf-8").splitlines()
    vocabulary, rng, asked = oracle.vocabulary, random.Random(1), 0
    with ThreadGateway(lambda: AsyncClient.local(directory), deadline_s=20.0) as gateway:
        caller = Caller(gateway, door)
        reply = caller("Score", sentences=lines)
        for line, found in zip(lines, reply.scores, strict=True):
            expected = [one.log10_prob for one in oracle.score_sentence(line.split())]
            assert np.array(found.log10_probs, np.float32).tobytes() == np.array(expected).tobytes()
            asked += len(expected)
        for line in lines:
            beam = [((vocabulary.begin_id,), b"")]
            for word in line.split():
                others = [rng.randrange(len(vocabulary)) for _ in range(CANDIDATES - 1)]
                words = [vocabulary.id_of(word), *others]
                found = caller("Extend", states=[state for _, state in beam], word_ids=words)
                histories = [(*history, one) for history, _ in beam for one in words]
                expected = [oracle.score(one[:-1], one[-1]).log10_prob for one in histories]
                values = np.array(found.log10_probs, np.float32)
                assert values.tobytes() == np.array(expected, np.float32).tobytes()
                asked += len(expected)
                best = np.argsort(-values, kind="stable")[:HYPOTHESES]
                beam = [(histories[at], found.states[at]) for at in best]
        caller.close()
    assert asked > 40_000
