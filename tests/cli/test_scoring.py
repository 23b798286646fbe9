"""Every command that takes text reads the same text, and `dlm score` answers it as it comes."""

from __future__ import annotations

import gzip
import io
import json
import os
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import forked
from cluster import WAIT_S, command
from dlm.cli.estimate import estimate
from dlm.cli.merge import merge
from dlm.cli.score import perplexity, score
from dlm.errors import TextError
from dlm.estimate.settings import EstimateOptions

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
Say = Callable[..., str]

LINES = [b"a b c d", b"", b"never a  seen\tb\r", b"\xff\xfe a", b"<unk> a", b"d a b"]
TEXT = b"\n".join(LINES) + b"\n"


@pytest.fixture
def said(folder: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """What `dlm score --local` or `dlm perplexity` prints of a file, the summary last."""

    def call(name: str, text: Path, **options: object) -> str:
        capsys.readouterr()  # of a call before, which was refused
        if name == "score":
            score(text, local=folder / "shards", **options)  # type: ignore[arg-type]
        else:
            perplexity([folder / "shards", text], quiet=True, **options)  # type: ignore[arg-type]
        printed = capsys.readouterr()
        summary = printed.err[printed.err.find("Perplexity including") :]
        return printed.out + summary * printed.err.count("Perplexity including")

    return call


def test_score_takes_an_arpa_file_as_perplexity_does(
    folder: Path, run: Run, tmp_path: Path
) -> None:
    """The scores are those of its shard set, and nothing is left behind."""
    (tmp_path / "model.arpa.gz").write_bytes(gzip.compress((folder / "model.arpa").read_bytes()))
    before = set(tmp_path.iterdir())
    done = run("score", "--local", "model.arpa.gz", cwd=tmp_path, text=TEXT, status=0)
    assert done.stdout == run("score", "--local", folder / "shards", text=TEXT).stdout
    assert len(done.stdout.splitlines()) == 1 + len(LINES)  # rows alone, for a pipe
    assert b"Perplexity including OOVs:" in done.stderr
    assert set(tmp_path.iterdir()) == before
    (tmp_path / "notes").write_text("no model\n")
    refused = run("score", "--local", "notes", cwd=tmp_path, text=TEXT, status=1)
    assert b"notes" in refused.stderr and b"data" in refused.stderr
    refused = run("score", "--local", "nowhere", cwd=tmp_path, text=TEXT)
    assert b"Make one with: dlm shard MODEL.arpa --shards N" in refused.stderr


def test_parquet_is_scored_row_by_row(said: Say, tmp_path: Path) -> None:
    """By the column that is named; a null is a fault, which --skip leaves out in its place."""
    rows = ["a b c d", None, "d a b", "a"]
    pq.write_table(pa.table({"said": rows, "id": [1, 2, 3, 4]}), tmp_path / "rows")
    (tmp_path / "plain").write_text("a b c d\nd a b\na\n")
    found = said("score", tmp_path / "rows", column="said", skip=True).splitlines()
    plain = said("score", tmp_path / "plain").splitlines()
    assert found[2] == "nan\t0\t0"
    assert found[-1] == "Skipped lines:\t1 (null row: 1)"
    assert [*found[:2], *found[3:-1]] == plain
    hits = said("perplexity", tmp_path / "rows", column="said", skip=True).splitlines()
    assert hits[:6] == found[-6:]


@pytest.mark.promise("faulty_lines")
@pytest.mark.parametrize("form", [{}, {"words": True}, {"as_json": True}])
def test_a_line_left_out_has_a_row_in_its_place(
    form: dict[str, bool], said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row N answers line N, wherever blocks end; the summary counts what was left out."""
    lines = [b"\0", b"a b", b"caf\xe9", b"\0 a", b"d a b", b"x" * (1 << 20) + b"y", b"a", b"\xff"]
    kinds = ["NUL", None, "not UTF-8", "NUL", None, "line too long", None, "not UTF-8"]
    (tmp_path / "faulty").write_bytes(b"\n".join(lines))
    clean = [line for line, kind in zip(lines, kinds, strict=True) if kind is None]
    (tmp_path / "clean").write_bytes(b"\n".join(clean))
    answers = answers_of(said("score", tmp_path / "clean", **form), form)
    for block_bytes in (64, 1 << 20):
        monkeypatch.setattr("dlm.cli.score.BLOCK_BYTES", block_bytes)
        text = said("score", tmp_path / "faulty", skip=True, **form)
        found = answers_of(text, form)
        assert len(found) == len(lines)
        good = iter(answers)
        for answer, kind in zip(found, kinds, strict=True):
            if kind is None:
                assert answer == next(good)
            elif "as_json" in form:
                assert json.loads(answer) == {
                    "log10_prob": None, "tokens": 0, "oovs": 0, "skipped": kind,
                }  # fmt: skip
            else:
                assert answer.removeprefix("= ") == "nan\t0\t0"
        if "as_json" in form:
            summary = json.loads(text.splitlines()[-1])["summary"]
            assert summary["sentences"] == 3
            assert summary["skipped"] == {"NUL": 2, "not UTF-8": 2, "line too long": 1}
        else:
            assert "Sentences:\t3\nSkipped lines:\t5 (" in text


def answers_of(text: str, form: dict[str, bool]) -> list[str]:
    """What stands for each line, without the head and the summary."""
    if "as_json" in form:
        return text.splitlines()[:-1]
    body, _, _ = text.partition("Perplexity including")
    if "words" in form:
        return [part.removesuffix("\n") for part in body.split("\n\n") if part]
    return body.splitlines()[1:]


NO_TEXT = {
    "gzip cut short": (gzip.compress(TEXT * 1000)[:-9], "gzip stream is cut short or damaged"),
    "gzip in gzip": (gzip.compress(gzip.compress(TEXT)), "compressed twice"),
    "lz4": (b"\x04\x22\x4d\x18rest", "compressed with lz4, which dlm does not read"),
    "UTF-16": ("a b\n".encode("utf-16"), "NUL byte"),
    "binary": (b"a b\n\x7fELF\0\0\n", r"line 2 .* NUL byte"),
    "ARPA": (b"# made of\n\n\\data\\\nngram 1=4\n", "is an ARPA model; expected text"),
    "parquet cut short": (b"PAR1 and nothing else", "cannot be read as one"),
}


@pytest.mark.parametrize("kind", NO_TEXT)
def test_what_is_no_text_is_refused_by_every_command(
    kind: str, said: Say, folder: Path, tmp_path: Path
) -> None:
    """With the name of the file; nothing is scored as far as it goes and called the whole."""
    content, message = NO_TEXT[kind]
    text = tmp_path / "text"
    text.write_bytes(content)
    model, out = folder / "model.arpa", tmp_path / "out.arpa"
    small = EstimateOptions(discount_fallback=True)
    for take in (
        lambda: said("score", text),
        lambda: said("perplexity", text),
        lambda: estimate(str(out), small, [str(text)], quiet=True),
        lambda: merge([model, model], output=out, tune=text, quiet=True),
    ):
        with pytest.raises(TextError, match=f"(?s){text}.*{message}"):
            take()
    assert not out.exists()


def test_lines_before_a_faulty_one_are_answered(run: Run, folder: Path, tmp_path: Path) -> None:
    """Those of the blocks before it; then the error says where."""
    (tmp_path / "text").write_bytes(b"a b c d\n" * 300_000 + b"\0\n")
    done = run("score", "--local", folder / "shards", tmp_path / "text", status=1)
    assert len(done.stdout.splitlines()) > 200_000
    assert b"line 300,001" in done.stderr


def test_merge_tunes_on_parquet_and_skips(folder: Path, tmp_path: Path) -> None:
    """The weights are those of the plain lines."""
    pq.write_table(pa.table({"said": ["a b c d", None, "d a b"]}), tmp_path / "rows")
    (tmp_path / "plain").write_text("a b c d\nd a b\n")
    models = [folder / "model.arpa", folder / "model.arpa"]
    tuned = []
    for name, options in (("rows", {"column": "said", "skip": True}), ("plain", {})):
        out = tmp_path / f"{name}.arpa"
        merge(models, output=out, tune=tmp_path / name, quiet=True, **options)  # type: ignore[arg-type]
        head = out.read_text().splitlines()[0]
        tuned.append(json.loads(head.removeprefix("# provenance: ")))
    assert tuned[0]["weights"] == tuned[1]["weights"]
    assert tuned[0]["tuned"]["tokens"] == tuned[1]["tuned"]["tokens"] == 9


@pytest.mark.parametrize("place", ["--local", "--cluster"])
def test_a_line_from_a_pipe_is_answered_before_the_next_is_there(
    place: str, cluster: Path, folder: Path, environ: dict[str, str]
) -> None:
    """As a program does that writes a line and waits for its score."""
    where = folder / "shards" if place == "--local" else cluster
    process = forked.Popen(
        command("score", place, where, "--json"),
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for text in (b"a\n", b"a b c d\nd a b\n", b"half", b" a line\n"):
            process.stdin.write(text)
            for _ in range(text.count(b"\n")):
                assert json.loads(line_of(process.stdout))["log10_prob"] < 0
    finally:
        process.stdin.close()
        rest = process.stdout.read()
        process.stdout.close()
        assert process.wait(WAIT_S) == 0
    assert json.loads(rest)["summary"]["sentences"] == 4


def line_of(pipe: io.RawIOBase | object) -> bytes:
    """The next line of a pipe, which must come within the bound."""
    number = pipe.fileno()  # type: ignore[attr-defined]
    limit = time.monotonic() + WAIT_S
    line = b""
    while not line.endswith(b"\n"):
        left = limit - time.monotonic()
        assert left > 0, "no answer"
        assert select.select([number], [], [], left)[0], "no answer"
        byte = os.read(number, 1)
        assert byte, "the command ended"
        line += byte
    return line
