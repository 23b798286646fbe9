"""A model that is replaced, and a cluster that grows, during a load test: by the commands of `dlm`,
as an operator types them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlm.client.cluster_file import ClusterToml, replace_servers
from dlm.cluster.processes import Server, stop
from dlm.errors import DlmError
from dlm.index.layout import read_manifest
from dlm.server.child import command_of_child
from dlm.server.sets import read_sets, write_sets
from loadtest.run.local_cluster import LocalServers

SHARE, UNDO, ROLL_OUT = "share", "undo", "roll-out"
RESHARD, GROW, SHRINK = "reshard", "grow", "shrink"
# verb -> what a person is told
MOVES = {
    SHARE: "the servers load another model, which then gets half of the new utterances",
    UNDO: "it is taken back",
    ROLL_OUT: "it is rolled out to the end",
    RESHARD: "the shard set of one server more is made",
    GROW: "its servers are started, and it is rolled out",
    SHRINK: "the first shard set is rolled out again, and these servers are stopped",
}
# Short, so that a run of a minute and a half has all of it; decoders here do not pause.
RULES = ("--idle", "2", "--longest", "30")
SHARED = ("--share", "50%", "--watch-for", "10000000")
WHOLE = ("--share", "50%", "--watch-for", "5")
LOOK_S = 0.1
ENOUGH_S = 600.0


@dataclass(frozen=True, slots=True)
class Move:
    """One of `MOVES`."""

    verb: str

    def __str__(self) -> str:
        return self.verb


class Moves:
    """Carries moves out, one after the other; each returns when it has ended.

    Args  own    servers that follow a list
          new    folder of the shard set that is rolled out, or that `dlm reshard` makes
          ended  once it is set, what goes on is ended
    """

    def __init__(self, own: LocalServers, new: Path, ended: threading.Event) -> None:
        assert own.sets is not None
        self._own, self._new, self._sets, self._ended = own, new, own.sets, ended
        self._sharing: subprocess.Popen[str] | None = None
        self._more: list[Server] = []

    def do(self, move: Move) -> str:
        """Returns what was done; raises `DlmError` if a command failed, with what it printed."""
        begun = time.monotonic()
        {
            SHARE: self._share,
            UNDO: self._undo,
            ROLL_OUT: lambda: self._roll_out(self._new),
            RESHARD: self._reshard,
            GROW: self._grow,
            SHRINK: self._shrink,
        }[move.verb]()
        return f"{move}: {MOVES[move.verb]} (took {time.monotonic() - begun:.1f} s)"

    def close(self) -> None:
        self._end_sharing()
        stop([one.process for one in self._more])

    # ------------------------------------------------------------------ a roll-out

    def _share(self) -> None:
        self._sharing = self._begin("rollout", os.fspath(self._new), *SHARED, *RULES)
        until = time.monotonic() + ENOUGH_S
        while time.monotonic() < until and not self._ended.is_set():
            if (found := ClusterToml(self._own.cluster).rollout()) and found.share > 0:
                return
            if self._sharing.poll() is not None:
                self._check(self._sharing)
            time.sleep(LOOK_S)
        raise DlmError(f"the roll-out did not reach its share within {ENOUGH_S:g} s")

    def _undo(self) -> None:
        self._end_sharing()
        self._run("rollout", "--undo", *RULES)

    def _roll_out(self, folder: Path) -> None:
        self._run("rollout", os.fspath(folder), *WHOLE, *RULES)

    def _end_sharing(self) -> None:
        if self._sharing is not None:
            self._sharing.terminate()
            self._sharing.communicate()
            self._sharing = None

    # -------------------------------------------------------------- another number

    def _reshard(self) -> None:
        shards = str(read_manifest(self._own.folder).shards + 1)
        line = (os.fspath(self._own.folder), "--shards", shards, "--output", os.fspath(self._new))
        self._run("reshard", *line, "--quiet", cluster=False)

    def _grow(self) -> None:
        """As dlm/cluster/README.md says: the list first, then the new servers, then the clients."""
        own, added = self._own, read_manifest(self._own.folder).shards
        write_sets(self._sets, [*read_sets(self._sets), self._new])
        for number, _ in enumerate([one for one in own.servers if one.endpoint.shard == 0]):
            ready = own.cluster.with_name(f"server-{added}-{number}.json")
            self._more.append(own.servers[0].beside(added, ready))
        self._list([*own.servers, *self._more])
        self._roll_out(self._new)

    def _shrink(self) -> None:
        self._roll_out(self._own.folder)
        self._list(self._own.servers)
        stop([one.process for one in self._more])
        self._more = []

    def _list(self, servers: Sequence[Server]) -> None:
        replace_servers(self._own.cluster, lambda _: [one.endpoint for one in servers])

    # ------------------------------------------------------------------- commands

    def _begin(self, *words: str, cluster: bool = True) -> subprocess.Popen[str]:
        more = ("--cluster", os.fspath(self._own.cluster)) if cluster else ()
        return subprocess.Popen(
            command_of_child("dlm.cli.main", *words, *more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _run(self, *words: str, cluster: bool = True) -> None:
        process = self._begin(*words, cluster=cluster)
        try:
            self._check(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _check(self, process: subprocess.Popen[str]) -> None:
        until, said = time.monotonic() + ENOUGH_S, ""
        while process.returncode is None:
            if self._ended.is_set() or time.monotonic() > until:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, said = process.communicate(timeout=LOOK_S)
        if process.returncode != 0:
            raise DlmError(f"it ended with status {process.returncode}: {said.strip()[-500:]}")
