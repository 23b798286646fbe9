"""A real 5-gram model behind real servers, on real text: the claims of the README.

The data lies outside the project: DLM_SHARED_DATA, by default ../shared/data beside the checkout.
"""

from __future__ import annotations

import io
import os
import re
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest

from dlm.cli.processes import running_servers
from dlm.client import Client, ClientConfig
from dlm.index.build import build_shard_set
from dlm.ngram.backoff import DictModel
from dlm.wire._pb import shard_pb2 as pb

DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
ARPA = DATA / "arpa" / "books5.arpa.zst"
TEXT = DATA / "text" / "gutenberg.txt.zst"
SENTENCES = 10_000
SHARDS = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ARPA.exists() and TEXT.exists()),
        reason=f"no {ARPA} or {TEXT}; name the folder of the shared data in DLM_SHARED_DATA",
    ),
]


def sentences() -> list[bytes]:
    """Real sentences, lower-cased, with what the model does not know left in."""
    stream = pa.CompressedInputStream(pa.OSFile(str(TEXT)), "zstd")
    lines = io.TextIOWrapper(io.BufferedReader(stream), "utf-8")
    words = (re.findall(r"[^\s.,;:!?\"()]+", line.lower()) for line in islice(lines, 50_000, None))
    return [" ".join(w).encode() for w in islice((w for w in words if w), SENTENCES)]


@pytest.fixture(scope="module")
def shard_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """books5 in four shards."""
    folder = tmp_path_factory.mktemp("books5") / "shards"
    build_shard_set(ARPA, folder, SHARDS)
    return folder


def test_ten_thousand_sentences_equal_the_oracle(
    shard_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every token, at no more than one message a query by the servers' own count."""
    text = sentences()
    assert len(text) == SENTENCES
    with running_servers(shard_set, SHARDS) as servers:
        addresses = [s.endpoint.address for s in servers]
        config = ClientConfig(deadline_s=60, cache_dir=tmp_path / "cache")
        with Client.connect(addresses, config) as client:
            utterance = client.utterance()
            scores = []
            for begin in range(0, SENTENCES, 200):
                scores += utterance.score_sentences(text[begin : begin + 200])
            zero = client.stats.zero_message
            # One query a message cannot be beaten down by batching: count it alone.
            before = _served(client, addresses)
            asked = 0
            for line in text[:20]:
                words = line.split()
                for end in range(len(words)):
                    utterance.score([words[:end]], [words[end]])
                    asked += 1
            after = _served(client, addresses)
    assert after[0] - before[0] <= asked
    assert after[0] - before[0] == after[1] - before[1], "one query in each of these messages"

    oracle = DictModel.from_arpa(ARPA)
    tokens = 0
    for line, result in zip(text, scores, strict=True):
        for want, prob, order in zip(
            oracle.score_sentence(line.split()),
            result.token_log10_prob,
            result.token_matched_order,
            strict=True,
        ):
            tokens += 1
            assert want.log10_prob.tobytes() == prob.tobytes(), line
            assert want.matched_order == order, line
    del oracle
    with capsys.disabled():
        print(
            f"\n{SENTENCES} sentences, {tokens} tokens equal; answered with no message "
            f"{zero / tokens:.1%}; in batches {before[0]} messages with {before[1]} distinct "
            f"queries; "
            f"one at a time {asked} queries, {after[0] - before[0]} messages (servers' count)"
        )


def test_ten_thousand_sentences_agree_with_kenlm(shard_set: Path, tmp_path: Path) -> None:
    """Every token within 1e-5 relative of KenLM, unknown words and sentence ends included."""
    kenlm = pytest.importorskip("kenlm", reason="kenlm is not installed (pip install 'dlm[peers]')")
    from dlm.client.local import LocalClient

    plain = tmp_path / "books5.arpa"
    with pa.CompressedInputStream(pa.OSFile(str(ARPA)), "zstd") as stream, plain.open("wb") as out:
        while block := stream.read(1 << 20):
            out.write(block)
    model = kenlm.LanguageModel(str(plain))
    utterance = LocalClient.open(shard_set).utterance()
    text = sentences()
    for begin in range(0, SENTENCES, 500):
        part = text[begin : begin + 500]
        for line, result in zip(part, utterance.score_sentences(part), strict=True):
            theirs = list(model.full_scores(line.decode()))
            assert len(theirs) == result.tokens, line
            for (want, _, oov), prob, ours in zip(
                theirs, result.token_log10_prob, result.token_oov, strict=True
            ):
                assert abs(want - float(prob)) <= 1e-5 * abs(want), line
                assert bool(oov) == bool(ours), line


def _served(client: Client, addresses: list[str]) -> tuple[int, int]:
    beats = [
        client._core.connection(a).heartbeat(pb.HeartbeatRequest(sequence=1), 10) for a in addresses
    ]
    return sum(b.messages for b in beats), sum(b.queries for b in beats)
