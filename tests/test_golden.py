"""Every version reads and answers what earlier ones wrote: `golden/VERSION/` has shard sets, a
KenLM file, messages, replies of a gateway, a signed privacy record, and what commands print.

`python tests/test_golden.py` writes the folder of this version, once, before its release.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forked
from client.questions import answers_to, random_queries
from cluster import WAIT_S, Cluster, ModelFiles, command
from dlm import __version__
from dlm.asr.kenlm import Model
from dlm.client import AsyncClient, Client, ClientConfig
from dlm.ngram.backoff import DictModel
from dlm.wire._pb import shard_pb2 as pb
from gateway.gateways import ThreadGateway
from server.calls import Asked, Caller, Questions

ARPA = Path(__file__).parents[1] / "shards/tiny/tiny.arpa"
GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
ENCODINGS = ("exact", "compact")
LINES = b"a b c\nb a zz\n\n"
CALLS: dict[str, Any] = {
    "Score": {"sentences": ["a b c", "b zz"]},
    "NextWords": {"text": "a b", "count": 3},
    "Rescore": {"hypotheses": [{"text": "a b", "acoustic": -1}, {"text": "b"}]},
}
# Paths are in the folder of a version.
COMMANDS = {
    "score": ["score", "--local", "exact", "--json"],
    "perplexity": ["perplexity", "compact", "--json"],
    "info": ["info", "exact", "--json"],
    "verify": ["verify", "exact", "--json"],
    "privacy": ["privacy", "verify", "counts.tsv", "--public-key", "key.pub", "--json"],
    "explain": ["explain", "port", "--json"],
    "export": ["export", "exact"],
}


def model_of(folder: Path) -> ModelFiles:
    """A golden shard set; its oracle is the model with the ids of the set."""
    return ModelFiles(folder, DictModel.from_arpa(folder.with_name("model.arpa")))


def members(found: Any, where: str = "") -> Iterator[str]:
    """The path and type of every member of JSON; those of a list's members are one."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from members(value, f"{where}.{key}")
    elif isinstance(found, list):
        for value in found:
            yield from members(value, f"{where}[]")
    elif found is not None:
        yield f"{where} {'number' if type(found) in (int, float) else type(found).__name__}"


def printed(folder: Path, arguments: list[str]) -> list[str]:
    """What a command prints: the members of its JSON, or its lines."""
    line = command(*arguments)
    done = forked.run(line, cwd=folder, input=LINES, capture_output=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("latin-1")
    if "--json" not in arguments:
        return text.splitlines()
    whole = [json.loads(text)] if text.startswith("{\n") else map(json.loads, text.splitlines())
    return sorted({line for one in whole for line in members(one)})


def replied(cluster: Cluster, cache: Path) -> dict[str, Any]:
    """What a gateway to these servers replies, as JSON."""
    found, config = {}, ClientConfig(cache_dir=cache, deadline_s=WAIT_S)
    with ThreadGateway(lambda: AsyncClient.connect(cluster.addresses, config)) as gateway:
        caller = gateway.caller("json")
        for call, body in CALLS.items():
            status, _, reply = caller.post(call, json.dumps(body).encode())
            assert status == 200, reply
            found[call] = json.loads(reply)
    return found


def asked_of(questions: Questions, shard: int) -> Asked:
    """The same queries for a shard in every version."""
    return questions.ask(np.random.default_rng(shard), shard)


def bits(folder: Path) -> list[str]:
    """Scores of random queries, exactly."""
    with Client.local(folder) as client:
        answers = answers_to(client.utterance(), random_queries(model_of(folder).oracle, 5, 200))
    return [float(one).hex() for one in answers.log10_prob]


def record(folder: Path) -> None:
    """Writes the folder of this version."""

    def dlm(*line: object, text: str = "") -> None:
        subprocess.run(command(*line), cwd=folder, input=text, text=True, check=True)

    folder.mkdir(parents=True)
    for encoding in ENCODINGS:
        dlm("shard", ARPA, "--shards", 2, "--encoding", encoding, "--output", encoding)
    dlm("export", "exact", "--output", "model.arpa")
    dlm("export", "exact", "--format", "probing", "--output", "model.binary")
    said = "".join(f"user{n}\ta b c a b\n" for n in range(40))
    (folder / "users.tsv").write_text(f"user_id\tutterance\n{said}")
    (folder / "words.txt").write_text("a\nb\nc\n")
    noise = ("--noise-multiplier", 2, "--delta", 1e-6, "--max-participations", 1)
    by = ("--public-attested-by", "the authors", "--rounds", 1, "--report-goal", 40)
    out = ("--wordlist", "words.txt", "--lambda", 4, "--output", "counts.tsv")
    dlm("unigrams", "users.tsv", *out, *noise, *by)
    for line in (
        ["genpkey", "-algorithm", "ed25519", "-out", "key.pem"],
        ["pkey", "-in", "key.pem", "-pubout", "-out", "key.pub"],
    ):
        subprocess.run(["openssl", *line], cwd=folder, check=True)
    dlm("privacy", "sign", "counts.tsv", "--key", "key.pem")
    files = model_of(folder / "exact")
    questions = Questions(files.directory, files.manifest, files.oracle)
    found: dict[str, Any] = {encoding: bits(folder / encoding) for encoding in ENCODINGS}
    with Cluster(files) as cluster, tempfile.TemporaryDirectory() as cache:
        found["gateway"] = replied(cluster, Path(cache))
        for shard, address in enumerate(cluster.addresses):
            data = asked_of(questions, shard).data
            found[f"Score {shard}"] = data.hex(), Caller(address).score(data).hex()
    found["printed"] = {name: printed(folder, line) for name, line in COMMANDS.items()}
    (folder / "recorded.json").write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    more = (f"counts.tsv.{kind}" for kind in ("ledger.json", "metrics.jsonl", "privacy.md"))
    for extra in ("key.pem", "users.tsv", "words.txt", *more):
        (folder / extra).unlink()


@pytest.fixture(scope="module", params=VERSIONS)
def golden(request: pytest.FixtureRequest) -> Path:
    """The folder of a version."""
    return GOLDEN / str(request.param)


@pytest.fixture(scope="module")
def kept(golden: Path) -> dict[str, Any]:
    """What it recorded."""
    found: dict[str, Any] = json.loads((golden / "recorded.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def cluster(golden: Path) -> Iterator[Cluster]:
    """Servers of its exact shards."""
    with Cluster(model_of(golden / "exact")) as running:
        yield running


@pytest.mark.promise("versions")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_its_shard_sets_have_the_same_scores(
    golden: Path, kept: dict[str, Any], encoding: str
) -> None:
    """Bit for bit."""
    assert bits(golden / encoding) == kept[encoding]


def test_its_kenlm_file_has_the_scores_of_the_model(golden: Path) -> None:
    """As a user of KenLM's package reads it."""
    found, expected = (Model(str(golden / f"model.{kind}")) for kind in ("binary", "arpa"))
    for line in LINES.decode().splitlines():
        assert list(found.full_scores(line)) == list(expected.full_scores(line))


def test_its_messages_are_answered_and_its_replies_read(
    golden: Path, kept: dict[str, Any], cluster: Cluster
) -> None:
    """The server gives all fields of the old reply; the client finds the model's scores in it."""
    files = model_of(golden / "exact")
    questions = Questions(files.directory, files.manifest, files.oracle)
    for shard, address in enumerate(cluster.addresses):
        request, old = map(bytes.fromhex, kept[f"Score {shard}"])
        checksum = pb.ScoreRequest.FromString(request).checksum
        questions.verify(shard, Asked(asked_of(questions, shard).queries, request, checksum), old)
        new = pb.ScoreReply.FromString(Caller(address).score(request))
        for field, value in pb.ScoreReply.FromString(old).ListFields():
            assert getattr(new, field.name) == value, field.name


def test_its_calls_to_a_gateway_get_all_that_they_got(
    kept: dict[str, Any], cluster: Cluster, tmp_path: Path
) -> None:
    """Members may be added."""

    def has(new: Any, old: Any) -> bool:
        if isinstance(old, dict):
            return all(has(new[key], value) for key, value in old.items())
        if isinstance(old, list):
            return len(new) == len(old) and all(map(has, new, old))
        return bool(new == old)

    found = replied(cluster, tmp_path)
    assert has(found, kept["gateway"]), found


@pytest.mark.parametrize("name", COMMANDS)
def test_what_its_commands_printed_is_still_there(
    golden: Path, kept: dict[str, Any], name: str
) -> None:
    """Every member of the JSON, with its type; an ARPA file to the byte."""
    if name == "privacy":
        pytest.importorskip("scipy", reason="needs the extra train")
    assert set(kept["printed"][name]) <= set(printed(golden, COMMANDS[name]))


if __name__ == "__main__":
    record(GOLDEN / ".".join(__version__.split(".")[:2]))
