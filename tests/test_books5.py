"""A real 5-gram model behind real servers, on real text: the claims of the README.

The data lies outside the project: DLM_SHARED_DATA, by default ../shared/data beside the checkout.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dlm.client import Client, ClientConfig
from dlm.cluster.processes import running_servers
from dlm.index.making import build_shard_set
from dlm.ngram.backoff import DictModel
from dlm.wire._pb import shard_pb2 as pb

DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
ARPA = DATA / "arpa" / "books5.arpa.zst"
TEXT = DATA / "text" / "gutenberg.txt.zst"
# All that a run of ten minutes can check: DLM_BOOKS5_SENTENCES=10000.
SENTENCES = int(os.environ.get("DLM_BOOKS5_SENTENCES", "2000"))
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


@pytest.fixture(scope="module")
def served(
    shard_set: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Client, list[str]]]:
    """A client of the four shards behind real servers, and the servers' addresses."""
    with running_servers([shard_set]) as servers:
        addresses = [s.endpoint.address for s in servers]
        config = ClientConfig(deadline_s=60, cache_dir=tmp_path_factory.mktemp("cache"))
        with Client.connect(addresses, config) as client:
            yield client, addresses


@pytest.fixture(scope="module")
def kenlm_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The package and its model of the same ARPA file, which it reads only when plain."""
    kenlm = pytest.importorskip(
        "kenlm", reason="kenlm is not installed (pip install -e '.[peers]')"
    )
    plain = tmp_path_factory.mktemp("plain") / "books5.arpa"
    with pa.CompressedInputStream(pa.OSFile(str(ARPA)), "zstd") as stream, plain.open("wb") as out:
        while block := stream.read(1 << 20):
            out.write(block)
    return kenlm, kenlm.LanguageModel(str(plain))


def oracle_of(text: list[bytes], path: Path) -> DictModel:
    """The oracle of the model without the n-grams that hold a word outside of `text`.

    None of them is ever asked for, and four million in a dict take a minute.
    """
    words = {b"<s>", b"</s>", b"<unk>"}.union(*(line.split() for line in text))
    kept: list[list[bytes]] = []
    with pa.CompressedInputStream(pa.OSFile(str(ARPA)), "zstd") as stream:
        for line in io.BufferedReader(stream):
            if line.startswith(b"\\") and line.endswith(b"-grams:\n"):
                kept.append([])
            elif kept and b"\t" in line:
                ngram = line.rstrip(b"\n").split(b"\t")[1]
                if words.issuperset(ngram.split(b" ")):
                    kept[-1].append(line)
    out = [b"\\data\\\n", *(b"ngram %d=%d\n" % (n, len(k)) for n, k in enumerate(kept, 1))]
    for n, lines in enumerate(kept, 1):
        out += [b"\n\\%d-grams:\n" % n, *lines]
    path.write_bytes(b"".join(out) + b"\n\\end\\\n")
    return DictModel.from_arpa(path)


def test_sentences_equal_the_oracle(
    served: tuple[Client, list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Every token, at no more than one message a query by the servers' own count."""
    client, addresses = served
    text = sentences()
    assert len(text) == SENTENCES
    utterance = client.utterance()
    begin_counts, begin_stats = _served(client, addresses), client.stats
    scores = []
    for begin in range(0, SENTENCES, 200):
        scores += utterance.score_sentences(text[begin : begin + 200])
    batched = _less(_served(client, addresses), begin_counts)
    stats = client.stats
    tokens = sum(score.tokens for score in scores)
    zero = stats.local_hits - begin_stats.local_hits
    remote = tokens - zero
    assert stats.queries - begin_stats.queries == tokens
    assert batched[0] == stats.messages - begin_stats.messages <= remote
    assert batched[1] == stats.sent_queries - begin_stats.sent_queries <= remote

    # Batching hides what one query costs: ask some alone, with their whole history.
    alone = _served(client, addresses)
    asked = 0
    for line in text[:20]:
        words = line.split()
        for end in range(len(words)):
            before = _served(client, addresses)[0]
            utterance.score([words[:end]], [words[end]])
            assert _served(client, addresses)[0] - before <= 1
            asked += 1
    alone = _less(_served(client, addresses), alone)
    assert alone[0] == alone[1] <= asked, "one query in each message"

    oracle = oracle_of(text, tmp_path / "asked.arpa")
    for line, result in zip(text, scores, strict=True):
        for want, prob, order in zip(
            oracle.score_sentence(line.split()),
            result.token_log10_prob,
            result.token_matched_order,
            strict=True,
        ):
            assert want.log10_prob.tobytes() == prob.tobytes(), line
            assert want.matched_order == order, line
    del oracle
    with capsys.disabled():
        print(
            f"\n{SENTENCES} sentences, {tokens} tokens equal; with no message {zero / tokens:.1%}; "
            f"in batches {batched[0]} messages with {batched[1]} distinct queries; "
            f"one at a time {asked} queries, {alone[0]} messages (servers' count)"
        )


@pytest.mark.promise("states_as_kenlm")
def test_states_of_a_real_model_are_equal_exactly_when_kenlms_are(
    served: tuple[Client, list[str]], kenlm_model: tuple[Any, Any]
) -> None:
    """Word by word through real sentences: the served states partition as KenLM's do."""
    kenlm, model = kenlm_model
    utterance = served[0].utterance()
    ours, theirs = [], []
    for line in sentences()[:300]:
        state, their = utterance.begin(), kenlm.State()
        model.BeginSentenceWrite(their)
        for word in line.decode().split():
            state = utterance.extend([state], [word]).states[0][0]
            after = kenlm.State()
            model.BaseScore(their, word, after)
            their = after
            ours.append(state)
            theirs.append(their)
    assert len(ours) > 3000
    pairs = set(zip(ours, theirs, strict=True))
    assert len(pairs) == len(set(ours)) == len(set(theirs))


def _less(after: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    return after[0] - before[0], after[1] - before[1]


def _served(client: Client, addresses: list[str]) -> tuple[int, int]:
    beats = [
        client._core.connection(a).heartbeat(pb.HeartbeatRequest(sequence=1), 10) for a in addresses
    ]
    return sum(b.messages for b in beats), sum(b.queries for b in beats)
