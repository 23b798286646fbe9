"""`dlm rescore`: from files to files, by servers, shards and ARPA files."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from asr.plain import random_lattice
from asr.test_rescore import summed
from cluster import Cluster, ModelFiles, build
from dlm.asr.rescoring.kaldi import SymbolTable, kaldi_text, read_kaldi
from dlm.asr.rescoring.lattice import Scales
from dlm.asr.rescoring.nbest import Hypothesis, NbestList, nbest_json, read_nbest
from dlm.asr.rescoring.rescore import Search, rescore
from dlm.asr.rescoring.slf import read_slf, slf_text
from dlm.cli.main import program
from dlm.client import Client
from dlm.errors import DlmError
from dlm.units import LN_10
from models import HAND_MADE

WORDS = ["a", "b", "c", "d"]
SCALES = [
    "--deadline",
    60,
    "--acoustic-scale",
    0.5,
    "--lm-scale",
    3,
    "--word-penalty",
    -0.25,
    "--beam",
    "inf",
]
SEARCH = Search(Scales(0.5, 3.0, -0.25), beam=math.inf)
Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


Rescore = Callable[..., Result]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model in two shards, and its ARPA file beside them."""
    return build(HAND_MADE["missing_suffixes"], tmp_path_factory.mktemp("rescore"), 2)


@pytest.fixture
def dlm_rescore(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Rescore:
    """The command in this process, with a cache folder of its own."""
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "rescore-cache"))
    app = program(["rescore", "score"])  # with one alone, its name would be left out

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["rescore", *map(str, arguments)])

    return call


def succeeded(done: Result) -> str:
    """What it printed."""
    assert done.exit_code == 0, done.exception
    return done.stdout


def refused(done: Result) -> str:
    """What `dlm` says of the error, before it exits with 1."""
    assert isinstance(done.exception, (DlmError, OSError)), done.exception
    return str(done.exception)


@pytest.fixture
def lattices(tmp_path: Path) -> Path:
    """A folder of three SLF files."""
    folder = tmp_path / "in"
    folder.mkdir()
    for seed in range(3):
        lattice = random_lattice(seed, words=WORDS)
        (folder / f"{lattice.id}.slf").write_text(slf_text(lattice))
    return folder


def test_a_folder_of_lattices_is_rescored_by_servers_and_by_shards_alike(
    dlm_rescore: Rescore, files: ModelFiles, lattices: Path, tmp_path: Path
) -> None:
    """Each file has the scores of the library; rows and a summary say what it took, no words."""
    with Cluster(files) as cluster:
        toml = cluster.write(tmp_path / "cluster.toml")
        done = dlm_rescore(lattices, "--lm", toml, *SCALES, "-o", tmp_path / "out")
    rows = [row.split("\t") for row in succeeded(done).splitlines()]
    assert rows[0] == ["utterance", "positions", "queries", "bigram_fallback", "local_fallback"]
    assert [row[0] for row in rows[1:4]] == ["utt-0", "utt-1", "utt-2"]
    assert all(row[3:] == ["0", "0"] for row in rows[1:4])
    assert len(rows) == 4  # rows alone, for a pipe
    assert "Utterances:\t3\n" in done.stderr
    assert "Bigram fallback:\t0\n" in done.stderr
    assert "rescoring" in done.stderr
    here = dlm_rescore(lattices, "--lm", files.directory, *SCALES, "-q", "-o", tmp_path / "here")
    assert succeeded(here).splitlines()[:4] == done.stdout.splitlines()[:4]
    assert here.stderr.startswith("Utterances:\t3\n")
    with Client.local(files.directory) as client:
        for seed in range(3):
            lattice = random_lattice(seed, words=WORDS)
            expected = rescore(lattice, client.utterance(), SEARCH).lattice
            for folder in ("out", "here"):
                found = read_slf(tmp_path / folder / f"utt-{seed}.slf")
                assert summed(found) == summed(expected)


def test_a_list_is_rescored_by_an_arpa_file(
    dlm_rescore: Rescore, files: ModelFiles, tmp_path: Path
) -> None:
    """JSON lines by the name of the file; the best sentence comes first."""
    some = [("a", "b"), ("a", "b", "c", "d"), ()]
    given = NbestList("u", tuple(map(Hypothesis, some)))
    (tmp_path / "in.jsonl").write_text(nbest_json(given))
    arpa = files.directory.with_name("model.arpa")
    out = tmp_path / "out.jsonl"
    done = dlm_rescore(tmp_path / "in.jsonl", "--lm", arpa, "--json", "-o", out)
    first, last = map(json.loads, succeeded(done).splitlines())
    assert first == {
        "id": "u",
        "positions": 1,
        "queries": 9,
        "bigram_fallback": 0,
        "local_fallback": 0,
    }
    assert last["summary"]["utterances"] == 1
    (found,) = read_nbest(out)
    assert {one.words for one in found.hypotheses} == {*some}
    lms = [one.lm for one in found.hypotheses]
    assert lms == sorted(lms, reverse=True)


def test_a_file_of_phrases_chooses_a_hypothesis(
    dlm_rescore: Rescore, files: ModelFiles, tmp_path: Path
) -> None:
    """Outside of the LM scale; what the model lacks is counted, not named."""
    given = NbestList("u", tuple(map(Hypothesis, [("a",), ("a", "sellers"), ("Sellers",)])))
    (tmp_path / "in.jsonl").write_text(nbest_json(given))
    (tmp_path / "names.tsv").write_text("a sellers\t60\t\nb\t-1\n")
    more = ["--lm", files.directory, "--lm-scale", 4, "-o"]
    lm = []
    for name, some in (("plain", []), ("named", ["--phrases", tmp_path / "names.tsv"])):
        done = dlm_rescore(tmp_path / "in.jsonl", *some, *more, tmp_path / f"{name}.jsonl")
        assert succeeded(done)
        assert ("2 phrases, 3 words in all; the model lacks 1 of them" in done.stderr) == bool(some)
        assert "sellers" not in done.stderr + done.stdout
        (found,) = read_nbest(tmp_path / f"{name}.jsonl")
        lm.append({one.words: one.lm for one in found.hypotheses})
    assert found.hypotheses[0].words == ("a", "sellers")
    changed = {words: lm[1][words] - lm[0][words] for words in lm[0]}
    expected = {("a",): 0.0, ("a", "sellers"): 60 * LN_10 / 4, ("Sellers",): 0.0}
    assert changed == pytest.approx(expected)


def test_kaldis_lattices_keep_their_format_and_have_the_same_best_sentences(
    dlm_rescore: Rescore, files: ModelFiles, lattices: Path, tmp_path: Path
) -> None:
    """An archive into an archive; and the best of each lattice, whatever it was written as."""
    numbers = {"0": "<eps>", "9": "!SIL", **{str(i): word for i, word in enumerate(WORDS, 1)}}
    table = SymbolTable(numbers, {word: number for number, word in numbers.items()})
    (tmp_path / "words.txt").write_text("".join(f"{w} {n}\n" for n, w in numbers.items()))
    archive = "".join(kaldi_text(random_lattice(seed, words=WORDS), table) for seed in range(3))
    (tmp_path / "lat.txt").write_text(archive)
    kaldi = [tmp_path / "lat.txt", "--symbol-table", tmp_path / "words.txt"]
    model = ["--lm", files.directory, *SCALES]
    succeeded(dlm_rescore(*kaldi, *model, "-o", tmp_path / "out.txt"))
    assert [one.id for one in read_kaldi(tmp_path / "out.txt", table)] == [
        "utt-0",
        "utt-1",
        "utt-2",
    ]
    best = []
    for name, given in (("kaldi.txt", kaldi), ("slf.txt", [lattices])):
        succeeded(dlm_rescore(*given, *model, "--nbest", 1, "-o", tmp_path / name))
        rows = [line.split() for line in (tmp_path / name).read_text().splitlines()]
        best.append([(row[0], row[3:]) for row in rows])
    assert best[0] == best[1]
    assert [name for name, _ in best[0]] == ["utt-0", "utt-1", "utt-2"]


def test_a_malformed_lattice_is_named_and_can_be_left_out(
    dlm_rescore: Rescore, files: ModelFiles, lattices: Path, tmp_path: Path
) -> None:
    """Without --skip the lattices before it are there, and --resume goes on behind them."""
    broken, out = lattices / "utt-1.slf", tmp_path / "out"
    broken.write_text(broken.read_text().replace("a=-", "a=nan-", 1))
    line = next(i for i, text in enumerate(broken.read_text().splitlines(), 1) if "nan" in text)
    command = [lattices, "--lm", files.directory, "-o", out]
    assert f"{broken}, line {line}: field a is" in refused(dlm_rescore(*command))
    assert [path.name for path in out.iterdir()] == ["utt-0.slf"]
    assert "--resume" in refused(dlm_rescore(*command))
    done = dlm_rescore(*command, "--resume", "--skip", "--json")
    summary = json.loads(succeeded(done).splitlines()[-1])["summary"]
    assert f"skipped: {broken}, line {line}" in done.stderr
    assert (summary["utterances"], summary["skipped"], summary["done_before"]) == (1, 1, 1)
    assert sorted(path.name for path in out.iterdir()) == ["utt-0.slf", "utt-2.slf"]


def test_partial_scores_are_counted_in_rows_and_told_in_files(
    dlm_rescore: Rescore, files: ModelFiles, lattices: Path, tmp_path: Path
) -> None:
    """One shard of the two is gone: nothing is lost, and nothing is taken for the model's own."""
    with Cluster(files) as cluster:
        toml = cluster.write(tmp_path / "cluster.toml")
        cluster.servers[1].end(at_once=True)
        done = dlm_rescore(lattices, "--lm", toml, *SCALES, "--json", "-o", tmp_path / "out")
        best = tmp_path / "best.jsonl"
        succeeded(dlm_rescore(lattices, "--lm", toml, *SCALES, "--nbest", 2, "-o", best))
    *rows, last = map(json.loads, succeeded(done).splitlines())
    assert len(rows) == 3
    flagged = [row["id"] for row in rows if row["bigram_fallback"]]
    assert last["summary"]["degraded"] == len(flagged) > 0
    for row in rows:
        text = (tmp_path / "out" / f"{row['id']}.slf").read_text()
        assert ("scores come from shorter n-grams" in text) == (row["id"] in flagged)
    lists = [json.loads(line) for line in best.read_text().splitlines()]
    assert [one["id"] for one in lists if "bigram_fallback" in one] == flagged


def test_a_cluster_that_is_down_is_an_error_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    """The server is named; no file is left, not even a hidden one; nothing of what was said."""
    (tmp_path / "cluster.toml").write_text('[[server]]\naddress = "127.0.0.1:1"\nshard = 0\n')
    (tmp_path / "in.jsonl").write_text('{"id": "a", "hyps": [{"words": "secret"}]}\n')
    done = run("rescore", "in.jsonl", "-o", "out.jsonl", cwd=tmp_path, status=1)
    assert b"127.0.0.1:1" in done.stderr
    assert b"secret" not in done.stderr + done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"cluster.toml", "in.jsonl"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["none.slf"], "IN: no such file or folder: none.slf"),
        (["in.txt"], "not an SLF lattice"),
        (["empty"], "empty: the file is empty"),
        (["in.txt", "--format", "fst"], "expected one of slf, kaldi, nbest"),
        (["in.txt", "--format", "slf", "--resume"], "--resume applies only if IN is a folder"),
        (["in.txt", "--jobs", "0"], "--jobs is 0"),
        (["in.txt", "--nbest", "0"], "--nbest is 0"),
        (["in.txt", "--beam", "0"], "--beam is 0.0"),
        (["in.txt", "--format", "slf", "--lm", "none"], "no such file or folder: none"),
        (["-"], "give --format"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    dlm_rescore: Rescore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    told: str,
) -> None:
    """In one line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("hello\n")
    (tmp_path / "empty").touch()
    assert told in refused(dlm_rescore(*arguments, "-o", "out"))
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "empty"}
