"""What a command reads and writes is looked for before it works for hours."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from cli.conftest import MODEL, OTHER, Run
from dlm.cli import main

NOISE = "--lambda 100 --rounds 4 --report-goal 5"
TEXT = "a b c\nb c a\n" * 40
JAX = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="pip install -e '.[train]'"
)

SLOW = "scipy.linalg.cython_blas"


@pytest.fixture
def home(tmp_path: Path, folder: Path) -> Path:
    """A folder with a file of every kind, small."""
    MODEL.write(tmp_path / "model.arpa")
    OTHER.write(tmp_path / "other.arpa")
    (tmp_path / "shards").symlink_to(folder / "shards")
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "words").write_text("a\nb\nc\n")
    (tmp_path / "counts.tsv").write_text("a\t5\nb\t4\n")
    (tmp_path / "users.tsv").write_text("user_id\tutterance\nu1\ta b\nu2\tb c\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/kept").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("estimate none --output out", "none"),
        ("estimate folder --output out", "folder"),
        ("estimate text --vocab none --output out", "none"),
        ("estimate text --output words/out", "words"),
        ("estimate text --output folder", "folder"),
        ("estimate text --output out --tmp words", "words"),
        ("prune none --threshold 0.1 --output out", "none"),
        ("prune model.arpa --threshold 0.1 --output words/out", "words"),
        ("prune model.arpa --threshold 0.1 --output out.bz2", "out.bz2"),
        ("distill model.arpa --topology other.arpa --output out.zip", "out.zip"),
        ("prune model.arpa --threshold 0.1 --history-lm none --output out", "none"),
        ("prune model.arpa --threshold 0.1 --output out --tmp words", "words"),
        ("shard none --estimate", "none"),
        ("reduce none --order 1 --output out", "none"),
        ("reduce model.arpa --order 1 --output words/out", "words"),
        ("merge model.arpa none --weights 0.5,0.5 --output out", "none"),
        ("merge model.arpa other.arpa --tune none --output out", "none"),
        ("merge model.arpa other.arpa --weights 0.5,0.5 --output words/out", "words"),
        ("filter model.arpa --vocab words --output -", "standard output"),
        ("shard model.arpa --shards 2 --output -", "standard output"),
        ("filter none --vocab words --output out", "none"),
        ("filter model.arpa --vocab none --output out", "none"),
        ("filter model.arpa --vocab words --output words/out", "words"),
        ("filter model.arpa --vocab words --output out --tmp words", "words"),
        ("perplexity none text", "none"),
        ("perplexity model.arpa none", "none"),
        ("perplexity model.arpa text --tmp words", "words"),
        ("perplexity --cluster none text", "none"),
        ("shard none --shards 2 --output out", "none"), ("info https://h/en", "store"),
        ("shard hf://o/n/x.arpa --shards 2 --output out", "store"),
        ("shard model.arpa --shards 2 --output words/out", "words"),
        ("shard model.arpa --shards 2 --output folder", "folder"),
        ("shard model.arpa --shards 2 --output out --tmp words/in", "words"),
        ("verify shards --arpa none", "none"),
        ("info none", "none"), ("export none --output out", "none"),
        ("export shards --output words/out", "words"),
        ("export shards --output folder", "folder"),
        ("serve none --shard 0", "none"), ("serve shards --shard 0 --config none", "none"),
        ("serve shards --shard 0 --ready-file words/ready", "words"),
        ("cluster none", "none"),
        ("cluster shards --cluster words/cluster.toml", "words"),
        ("cluster shards --local-fallback none", "none"),
        ("cluster shards --tokens none", "none"),
        ("cluster shards --tls-cert none --tls-key words", "none"),
        ("cluster shards --token-file none", "none"),
        ("status --cluster none", "none"), ("score none --local shards", "none"),
        ("score text --local none", "none"),
        ("score text --cluster none", "none"),
        ("token me --tokens words/tokens --token-file token", "words"),
        ("token me --tokens tokens --token-file words/token", "words"),
        (f"unigrams none --wordlist words {NOISE} --output out.tsv", "none"),
        (f"unigrams users.tsv --wordlist none {NOISE} --output out.tsv", "none"),
        (f"unigrams users.tsv --wordlist words {NOISE} --output words/out.tsv", "words"),
        (f"unigrams users.tsv --wordlist words {NOISE} --output folder", "folder"),
        pytest.param("pieces none --public-attested-by X --size 40 --output out.model", "none",
            marks=JAX),
        pytest.param("pieces counts.tsv --size 9 --output words/o.model", "words", marks=JAX),
        pytest.param("federate users.tsv --config none --output out", "none", marks=JAX),
        pytest.param("federate none --config run.toml --output out", "none", marks=JAX),
        pytest.param("federate users.tsv --config run.toml --output words/o", "words", marks=JAX),
        pytest.param("federate users.tsv --config vocabulary.toml --output o", "none", marks=JAX),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named_before_any_work(
    home: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: str,
    named: str,
) -> None:
    """In one line that names it, before any stage is told; and nothing new lies there."""
    for name, vocabulary in (("run", "words"), ("vocabulary", "none")):
        settings = (
            "[run]\nrounds = 1\nseed = 1\n[privacy]\nclip_norm = 1.0\nnoise_multiplier = 1.0\n"
            f'[data]\nvocabulary = "{vocabulary}"\n'
        )
        (home / f"{name}.toml").write_text(settings)
    before = sorted(home.rglob("*"))
    if arguments.startswith(("serve", "cluster")):  # these take signals and the log for themselves
        done = run(*arguments.split(), cwd=home)
        status, said = done.returncode, done.stderr.decode()
    else:
        monkeypatch.chdir(home)
        monkeypatch.setattr(sys, "argv", ["dlm", *arguments.split()])
        monkeypatch.setattr(main.end_signals, "install", lambda: None)
        with pytest.raises(SystemExit) as ended:
            main.main()
        # What dlm score does for the life of its process (quick_start) is not for this one.
        if sys.modules.get(SLOW, SLOW) is None:
            del sys.modules[SLOW]
        status, said = ended.value.code, capfd.readouterr().err
    # What a command says of its work is not of interest.
    lines = [line for line in said.splitlines() if not line.startswith(("     ", "importing"))]
    assert status == 1, said
    assert len(lines) == 1, said
    assert lines[0].startswith("dlm: "), said
    assert re.search(rf"\b{re.escape(named)}\b", lines[0]), said
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        "estimate text --order 2 --discount-fallback --tmp new/tmp --output new/deep/out",
        "prune model.arpa --threshold 1 --output new/deep/out",
        "reduce model.arpa --order 1 --output new/deep/out",
        "merge model.arpa other.arpa --weights 0.5,0.5 --output new/deep/out",
        "filter model.arpa --vocab words --output new/deep/out",
        "export shards --output new/deep/out",
        "shard model.arpa --shards 1 --tmp new/tmp --output new/deep/out",
        "token me --tokens new/deep/out --token-file new/token",
        pytest.param("pieces counts.tsv --size 8 --output new/deep/out.model", marks=JAX),
    ],
)
def test_missing_folders_are_created_whatever_the_command(
    home: Path, run: Run, arguments: str
) -> None:
    """With their parents, for files as for folders."""
    run(*arguments.split(), cwd=home, status=0)
    assert list((home / "new/deep").iterdir())


def test_a_refused_command_removes_the_folders_that_it_created(home: Path, run: Run) -> None:
    """Only those: what stood there stays, empty or not."""
    (home / "empty").mkdir()
    (home / "damaged.arpa").write_text("\\data\\\nngram 1=2\n\n\\1-grams:\n-1\ta\n")
    done = run("reduce", "damaged.arpa", "--order", 1, "--output", "empty/new/deep/out", cwd=home)
    assert done.returncode == 1
    assert b"damaged.arpa" in done.stderr
    assert list((home / "empty").iterdir()) == []
