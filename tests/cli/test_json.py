"""What `--json` prints: one object, alone on standard output, with what the text says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import forked
from cluster import WAIT_S, command
from dlm.cli.main import app
from dlm.cli.output import as_json_line
from dlm.client.cluster_file import ClusterToml
from dlm.ngram.arpa import ArpaReader
from dlm.server.tokens import read_tokens
from normalised import normalised_model

ROOT = Path(__file__).resolve().parents[2]


def facts(*arguments: object, status: int = 0) -> Any:
    """The object that a command prints; nothing else is on standard output."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == status, (done.output, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return json.loads(done.stdout)


def counts(path: Path) -> list[int]:
    """N-grams by order, as the file's head has them."""
    with ArpaReader(path) as reader:
        return list(reader.counts)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a text and a list of words."""
    folder = tmp_path_factory.mktemp("json")
    for seed, name in enumerate(("a.arpa", "b.arpa")):
        model = normalised_model(seed, words=9)
        model.write(folder / name)
    words = [word for (word,) in (n for n in model.ngrams if len(n) == 1) if word[0] != "<"]
    (folder / "words").write_text("\n".join(words))
    (folder / "text").write_text(" ".join(words) + "\n")
    return folder


def test_models_from_models_are_reported_with_their_counts(home: Path) -> None:
    """Those of the file that was written; --quiet does not silence what was asked for."""
    model, out = home / "a.arpa", home / "out.arpa"
    found = facts("reduce", model, "--order", 2, "-o", out, "--quiet")
    assert found == {"counts_before": counts(model), "counts": counts(out)}
    found = facts("filter", model, "--vocab", home / "words", "-o", out)
    assert (found["counts_before"], found["counts"]) == (counts(model), counts(out))
    assert found["words_missing"] == 0
    found = facts("prune", model, "--ngrams", 60, "--text", home / "text", "-o", out)
    assert (found["counts_before"], found["counts"]) == (counts(model), counts(out))
    assert (
        sum(found["counts"]) <= 60
        and found["tokens"] == len((home / "words").read_text().split()) + 1
    )
    assert found["perplexity"] > 1
    found = facts("merge", model, home / "b.arpa", "--weights", "0.25,0.75", "-o", out)
    assert (found["counts"], found["weights"], found["tuned"]) == (counts(out), [0.25, 0.75], None)
    found = facts("merge", model, home / "b.arpa", "--tune", home / "text", "-o", out)
    assert sum(found["weights"]) == pytest.approx(1)
    assert found["tuned"]["tokens"] == len((home / "words").read_text().split()) + 1


def test_an_estimate_is_reported(home: Path) -> None:
    """Text and model; the bytes are those of the file."""
    out = home / "estimated.arpa"
    text = ROOT / "dlm/data/demo.txt"
    found = facts("estimate", text, "--order", 2, "--discount-fallback", "-o", out, "-q")
    assert (found["output"], found["bytes"]) == (str(out), out.stat().st_size)
    assert found["counts"] == counts(out)
    assert (found["words"], found["lines"], found["skipped"]) == (328, 22, {})


def test_a_shard_set_is_estimated_made_and_verified(home: Path) -> None:
    """What `dlm info` prints; the estimate is near; each violation has its rule and file."""
    expected = facts("shard", home / "a.arpa", "--shards", 2, "--estimate")
    made = facts("shard", home / "a.arpa", "--shards", 2, "--output", home / "set")
    assert made == facts("info", home / "set")
    assert made["counts"] == expected["counts"] == counts(home / "a.arpa")
    assert expected["sizes"][0]["encoding"] == "exact"
    good = facts("verify", home / "set", "--arpa", home / "a.arpa")
    assert good == {
        "directory": str(home / "set"),
        "valid": True,
        "complete": True,
        "violations": [],
        "warnings": [],
    }
    shard = home / "set/shard-0001.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    bad = facts("verify", home / "set", status=1)
    assert not bad["valid"]
    assert {"rule", "file", "message"} == set(bad["violations"][0])
    assert bad["violations"][0]["file"] == shard.name


def test_a_token_is_printed_where_no_file_takes_it(tmp_path: Path) -> None:
    """The line and the secret; or the names of the files that have them."""
    printed = facts("token", "me")
    assert printed["line"].startswith("me:") and len(printed["token"]) >= 32
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"
    kept = facts("token", "me", "--tokens", tokens, "--token-file", mine)
    assert (kept["line"], kept["token"]) == (None, None)
    assert (kept["tokens"], kept["token_file"]) == (str(tokens), str(mine))
    assert read_tokens(tokens).names == ("me",)


def test_a_cluster_says_on_one_line_what_it_serves(
    home: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Once all servers are ready; the addresses are those of cluster.toml."""
    facts("shard", home / "b.arpa", "--shards", 2, "--output", tmp_path / "set")
    process = forked.Popen(
        command("cluster", tmp_path / "set", "--json"),
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    found = json.loads(process.stdout.readline())
    listed = ClusterToml(tmp_path / "cluster.toml").servers()
    process.terminate()
    rest, _ = process.communicate(timeout=WAIT_S)
    assert (process.returncode, rest) == (0, b"")
    assert [one["shard"] for one in found["servers"]] == [0, 1]
    assert [one["address"] for one in found["servers"]] == [one.address for one in listed]
    assert found["shard_sets"][0]["directory"] == str(tmp_path / "set")


def test_infinity_and_nan_are_null() -> None:
    """JSON has neither; at any depth."""
    line = as_json_line({"a": float("inf"), "b": [1.5, float("nan")], "c": {"d": -float("inf")}})
    assert json.loads(line) == {"a": None, "b": [1.5, None], "c": {"d": None}}
    assert as_json_line({"a": 1.5}) == '{"a": 1.5}'
