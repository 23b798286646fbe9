"""The simulation: queues of textbooks, and a client whose messages are counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("simpy", reason="pip install -e '.[loadtest]'")

import simpy
from numpy.typing import NDArray

from cluster import Cluster, ModelFiles
from dlm.client import Client, ClientConfig
from dlm.errors import ConfigError
from loadtest.paper.simulate import (
    Costs,
    Layout,
    Process,
    Simulation,
    Steps,
)
from loadtest.traces.routes import Routed, Slotted, routes
from loadtest.traces.trace import Trace

ONE = Routed(1, *(np.array(one, np.int64) for one in ([1], [0, 1], [0], [10])))


def sojourn_s(
    processes: list[Process], env: simpy.Environment, per_s: float, services: NDArray[np.float64]
) -> float:
    """Mean time from coming to leaving of jobs that come at random, each to the next process."""
    waits = np.random.default_rng(1).exponential(1 / per_s, len(services))
    took: list[float] = []

    def job(process: Process, service_s: float) -> Steps:
        began = env.now
        yield from process.do(service_s)
        took.append(env.now - began)

    def come() -> Steps:
        for number, (wait_s, service_s) in enumerate(zip(waits, services, strict=True)):
            yield env.timeout(float(wait_s))
            env.process(job(processes[number % len(processes)], float(service_s)))

    env.process(come())
    env.run()
    assert len(took) == len(services)
    return float(np.mean(took))


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.8])
def test_a_process_is_an_m_d_1_and_an_m_m_1_queue(rho: float) -> None:
    """Pollaczek and Khinchine: waiting is rho s / (2 (1 - rho)) of constant services, twice that of
    exponential ones."""
    count = 30_000
    for services, factor in (
        (np.ones(count), 0.5),
        (np.random.default_rng(2).exponential(1.0, count), 1.0),
    ):
        env = simpy.Environment()
        found = sojourn_s([Process(env)], env, rho, services)
        assert found == pytest.approx(1 + factor * rho / (1 - rho), rel=0.06)


@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_processes_take_turns_on_a_core(rho: float) -> None:
    """Of one core, an M/D/1 queue again, however many processes there are."""
    env = simpy.Environment()
    core = simpy.Resource(env)
    many = [Process(env, core, 2.0) for _ in range(2000)]
    found = sojourn_s(many, env, rho, np.full(30_000, 0.5))
    assert found == pytest.approx(1 + 0.5 * rho / (1 - rho), rel=0.06)


def test_a_message_takes_its_network_and_its_service() -> None:
    """Of a request that is alone: each cost once."""
    costs = Costs(0.1, 0.01, 0.2, 0.3, 0.02, wait_s=0.05)
    sim = Simulation(Layout(1, 1), costs, ONE, 1, 0.0)
    found = sim.closed_loop([[np.zeros(1, np.int64)]], 10.0)
    expected = 0.1 + 0.01 + 0.2 + (0.3 + 0.02 * 10) + 0.05
    assert found.latency_s == pytest.approx([expected] * len(found.latency_s))
    assert found.queries == 10 * found.messages.sum()
    assert found.utilisation(1) == pytest.approx(0.5 / expected, rel=0.15)


def test_what_waits_for_the_window_gathers() -> None:
    """One client, 64 decoders: fewer messages than requests, and not a query is lost."""
    costs = Costs(1e-6, 0.0, 1e-6, 1e-3, 0.0)
    sim = Simulation(Layout(1, 1), costs, ONE, 1, 0.0)
    found = sim.closed_loop([[np.zeros(1, np.int64)] * 64], 1.0)
    assert found.requests > 8 * found.messages.sum()
    assert found.queries == pytest.approx(10 * found.requests, rel=0.02)


def test_a_seed_gives_the_same_and_balanced_pieces_are_even(
    slotted: Slotted, files: ModelFiles
) -> None:
    """The same outcome twice; by hand, each server gets as many messages as any other."""
    table = np.zeros(4096, np.uint16)  # all to one of two servers
    routed = slotted.to(table, 2)
    costs = Costs(1e-5, 0.0, 1e-5, 1e-4, 0.0)
    outcomes = []
    for balanced in (False, False, True):
        layout = Layout(4, 2, workers=2, balanced=balanced)
        sim = Simulation(layout, costs, routed, 5, 0.1)
        outcomes.append(sim.open_loop(slotted.requests, 500.0, 4.0))
    assert outcomes[0].latency_s == outcomes[1].latency_s
    assert outcomes[0].messages[1] == 0
    assert outcomes[2].messages[1] == pytest.approx(outcomes[2].messages[0], rel=0.15)
    with pytest.raises(ConfigError, match="expected 3"):
        Simulation(replace(Layout(1, 3)), costs, routed, 1, 0.0)


@pytest.fixture(scope="module")
def slotted(trace: Trace, files: ModelFiles) -> Slotted:
    """The test trace."""
    return routes(trace, files.directory)


def test_routes_are_what_a_client_sends(
    slotted: Slotted, trace: Trace, files: ModelFiles, servers: Cluster, tmp_path: Path
) -> None:
    """Messages, distinct queries: request by request, by its counters."""
    routed = slotted.to(files.manifest.slots, 2)
    config = ClientConfig(60.0, cache_dir=tmp_path / "cache")
    with Client.connect(servers.write(tmp_path / "cluster.toml"), config) as client:
        handle = client.utterance()
        for number in slotted.requests.tolist():
            one = trace.request(number)
            before = client.stats
            rows = one.words[0] if len(one.words) == 1 else one.words
            handle.extend(handle.states_after(one.contexts), rows)
            after = client.stats
            first, last = routed.first[number : number + 2].tolist()
            assert after.messages - before.messages == last - first
            sent = int(routed.queries[first:last].sum())
            assert after.sent_queries - before.sent_queries == sent
            assert after.queries - before.queries == slotted.asked[number]
    assert slotted.load().sum() == slotted.queries.sum()
