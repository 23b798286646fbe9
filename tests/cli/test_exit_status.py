"""The exit statuses of dlm/cli/README.md, one command for each row; and colour."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import forked
from cluster import WAIT_S, command

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
PAGE = Path(__file__).resolve().parents[2] / "dlm/cli/README.md"


def documented() -> set[int]:
    """The statuses in the page's table."""
    table = PAGE.read_text().split("## Exit statuses")[1].split("\n\n")[1]
    rows = re.findall(r"^\| ([\d, ]+) \|", table, re.M)
    return {int(number) for row in rows for number in row.split(",")}


def test_the_page_has_every_status_that_is_tested() -> None:
    """0 to 3 here and in test_records.py; those of signals in test_ended.py."""
    assert documented() == {0, 1, 2, 3, 128 + 1, 128 + 2, 128 + 15}


@pytest.mark.promise("exit_statuses")
@pytest.mark.parametrize(
    ("arguments", "status", "stream", "says"),
    [
        (["info", "shards"], 0, "stdout", b"shard set"),
        (["verify", "shards"], 0, "stdout", b"valid"),
        (["verify", "damaged"], 1, "stdout", b"1 violation"),
        (["info", "absent"], 1, "stderr", b"dlm: "),
        (["score", "--local", "shards", "--threads", "0"], 1, "stderr", b"--threads is 0"),
        (["scroe"], 2, "stderr", b"Did you mean 'score'"),
        (["score", "--locl", "shards"], 2, "stderr", b"No such option"),
        (["shard"], 2, "stderr", b"Missing argument 'MODEL'"),
        (["shard", "model.arpa", "--shards", "two"], 2, "stderr", b"two"),
        (["privacy"], 0, "stdout", b"Usage"),
    ],
)
def test_each_kind_of_end_has_its_status(
    run: Run, folder: Path, arguments: list[str], status: int, stream: str, says: bytes
) -> None:
    """And what is said of it goes to its stream; the other has none of it."""
    damaged = folder / "damaged"
    if not damaged.exists():
        damaged.mkdir()
        for path in (folder / "shards").iterdir():
            data = bytearray(path.read_bytes())
            if path.name == "shard-0001.arrow":
                data[len(data) // 2] ^= 1
            (damaged / path.name).write_bytes(data)
    done = run(*arguments, cwd=folder)
    assert done.returncode == status, done
    assert says in getattr(done, stream), done
    assert says not in getattr(done, "stderr" if stream == "stdout" else "stdout")


def on_terminal(arguments: list[object], folder: Path, environ: dict[str, str]) -> bytes:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    with forked.Popen(
        command(*arguments), cwd=folder, env=environ, stdout=theirs, stderr=subprocess.DEVNULL
    ) as process:
        os.close(theirs)
        out = bytearray()
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            out += piece
        process.wait(WAIT_S)
    os.close(ours)
    return bytes(out)


@pytest.mark.promise("json")
def test_no_color_means_no_colour(cluster: Path, environ: dict[str, str]) -> None:
    """On a terminal that has colours, as without the variable; in a pipe there are none."""
    arguments: list[object] = ["status", "--cluster", cluster, "--interval", 0.05]
    terminal = {**environ, "TERM": "xterm-256color"}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        terminal.pop(name, None)
    colour = re.compile(rb"\x1b\[[0-9;]*3[0-7]m")
    assert colour.search(on_terminal(arguments, cluster.parent, terminal))
    plain = on_terminal(arguments, cluster.parent, {**terminal, "NO_COLOR": "1"})
    assert b" ready " in plain and not colour.search(plain)
    piped = forked.run(
        command(*arguments), cwd=cluster.parent, env=terminal, capture_output=True, timeout=WAIT_S
    )
    assert b"\x1b" not in piped.stdout
