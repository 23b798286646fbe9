"""The runbook's rolls, command by command as the page has them, while clients go on asking.

What a host is here: a folder for its /etc/dlm and /srv/dlm, and the processes that its units would
start, `dlm serve` with the settings of the unit's files. `systemctl` is played; everything else is
run as it stands on the page, with the folders in place of the paths.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import ROOT, WAIT_S, CommandServer, command, free_ports, until
from deploy.documents import texts
from dlm.client import Client, ClientConfig
from dlm.index.layout import read_manifest
from dlm.ngram.backoff import DictModel
from faults.load import Load
from models import random_model

LOOP = re.compile(r"# on each (new host|host|client's host)(, one after the other)?$")
pytestmark = pytest.mark.slow


class Machine:
    """A host with a unit per shard; all follow the list /etc/dlm/sets.

    Args
        folder  for its files; `etc` and `srv` stand for /etc/dlm and /srv/dlm
        serves  the name in /srv/dlm that its list has
    """

    def __init__(self, folder: Path, shards: int, serves: str) -> None:
        self.folder = folder
        self.ports = free_ports(shards)
        self.running: dict[int, CommandServer] = {}
        for name in ("etc", "srv"):
            (folder / name).mkdir(parents=True)
        (folder / "etc/sets").write_text(f"{folder}/srv/{serves}\n")
        (folder / "etc/dlm.env").write_text(f"DLM_SERVER_SETS={folder}/etc/sets\n")
        for shard, port in enumerate(self.ports):
            (folder / f"etc/{shard}.env").write_text(f"DLM_SERVER_PORT={port}\n")

    def local(self, line: str) -> str:
        """A command of the page, with this host's folders."""
        return line.replace("/etc/dlm", f"{self.folder}/etc").replace(
            "/srv/dlm", f"{self.folder}/srv"
        )

    def environment(self, shard: int) -> dict[str, str]:
        """What systemd gives to the unit of a shard."""
        lines = []
        for name in ("dlm.env", f"{shard}.env"):
            lines += (self.folder / "etc" / name).read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def start(self, shard: int) -> None:
        """As ExecStart."""
        self.running[shard] = CommandServer(
            *("serve", "--shard", shard, "--log-level", "warning"),
            cwd=self.folder,
            env={**os.environ, **self.environment(shard), "PYTHONPATH": str(ROOT)},
        )

    def stop(self) -> None:
        """SIGTERM, and the end of all units: status 0, since nothing may be cut off."""
        for server in self.running.values():
            server.process.terminate()
        for server in self.running.values():
            assert server.wait() == 0, server.errors
        self.kill()

    def systemctl(self, verb: str, units: list[str]) -> None:
        """restart of all; disable --now and enable --now of those that are named, since systemd
        takes patterns only for units that run."""
        if verb == "restart":
            assert units == ["dlm-shard@*"], units
            shards = list(self.running)
            self.stop()
        else:
            shards = [int(re.fullmatch(r"dlm-shard@(\d+)\.service", u)[1]) for u in units]  # type: ignore[index]
        if verb == "disable":
            assert shards == list(self.running)
            self.stop()
            return
        assert verb in ("restart", "enable")
        for shard in shards:
            self.start(shard)

    def kill(self) -> None:
        """Whatever the test left."""
        for server in self.running.values():
            server.end()
        self.running.clear()


class Operator:
    """Works through a section of the runbook.

    names    what stands on the page, and what it is here
    rollout  `dlm rollout`, which the page leaves running
    """

    def __init__(self, folder: Path, machines: list[Machine]) -> None:
        self.folder = folder
        self.machines = machines
        self.new: list[Machine] = []
        self.names: dict[str, str] = {}
        self.rollout: subprocess.Popen[bytes] | None = None

    def follow(self, heading: str, after: dict[str, Callable[[], None]]) -> None:
        """Each block of a section in turn; after a block that holds a text, what `after` says."""
        page = texts()["runbook.md"]
        section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^##? [A-Z])", page, re.M | re.S)
        assert section, heading
        waiting = dict(after)
        for block in re.findall(r"^ *```console\n(.*?)```", section[1], re.M | re.S):
            lines = [line.strip() for line in block.strip().split("\n")]
            where = LOOP.match(lines[0])
            hosts: list[Machine | None] = [None]
            if where and where[1] != "client's host":
                hosts = list(self.new if where[1] == "new host" else self.machines)
            for host in hosts:
                for line in lines:
                    if line.startswith("$ "):
                        self.run(line[2:], host)
            for text in [text for text in waiting if text in block]:
                waiting.pop(text)()
        assert not waiting, f"{heading} has no block with {', '.join(waiting)}"

    def run(self, line: str, host: Machine | None) -> None:
        """One command line, on a host or on the operator's own machine."""
        for said, meant in self.names.items():
            line = re.sub(rf"\b{re.escape(said)}\b", meant, line)
        line = line if host is None else host.local(line)
        words = shlex.split(line)
        if words[0] == "systemctl":
            assert host is not None, line
            host.systemctl(words[1], [word for word in words[2:] if not word.startswith("--")])
            return
        if words[:2] == ["dlm", "rollout"]:
            also = ("--watch-for", "1", "--idle", "2", "--other-words")
            self.rollout = subprocess.Popen(command(*words[1:], *also), cwd=self.folder)
            return
        if words[0] == "dlm":
            line = shlex.join(command(*words[1:]))
        shown = subprocess.run(
            line,
            shell=True,
            cwd=self.folder,
            capture_output=True,
            timeout=WAIT_S,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert shown.returncode == 0, f"{line}: {shown.stdout!r} {shown.stderr!r}"


def write_list(path: Path, machines: list[Machine]) -> None:
    """A cluster.toml of these hosts' servers."""
    servers = [(port, shard) for m in machines for shard, port in enumerate(m.ports)]
    path.write_text(
        "".join(f'[[server]]\naddress = "127.0.0.1:{p}"\nshard = {s}\n' for p, s in servers)
    )


@pytest.fixture
def rolled(tmp_path: Path) -> Iterator[tuple[Operator, dict[str, DictModel]]]:
    """Two hosts with two shards each of a first model, and the ARPA file of a second; the oracle of
    each, by its file's name."""
    oracles = {}
    for seed, name in ((31, "model"), (32, "new")):
        arpa = random_model(seed, order=4, words=50, per_order=300).write(tmp_path / f"{name}.arpa")
        oracles[name] = DictModel.from_arpa(arpa)
    (tmp_path / "text.txt").write_text("a b c\n")
    machines = [Machine(tmp_path / f"host-{letter}", 2, "current") for letter in "ab"]
    operator = Operator(tmp_path, machines)
    operator.names = {
        "model.arpa.zst": "model.arpa",
        "new.arpa.zst": "new.arpa",
        "OLD": "current",
    }
    try:
        operator.run("dlm shard model.arpa --shards 2 --output shards/model", None)
        for machine in machines:
            operator.run("cp --recursive shards/model /srv/dlm/current", machine)
            for shard in range(2):
                machine.start(shard)
        write_list(tmp_path / "cluster.toml", machines)
        operator.run("dlm status --cluster cluster.toml --wait 300", None)
        yield operator, oracles
    finally:
        if operator.rollout is not None:
            operator.rollout.kill()
            operator.rollout.wait()
        for machine in [*machines, *operator.new]:
            machine.kill()


@pytest.mark.promise("rolls")
def test_the_runbooks_rolls_lose_no_call(rolled, tmp_path: Path) -> None:
    """Every server started anew, a new model, another number of shards: eight callers go on
    asking, no call fails, and every score is its model's."""
    operator, oracles = rolled
    sets = {name: read_manifest(tmp_path / "shards" / name) for name in ("model",)}
    config = ClientConfig(deadline_s=30.0, cache_dir=tmp_path / "low-orders")
    by_model = {sets["model"].model: oracles["model"]}

    def new_is_there() -> None:
        sets["new"] = read_manifest(tmp_path / "shards/new")
        operator.names["NEW"] = sets["new"].model[:12]
        load.knows(sets["new"].model, oracles["new"])

    def is_idle(shard_set: str) -> bool:
        """What `queries/s` of its rows says."""
        line = command("status", "--cluster", "cluster.toml", "--json")
        shown = subprocess.run(line, cwd=tmp_path, capture_output=True, timeout=WAIT_S, check=True)
        rows = [
            r for r in json.loads(shown.stdout)["servers"] if shard_set.startswith(r["shard_set"])
        ]
        return bool(rows) and not any(row["queries_per_s"] for row in rows)

    def everybody_is_on_new() -> None:
        old, new = sets["model"].shard_set, sets["new"].shard_set
        until(lambda: load.answered[new] >= 30 and is_idle(old), operator.rollout)

    def old_is_gone() -> None:
        assert operator.rollout is not None
        assert operator.rollout.wait(WAIT_S) == 0

    def new_hosts() -> None:
        sets["model-3"] = read_manifest(tmp_path / "shards/model-3")
        machine = Machine(tmp_path / "host-c", 3, "model-3")
        operator.new.append(machine)
        operator.run("cp --recursive shards/model-3 /srv/dlm/model-3", machine)
        write_list(tmp_path / "cluster-3.toml", operator.new)

    with Client.connect(tmp_path / "cluster.toml", config) as client:
        with Load(client, by_model).running() as load:
            load.goes_on()
            operator.follow("Restart every server", {})
            load.goes_on()
            operator.follow(
                "Roll a new model",
                {
                    "dlm shard": new_is_there,
                    "OLD /srv/dlm/NEW": everybody_is_on_new,
                    "' /srv/dlm/NEW": old_is_gone,
                },
            )
            load.goes_on(shard_set=sets["new"].shard_set)
            # The model that is served by now.
            operator.names["shards/model --shards"] = "shards/new --shards"
            operator.follow(
                "Change the number of shards",
                {
                    "dlm reshard": new_hosts,
                    "mv cluster-3.toml": lambda: load.goes_on(shard_set=sets["model-3"].shard_set),
                },
            )
            load.goes_on(shard_set=sets["model-3"].shard_set)
        assert set(load.answered) == {manifest.shard_set for manifest in sets.values()}
        assert sets["model-3"].model == sets["new"].model != sets["model"].model
