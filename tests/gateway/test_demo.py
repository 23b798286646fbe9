"""`dlm demo`'s check through a gateway: all scores are the oracle's, by every door and language."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.resources import as_file, files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

from dlm.client import AsyncClient
from dlm.client.metrics import Stats
from dlm.cluster.check import check_rescoring, check_sentences
from dlm.gateway.calls import CALLS
from dlm.index.making import build_shard_set
from dlm.index.search.local import LocalModel
from dlm.ngram.backoff import DictModel
from gateway.gateways import DOORS, Caller, ThreadGateway
from gateway.programs import built_cpp, need

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
QUERIES = 61_990  # as `dlm demo` says


class Program:
    """A program that reads a call per line and prints its answer, as ask.cc describes."""

    def __init__(self, *command: object, as_json: bool) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([str(word) for word in command], **pipes)
        self._as_json = as_json

    def __call__(self, call: str, **request: Any) -> Any:
        message = CALLS[call][0](**request)
        told = message.SerializeToString().hex()
        if self._as_json:
            told = json_format.MessageToJson(message, indent=None)
        print(call, told, file=self._process.stdin, flush=True)
        numbers, orders, states = map(str.split, self._process.stdout.readline().split(","))
        found = SimpleNamespace(
            log10_probs=np.array([int(one, 16) for one in numbers], np.uint32).view(np.float32),
            matched_orders=list(map(int, orders)),
            states=list(map(bytes.fromhex, states)),
        )
        found.scores = [found]
        return found

    def close(self) -> None:
        self._process.communicate()


class Asked:
    """What the demo's check needs of a client, through one door of a gateway."""

    stats = Stats()

    def __init__(self, ask: Any) -> None:
        self._ask = ask
        with as_file(files("dlm") / "data" / "books20k") as shards:
            self.vocabulary = LocalModel.open(shards).vocabulary

    def utterance(self) -> Asked:
        return self

    def begin(self) -> bytes:
        return b""

    def score_sentences(self, lines: Sequence[bytes]) -> list[Any]:
        (score,) = self._ask("Score", sentences=[line.decode() for line in lines]).scores
        values = np.array(score.log10_probs, np.float32)
        orders = score.matched_orders
        return [SimpleNamespace(token_log10_prob=values, token_matched_order=orders)]

    def extend(self, states: Sequence[bytes], words: Any) -> Any:
        found = self._ask("Extend", states=states, word_ids=words.tolist())
        shape = len(states), len(words)
        after = np.array(found.states, object).reshape(shape)
        return SimpleNamespace(
            log10_prob=np.array(found.log10_probs, np.float32).reshape(shape), states=after
        )


@pytest.fixture(scope="module")
def oracle() -> DictModel:
    with as_file(files("dlm") / "data" / "books20k.arpa.zst") as arpa:
        return DictModel.from_arpa(arpa)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadGateway]:
    shards = tmp_path_factory.mktemp("demo") / "shards"
    with as_file(files("dlm") / "data" / "books20k.arpa.zst") as arpa:
        build_shard_set(arpa, shards, 3)
    with ThreadGateway(lambda: AsyncClient.local(shards), deadline_s=20.0) as running:
        yield running


def check(ask: Any, oracle: DictModel) -> None:
    """Scores the demo's sentences, and rescores them with a beam; `ask` makes the calls."""
    lines = (files("dlm") / "data" / "demo.txt").read_bytes().splitlines()
    with closing(ask):
        asked: Any = Asked(ask)
        checked = [run(asked, oracle, lines)[0] for run in (check_sentences, check_rescoring)]
    assert sum(one.queries for one in checked) == QUERIES
    assert not any(one.differences for one in checked)


@pytest.mark.promise("gateway_exact")
@pytest.mark.parametrize("door", DOORS)
def test_the_demos_scores_are_the_oracles_by_every_door(
    gateway: ThreadGateway, oracle: DictModel, door: str
) -> None:
    """By Python."""
    check(Caller(gateway, door), oracle)


@pytest.mark.promise("gateway_exact")
def test_the_demos_scores_are_the_oracles_in_cpp(
    gateway: ThreadGateway, oracle: DictModel, tmp_path: Path
) -> None:
    """By Debian's gRPC, from the proto file alone."""
    program = built_cpp(HERE / "ask.cc", tmp_path)
    check(Program(program, f"127.0.0.1:{gateway.running.port}", as_json=False), oracle)


@pytest.mark.promise("gateway_exact")
def test_the_demos_scores_are_the_oracles_in_javascript(
    gateway: ThreadGateway, oracle: DictModel
) -> None:
    """By JSON, in Node."""
    need("node")
    url = f"http://127.0.0.1:{gateway.running.http_port}"
    check(Program("node", HERE / "ask.mjs", url, as_json=True), oracle)
