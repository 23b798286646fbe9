"""A real 5-gram model behind real servers, on real text: its states beside KenLM's.

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

DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
ARPA = DATA / "arpa" / "books5.arpa.zst"
TEXT = DATA / "text" / "gutenberg.txt.zst"
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
    return [" ".join(w).encode() for w in islice((w for w in words if w), 300)]


@pytest.fixture(scope="module")
def shard_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """books5 in four shards."""
    folder = tmp_path_factory.mktemp("books5") / "shards"
    build_shard_set(ARPA, folder, SHARDS)
    return folder


@pytest.fixture(scope="module")
def served(shard_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of the four shards behind real servers."""
    with running_servers([shard_set]) as servers:
        addresses = [s.endpoint.address for s in servers]
        config = ClientConfig(deadline_s=60, cache_dir=tmp_path_factory.mktemp("cache"))
        with Client.connect(addresses, config) as client:
            yield client


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


@pytest.mark.promise("states_as_kenlm")
def test_states_of_a_real_model_are_equal_exactly_when_kenlms_are(
    served: Client, kenlm_model: tuple[Any, Any]
) -> None:
    """Word by word through real sentences: the served states partition as KenLM's do."""
    kenlm, model = kenlm_model
    utterance = served.utterance()
    ours, theirs = [], []
    for line in sentences():
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
