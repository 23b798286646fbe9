"""The first start of an installation compiles once, on all processors, and says so."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from cli.conftest import Run
from cluster import WAIT_S, command
from dlm.cli.output import compile_kernels
from dlm.index.making import build_shard_set
from dlm.server.compiling import KERNELS
from models import random_model


def test_what_dlm_compile_compiled_is_not_compiled_again(run: Run) -> None:
    """Of one command, or of several, each of which it names."""
    for words in (("score",), ("serve", "shard")):
        facts = [json.loads(run("compile", *words, "--json").stdout) for _ in range(2)]
        assert facts[0]["kernels"] == facts[1]["kernels"] > 10
        assert facts[1]["compiled"] == 0
        assert tuple(facts[1]["commands"]) == words


@pytest.mark.slow
def test_a_first_start_says_that_it_compiles_and_a_second_does_not(tmp_path: Path) -> None:
    """Every kernel that takes long is compiled ahead: a demo then compiles only small ones."""
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}

    def run() -> str:
        done = subprocess.run(
            command("demo"), env=environ, capture_output=True, text=True, check=True, timeout=WAIT_S
        )
        assert "bit for bit" in done.stdout
        return done.stderr

    said = re.findall(r"compiling kernels \(first run only\): (\d+) of (\d+)", run())
    (ahead,) = {int(of) for _, of in said}  # when it is due, and every few seconds
    assert all(int(done) <= ahead for done, _ in said)
    assert ahead > 20
    folder = tmp_path / "kernels"
    script = (
        "from dlm.client.table import KERNELS as asking; "
        "from dlm.ngram.arpa.rows import KERNELS as r; "
        "from dlm.server.compiling import KERNELS as s; "
        "print(*{f'{k.py_func.__module__}.{k.py_func.__name__}' for k in (*asking, *r, *s)})"
    )
    done = subprocess.run(
        [*command()[:1], "-c", script], capture_output=True, text=True, check=True
    )
    listed = set(done.stdout.split())
    assert len(listed) == ahead
    kept = [file for file in folder.rglob("dlm.*-*") if file.is_file()]
    # One file each: no second kind of arguments was compiled. What kernels take in is no more than
    # a tenth of what compiling costs, and it is all that may be beside them.
    names = [file.name.rsplit("-", 1)[0] for file in kept]
    assert listed <= set(names)
    assert [name for name in names if name in listed and names.count(name) > 1] == []
    assert "compiling" not in run()
    again = [file for file in folder.rglob("dlm.*-*") if file.is_file()]
    assert sorted(again) == sorted(kept)


@pytest.mark.slow
def test_a_server_says_in_its_log_that_it_compiles(tmp_path: Path) -> None:
    """With the number of kernels; SIGTERM meanwhile ends it at once, and its helpers."""
    path = random_model(4, per_order=50).write(tmp_path / "m.arpa")
    build_shard_set(path, tmp_path / "set", 1)
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    with subprocess.Popen(
        command("serve", tmp_path / "set", "--shard", 0, "--host", "127.0.0.1", "--port", 0),
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        server.send_signal(signal.SIGTERM)  # first: what fails below must not wait for its end
        assert '"event": "server.compiling", ' in line
        assert f'"kernels": {len(KERNELS)}' in line
        assert server.wait(WAIT_S) in (-signal.SIGTERM, 128 + signal.SIGTERM)
        server.stderr.read()  # until its helpers have closed it, too
    shutil.rmtree(tmp_path / "kernels")


def test_progress_is_silent_where_all_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """No kernel is missing."""
    compile_kernels(())
    assert capsys.readouterr().err == ""
