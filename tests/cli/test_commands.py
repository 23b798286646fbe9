"""What each command prints, and how it refuses."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import forked
from cluster import WAIT_S, command
from dlm.ngram.backoff import DictModel

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]

TEXT = b"a b c d\nd a b\n\nnever a  seen\tb\r\n\xff\xfe a\n"


def test_score_prints_an_object_a_sentence_and_one_summary(run: Run, cluster: Path) -> None:
    """log10_prob, tokens and oovs as the oracle's; the perplexities as KenLM defines them."""
    done = run("score", "--cluster", cluster, "--json", text=TEXT, status=0)
    *sentences, last = [json.loads(line) for line in done.stdout.splitlines()]
    oracle = DictModel.from_arpa(cluster.with_name("model.arpa"))
    total = oov_total = 0.0
    tokens = oovs = 0
    for line, facts in zip(TEXT.splitlines(), sentences, strict=True):
        words = line.replace(b"\t", b" ").split(b" ")
        words = [w for w in words if w]
        scores = oracle.score_sentence(words)
        unknown = [oracle.vocabulary.id_of(w) == 0 for w in words] + [False]
        assert facts["log10_prob"] == float(sum(np.float64(s.log10_prob) for s in scores))
        assert facts["tokens"] == len(words) + 1
        assert facts["oovs"] == sum(unknown)
        total += facts["log10_prob"]
        oov_total += sum(float(s.log10_prob) for s, u in zip(scores, unknown, strict=True) if u)
        tokens += facts["tokens"]
        oovs += facts["oovs"]
    assert list(last) == ["summary"]
    summary = last["summary"]
    assert (summary["sentences"], summary["tokens"], summary["oovs"]) == (5, tokens, oovs)
    assert math.isclose(summary["perplexity"], 10 ** (-total / tokens))
    without = 10 ** (-(total - oov_total) / (tokens - oovs))
    assert math.isclose(summary["perplexity_without_oovs"], without)


def test_a_cluster_and_the_shards_on_disk_score_alike(
    run: Run, cluster: Path, folder: Path
) -> None:
    """The same lines, byte for byte, in every form of output."""
    for form in ([], ["--words"], ["--json"], ["--json", "--words"]):
        served = run("score", "--cluster", cluster, *form, text=TEXT)
        local = run("score", "--local", folder / "shards", *form, text=TEXT)
        assert served.returncode == local.returncode == 0, served.stderr + local.stderr
        assert served.stdout == local.stdout


def test_words_shows_every_token_with_its_matched_order(run: Run, folder: Path) -> None:
    """A line a token: word, matched order, log10 P, and a mark on what is unknown."""
    done = run("score", "--local", folder / "shards", "--words", text=b"a b c d zzz\n")
    lines = [line.split("\t") for line in done.stdout.decode().splitlines()]
    assert [line[:2] for line in lines[:4]] == [["a", "1"], ["b", "2"], ["c", "3"], ["d", "4"]]
    assert lines[4][:2] == ["zzz", "1"]
    assert lines[4][3] == "OOV"
    assert lines[5][0] == "</s>"
    raw = run("score", "--local", folder / "shards", "--words", text=b"caf\xe9 a\n")
    assert raw.stdout.startswith(b"caf\xe9\t1\t")


def test_no_text_has_no_perplexity(run: Run, folder: Path) -> None:
    """An empty input is a summary of zeros with null perplexities, not a division by zero."""
    done = run("score", "--local", folder / "shards", "--json", status=0)
    (last,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert last["summary"]["tokens"] == 0
    assert last["summary"]["perplexity"] is None


def test_info_tells_counts_bytes_and_balance(run: Run, folder: Path) -> None:
    """The JSON object has what a script needs; the bytes are those on disk."""
    facts = json.loads(run("info", folder / "shards", "--json").stdout)
    assert facts["counts"] == [7, 2, 2, 1]
    assert facts["order"] == 4
    assert facts["encoding"] == "exact"
    on_disk = sum(path.stat().st_size for path in (folder / "shards").iterdir())
    assert facts["bytes"] == on_disk
    assert facts["bytes_per_ngram"] == on_disk / 12
    assert facts["imbalance"] >= 1
    assert len(facts["shard_set"]) == 32
    assert facts["provenance"]["source"] == "model.arpa"
    assert facts["shard_set"] in run("info", folder / "shards").stdout.decode()


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
@pytest.mark.parametrize("command", [("verify", "shards"), ("score", "--local", "model.arpa")])
def test_progress_is_not_shown_where_it_is_not_wanted(
    run: Run, folder: Path, command: tuple[str, ...], quiet: tuple[str, ...]
) -> None:
    """Its lines begin with the time."""
    done = run(*command, *quiet, cwd=folder, text=b"a b\n", status=0)
    assert bool(re.search(rb"^\[ .* s\] ", done.stderr, re.M)) == (not quiet)


@pytest.mark.slow
def test_verify_checks_the_files_of_some_shards_where_the_others_are_not(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    """As on a host that serves one of them: what is there is whole or named, the rest is not
    missed."""
    for path in (folder / "shards").iterdir():
        if path.name != "shard-0000.arrow":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    good = run("verify", tmp_path, "--shard", 1, status=0)
    assert b"the files of shard 1 are valid" in good.stdout
    assert run("verify", tmp_path).returncode == 1
    lost = run("verify", tmp_path, "--shard", 1, "--shard", 0, status=1)
    assert b"violation: " in lost.stdout and b"shard-0000.arrow" in lost.stdout
    beyond = run("verify", tmp_path, "--shard", 2)
    assert beyond.returncode == 1 and b"has no shard 2; its shards are 0 to 1" in beyond.stderr
    both = run("verify", tmp_path, "--shard", 1, "--arpa", folder / "model.arpa")
    assert both.returncode == 1 and b"--shard and --arpa" in both.stderr
    for name in ("low_orders.arrow", "vocabulary.arrow", "shard-0001.arrow", "manifest.json"):
        path = tmp_path / name
        whole = path.read_bytes()
        data = bytearray(whole)
        data[len(data) // 2] ^= 1
        for damaged in (bytes(data), whole[: len(whole) // 2]):
            path.write_bytes(damaged)
            bad = run("verify", tmp_path, "--shard", 1)
            assert bad.returncode == 1 and name.encode() in bad.stdout, bad
        path.write_bytes(whole)


def test_export_gives_the_model_back(run: Run, folder: Path) -> None:
    """To standard output or to a file; read again, it is the same model."""
    done = run("export", folder / "shards", status=0)
    (folder / "again.arpa").write_bytes(done.stdout)
    first = DictModel.from_arpa(folder / "model.arpa")
    again = DictModel.from_arpa(folder / "again.arpa")
    assert first.ngrams == again.ngrams
    assert run("export", folder / "shards", "-o", "-", cwd=folder).stdout == done.stdout
    assert run("export", folder / "shards", "-o", folder / "again.arpa.gz").returncode == 0
    assert run("export", folder / "shards", "-o", folder / "again.arpa.gz").returncode == 1
    assert run("export", folder / "shards", "-o", folder / "again.arpa.bz2").returncode == 1
    assert DictModel.from_arpa(folder / "again.arpa.gz").ngrams == first.ngrams


def test_a_full_disk_is_told_with_its_file_and_what_to_do(run: Run, folder: Path) -> None:
    """Not by the system's words alone, from which nobody learns which disk it is."""
    done = run("reduce", folder / "model.arpa", "--order", 1, "--output", "/dev/full", status=1)
    assert done.stderr.startswith(b"dlm: /dev/full: No space left on device; free ")
    assert b"bytes are free now), or write to another. No partial output is left" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["shard", "model.arpa", "--shards", "0", "-o", "out"], b"1 to 4,096"),
        (["info", "model.arpa"], b"is a file"),
        (["verify", "."], b"manifest.json"),
        (["serve", "shards", "--shard", "7"], b"0 to 1"),
        (["serve", "shards", "--shard", "0", "--host", "0.0.0.0"], b"--insecure"),
        (["serve", "shards", "--shard", "0", "--log-level", "loud"], b"debug, info"),
        (["serve", "shards", "absent", "--shard", "0"], b"absent"),
        (["serve", "shards", "shards", "--shard", "0"], b"same shard set"),
        (["serve", "shards", "--shard", "0", "--share-port"], b"--port"),
        (["cluster", "shards", "absent"], b"absent"),
        (["score", "--local", "shards", "--model", "abcdef"], b"--model applies to servers"),
        (["score", "--model", "abc"], b"6 to 32 hex digits"),
        (["cluster", "shards", "--port", "65535"], b"expected 1 to 65534"),
        (["score", "--cluster", "x", "--local", "shards"], b"give one of them"),
    ],
)
@pytest.mark.usefixtures("cluster")  # for `dlm score` without a file of its own
def test_what_cannot_be_done_is_told_in_a_line_with_exit_status_one(
    run: Run, folder: Path, arguments: list[str], says: bytes
) -> None:
    """No traceback, and the line names what is wrong."""
    done = run(*arguments, cwd=folder, status=1)
    assert says in done.stderr + done.stdout
    assert b"Traceback" not in done.stderr
    assert not (folder / "out").exists()


def test_a_reader_that_leaves_ends_the_command_quietly(
    folder: Path, environ: dict[str, str]
) -> None:
    """As `dlm export DIR | head` does."""
    process = forked.Popen(
        command("score", "--local", folder / "shards", "--words"),
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, stderr = process.communicate(b"a b c d\n" * 20_000, timeout=WAIT_S)
    assert b"Traceback" not in stderr
    assert process.returncode == 1
