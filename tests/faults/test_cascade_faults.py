"""Eight decoders at work while servers and the way to them fail in every way we could think of.

Servers are processes of their own, behind a proxy that breaks the network. Whatever happens: no
error reaches a decoder, each score is the oracle's of the model that it names, no utterance mixes
families, calls end in time, and full service comes back by itself. Run with -s for the figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from client.scripted import Clients
from cluster import Cluster, ModelFiles, ProcessServer, build
from dlm.client import Client
from dlm.client.config import FailoverConfig, HeartbeatConfig
from dlm.client.health import Mode
from dlm.ngram.query import LOCAL_FALLBACK
from faults.decoders import Decoders
from loadtest.run.chaos import Command, random_faults
from loadtest.run.proxy import Proxies
from models import random_model

# As in operation, but quicker; nothing depends on their being so.
HEARTBEATS = HeartbeatConfig(interval_s=0.05, timeout_s=0.5, slow_floor_s=10.0)
FAILOVER = FailoverConfig(wait_s=0.1, max_wait_s=0.5, probe_s=0.05, stable_s=0.0)
DEADLINE_S = 1.0
# A call ends by its deadline (on a moved clock: tests/client/test_replicas.py). This is what a
# machine may need to run a thread when it is busy with much else; what it did need is printed.
GRACE_S = 0.5
NOISE_S = 20.0
MINUTES = float(os.environ.get("DLM_CHAOS_MINUTES", "0.1"))
SEED = int(os.environ.get("DLM_CHAOS_SEED", "6"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """The full model, in two shards."""
    model = random_model(23, order=4, words=50, per_order=400)
    return build(model, tmp_path_factory.mktemp("full"), 2)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """The small one, with other words and ids."""
    model = random_model(24, order=3, words=40, per_order=100)
    return build(model, tmp_path_factory.mktemp("local_fallback"), 1)


class World:
    """Servers, the proxies before them, and clients of these.

    Args  replicas  of each shard
    """

    def __init__(self, files: ModelFiles, cache_dir: Path, replicas: int = 1) -> None:
        self.files = files
        clusters = [Cluster(files, kind=ProcessServer) for _ in range(replicas)]
        self.servers: list[ProcessServer] = [s for c in clusters for s in c.servers]
        self.proxies = Proxies([server.address for server in self.servers], SEED)
        self.clients = Clients(cache_dir)

    def shard(self, at: int) -> int:
        """Which shard a server holds."""
        return at % self.files.manifest.shards

    def connect(self, small: ModelFiles, replicas: int = 1, **config: object) -> Client:
        """A client with all fallbacks, of so many servers a shard, by way of their proxies."""
        settings = {
            "heartbeat_config": HEARTBEATS,
            "failover_config": FAILOVER,
            "local_fallback": small.directory,
            **config,
        }
        addresses = self.proxies.addresses[: replicas * self.files.manifest.shards]
        return self.clients(addresses, **settings)

    def start(self, at: int) -> ProcessServer:
        """A server in place of one that is gone, at its port; `ready` waits for it."""
        self.servers[at].end()
        self.servers[at] = ProcessServer(
            self.files.directory, self.shard(at), self.servers[at].port
        )
        return self.servers[at]

    def heal(self) -> None:
        """Every server there, of the right model, every way well."""
        for at, server in enumerate(self.servers):
            self.proxies.redirect(at, server.address)
            self.proxies.heal(at)
            if server.process.poll() is None:
                server.resume()
        for started in [self.start(at) for at in range(len(self.servers)) if self._gone(at)]:
            started.ready()

    def _gone(self, at: int) -> bool:
        return self.servers[at].process.poll() is not None

    def end(self) -> None:
        """Ends all."""
        self.clients.close()
        self.proxies.close()
        for server in self.servers:
            server.end()


@pytest.fixture(scope="module")
def servers(files: ModelFiles, cache_dir: Path) -> Iterator[World]:
    """Two servers of each shard."""
    world = World(files, cache_dir, replicas=2)
    yield world
    world.end()


@pytest.fixture
def world(servers: World) -> Iterator[World]:
    """All of them well; and all well again afterwards."""
    yield servers
    servers.heal()
    servers.clients.close()


@contextmanager
def decoding(
    client: Client, models: list[ModelFiles], what: str, **more: object
) -> Iterator[Decoders]:
    """Decoders that are well before, and at the end are well again by themselves.

    The body breaks things and mends them. What it cost is printed.
    """
    with Decoders(client, models, **{"deadline_s": DEADLINE_S, **more}) as decoders:
        begun = time.monotonic()
        decoders.wait(lambda: decoders.each(begun, 2, full=True))
        broken = time.monotonic()
        yield decoders
        mended = time.monotonic()
        decoders.wait(lambda: decoders.each(mended, 2, full=True))
        assert client.cascade.mode is Mode.FULL
        switched = decoders.first(broken, "local_fallback")
        told = "" if switched is None else f"; small after {switched - broken:.2f} s"
        print(
            f"\n{what}: {decoders.said(broken)}{told}; every decoder full "
            f"{time.monotonic() - mended:.2f} s after it was mended"
        )
    latest = max(one.late_s for one in decoders.calls)
    assert latest < GRACE_S + NOISE_S, f"a call ended {latest:.2f} s after its deadline"


# -- one server, or the way to it ----------------------------------------------------------------


def kill(world: World) -> Callable[[], object]:
    """kill -9; another process comes at its port."""
    world.servers[0].kill()
    return lambda: world.start(0).ready()


def kill_all(world: World) -> Callable[[], object]:
    """The servers of all shards."""
    for server in world.servers[:2]:
        server.kill()
    return world.heal


def stop(world: World) -> Callable[[], object]:
    """SIGSTOP: connections stay, nobody answers."""
    world.servers[0].pause()
    return world.servers[0].resume


def faulty(**faults: object) -> Callable[[World], Callable[[], object]]:
    """By the proxy before server 0."""

    def begin(world: World) -> Callable[[], object]:
        world.proxies.set(0, **faults)
        return lambda: world.proxies.heal(0)

    return begin


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(kill, id="killed"),
        pytest.param(stop, id="stopped", marks=pytest.mark.slow),
        pytest.param(faulty(blackhole=True), id="blackhole", marks=pytest.mark.slow),
        pytest.param(faulty(partition=True), id="partition", marks=pytest.mark.slow),
        pytest.param(faulty(drop=1.0), id="connections reset", marks=pytest.mark.slow),
        pytest.param(faulty(corrupt=1.0), id="every reply corrupt", marks=pytest.mark.slow),
        pytest.param(kill_all, id="all killed", marks=pytest.mark.slow),
    ],
)
def test_while_a_shard_is_gone_decoding_goes_on_with_the_small_model(
    world: World, files, small, request, begin: Callable[[World], Callable[[], object]]
) -> None:
    """First the queries of that shard are partial, then new utterances go to the local fallback."""
    client = world.connect(small)
    with decoding(client, [files, small], request.node.callspec.id) as decoders:
        broken = time.monotonic()
        mend = begin(world)
        decoders.wait(lambda: decoders.first(broken, "local_fallback") is not None)
        entered = time.monotonic()
        decoders.wait(lambda: decoders.each(entered, 2))
        assert decoders.since(entered)[LOCAL_FALLBACK] > 0
        mend()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "seconds"),
    [
        pytest.param(
            {"drop": 0.01}, 2.0, id="1 % of chunks reset their connection", marks=pytest.mark.slow
        ),
        pytest.param(
            {"drop": 0.5}, 2.0, id="50 % of chunks reset their connection", marks=pytest.mark.slow
        ),
        pytest.param({"stall": 0.02}, 2.0, id="stalls of 200 ms"),
        pytest.param({"corrupt": 0.02}, 2.0, id="2 % of replies corrupt"),
        pytest.param({"delay_s": 0.005}, 2.0, id="5 ms more each way"),
        pytest.param({"delay_s": 0.05}, 2.0, id="50 ms more each way"),
    ],
)
def test_a_way_that_is_bad_costs_no_right_score(
    world: World, files, small, request, faults: dict[str, float], seconds: float
) -> None:
    """On the way to both shards; whichever model answers, it answers right."""
    client = world.connect(small)
    with decoding(client, [files, small], request.node.callspec.id) as decoders:
        for at in range(2):
            world.proxies.set(at, **faults)
        decoders.for_s(seconds)
        world.heal()


def test_connections_that_went_silent_are_given_up_though_nobody_reset_them(
    world: World, files, small
) -> None:
    """Half-open: the server is well, and so are new connections to it."""
    client = world.connect(small)
    with decoding(client, [files, small], "half-open"):
        assert world.proxies.half_open(0) > 0


# -- anything at any time ------------------------------------------------------------------------


def carry_out(world: World, command: Command) -> None:
    """What `python -m loadtest chaos` does, on servers that are killed and started again here."""
    one = command.server
    if command.verb == "heal":
        for each in range(len(world.servers)) if one is None else [one]:
            world.proxies.heal(each)
        return
    assert one is not None
    if command.verb == "kill":
        world.servers[one].kill()
        world.start(one)
    elif command.verb in ("stop", "continue"):
        server = world.servers[one]
        (server.pause if command.verb == "stop" else server.resume)()
    elif command.verb == "half-open":
        world.proxies.half_open(one)
    else:
        value = True if command.value is None else command.value
        name = {"slow": "delay_s"}.get(command.verb, command.verb)
        world.proxies.set(one, **{name: value / 1e3 if name == "delay_s" else value})


@pytest.mark.slow
def test_random_faults_of_every_kind(world: World, files, small) -> None:
    """Two servers a shard, each with troubles of its own; longer with DLM_CHAOS_MINUTES=10."""
    client = world.connect(small, 2)
    plan = random_faults(SEED, MINUTES * 60, len(world.servers), kill=True)
    what = f"random faults, seed {SEED}, {MINUTES:g} minutes, {len(plan)} actions"
    with decoding(client, [files, small], what) as decoders:
        begun = time.monotonic()
        for at, command in plan:
            decoders.for_s(max(begun + at - time.monotonic(), 0.0))
            carry_out(world, command)
        world.heal()
    print(f"switches {client.cascade.switches}, retries {client.stats.retries}")
    assert MINUTES < 1 or (client.cascade.switches and client.stats.retries)
