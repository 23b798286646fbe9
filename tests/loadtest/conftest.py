"""A small model, its servers, and a trace recorded from it, for all tests of the load tester."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import WAIT_S, Cluster, ModelFiles, build
from dlm.client import Client
from loadtest.paper.result import Setup
from loadtest.traces.recorder import Recorder
from loadtest.traces.rescoring import Confusions, Transcript, rescore
from loadtest.traces.trace import Trace, read_trace, write_trace
from models import random_model


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A random model of order 4 in two shards."""
    model = random_model(7, order=4, words=60, per_order=400)
    return build(model, tmp_path_factory.mktemp("served"), 2)


@pytest.fixture(scope="session")
def servers(files: ModelFiles) -> Iterator[Cluster]:
    """A server for each shard."""
    with Cluster(files) as running:
        yield running


@pytest.fixture(scope="session")
def trace_file(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four utterances of two speakers, rescored with 3 contexts and 4 words."""
    path = tmp_path_factory.mktemp("trace") / "trace.parquet"
    words = [word.encode() for word in files.words()[5:45]]
    with Client.local(files.directory) as client:
        recorder = Recorder(client)
        confusions = Confusions(client.vocabulary.words)
        for number in range(4):
            said = tuple(words[number * 10 : number * 10 + 6 + number])
            one = Transcript(f"u{number}", f"s{number % 2}", 1.0 + 0.25 * number, said)
            rescore(recorder, one, confusions, 3, 4)
        write_trace(path, recorder.utterances, {"model": client.manifest.model})
    return path


@pytest.fixture(scope="session")
def trace(trace_file: Path) -> Trace:
    """The same, read."""
    return read_trace(trace_file)


@pytest.fixture(scope="module")
def setup(files: ModelFiles, trace_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Of an evaluation that is as quick as can be, on one server and on two."""
    work = tmp_path_factory.mktemp("work")
    held_out = work / "held-out.txt"
    words = [word for word in files.words() if word.isalpha()][:20]
    held_out.write_text("\n".join(" ".join(words[at : at + 4]) for at in range(12)))
    arpa = files.directory.with_name("model.arpa")
    model = files.again(1).directory
    return Setup(model, arpa, trace_file, work, (1, 2), quick=True, held_out=held_out)


@pytest.fixture
def drawn(tmp_path: Path) -> Callable[[Path], str]:
    """Opens a page in Chromium, and gives what it made of it; nothing may be reported as an error
    there."""
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed")

    def draw(page: Path) -> str:
        done = subprocess.run(
            [
                *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
                *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'chromium'}"),
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0
        assert "CONSOLE" not in done.stderr
        assert "NaN" not in done.stdout
        return done.stdout

    return draw


@pytest.fixture(scope="session")
def results(servers: Cluster, trace_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run: two client processes, two rates."""
    pytest.importorskip("hdrh")
    from loadtest.report.session import measure, write_report
    from loadtest.run.driver import RunSettings
    from loadtest.run.worker import ClientSettings
    from loadtest.traces.schedule import Load, Segment

    folder = tmp_path_factory.mktemp("run")
    load = Load((Segment(2.0, 60), Segment(1.0, 80)), warmup_s=0.5)
    settings = RunSettings(
        servers.write(folder / "cluster.toml"),
        trace_file,
        load,
        ClientSettings(60.0, cache_dir=str(folder / "cache")),
        processes=2,
        window_s=0.5,
    )
    (folder / "results").mkdir()
    said: list[str] = []
    before = servers.beats()
    report = measure(settings, folder / "results", said.append)
    served = {
        name: sum(getattr(beat, name) for beat in servers.beats())
        - sum(getattr(beat, name) for beat in before)
        for name in ("messages", "queries")
    }
    (folder / "served.json").write_text(json.dumps(served))
    write_report(report, folder / "results")
    return folder / "results"
