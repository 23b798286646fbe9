"""proto/examples: each program prints the scores of the client, where its tools are installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster import ModelFiles
from dlm.client import AsyncClient, Client
from gateway.gateways import ThreadGateway
from gateway.programs import EXAMPLES, built_cpp, run

SENTENCE = "the man went home"
TOKEN = "a" * 32


@pytest.fixture(scope="module")
def local(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadGateway]:
    """A gateway without servers that wants a token."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"alice:{TOKEN}\n")
    with ThreadGateway(lambda: AsyncClient.local(files.directory), tokens=str(tokens)) as running:
        yield running


@pytest.fixture(scope="module")
def expected(files: ModelFiles) -> tuple[list[float], list[tuple[float, str]]]:
    """Scores of the sentence's words, and the beam of two after two steps, by the client."""
    with Client.local(files.directory) as client:
        utterance = client.utterance()
        (score,) = utterance.score_sentences([SENTENCE])
        beam = [((), np.float32(0), utterance.begin())]
        for words in (["the", "a", "there"], ["man", "is"]):
            found = utterance.extend([state for _, _, state in beam], words)
            longer = [
                ((*said, word), total + found.log10_prob[row, column], found.states[row, column])
                for row, (said, total, _) in enumerate(beam)
                for column, word in enumerate(words)
            ]
            beam = sorted(longer, key=lambda one: -one[1])[:2]
    return score.token_log10_prob.tolist(), [(total, " ".join(said)) for said, total, _ in beam]


def test_curl_scores_and_extends(local: ThreadGateway, expected: tuple) -> None:
    """Its second step has one row per state of the first."""
    url = f"http://localhost:{local.running.http_port}"
    score, extended = map(json.loads, run("sh", "curl.sh", url, TOKEN).splitlines())
    assert score["scores"][0]["log10Probs"] == pytest.approx(expected[0], abs=0, rel=1e-7)
    assert len(extended["states"]) == len(extended["log10Probs"]) == 2


def test_fetch_prints_the_scores(local: ThreadGateway, expected: tuple) -> None:
    """With Node, which has the fetch of browsers."""
    url = f"http://localhost:{local.running.http_port}"
    first, *beam = run("node", "fetch.mjs", url, TOKEN).splitlines()
    assert float(first.split()[0]) == pytest.approx(sum(expected[0]))
    assert [line.split(None, 1)[1] for line in beam] == [said for _, said in expected[1]]


@pytest.mark.slow
def test_go_prints_the_scores(local: ThreadGateway, expected: tuple) -> None:
    """With its own library alone."""
    url = f"http://localhost:{local.running.http_port}"
    first, *beam = run("go", "run", "score.go", url, TOKEN).splitlines()
    total, words = first.rstrip("]").split(" [")
    assert float(total) == pytest.approx(sum(expected[0]))
    found = np.array(words.split(), np.float32)
    assert found.tobytes() == np.array(expected[0], np.float32).tobytes()
    assert [
        (np.float32(total), said) for total, said in (line.split(None, 1) for line in beam)
    ] == expected[1]


@pytest.mark.promise("gateway_exact")
@pytest.mark.slow
def test_cpp_prints_the_scores(local: ThreadGateway, expected: tuple, tmp_path: Path) -> None:
    """Built with the commands of the page, from the proto file alone."""
    program = built_cpp(EXAMPLES / "score.cc", tmp_path)
    first, *beam = run(program, f"127.0.0.1:{local.running.port}", TOKEN).splitlines()
    found = np.array(first.split()[1:], np.float32)
    assert found.tobytes() == np.array(expected[0], np.float32).tobytes()
    assert [
        (np.float32(total), said) for total, said in (line.split(None, 1) for line in beam)
    ] == expected[1]
