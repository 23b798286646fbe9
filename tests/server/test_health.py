"""dlm.server.health: the state machine, and what the standard health service says of it."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster import WAIT_S
from dlm.server.health import TRANSITIONS, Action, Event, ServingState, step
from dlm.wire._pb import shard_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_table_is_total():
    """Each event has an answer in each state."""
    assert set(TRANSITIONS) == {(s, e) for s in ServingState for e in Event}


def test_states_are_those_of_the_wire():
    """Numbers and names of `dlm.v1.ServerState`, but for UNSPECIFIED."""
    wire = {k.removeprefix("SERVER_STATE_"): v for k, v in pb.ServerState.items()}
    del wire["UNSPECIFIED"]
    assert {s.name: s.value for s in ServingState} == wire


def test_draining_is_never_left():
    """Whatever happens, a server that drains does not come back."""
    assert all(step(ServingState.DRAINING, event)[0] is ServingState.DRAINING for event in Event)


def test_change_of_state_is_announced_first():
    """The health service knows before anything else is done."""
    for (state, _), (after, actions) in TRANSITIONS.items():
        if after is not state:
            assert actions[0] is Action.ANNOUNCE


@pytest.mark.parametrize("service", ["", "dlm.v1.Shard"])
def test_health_follows_the_state(gated, service):
    """NOT_SERVING while it warms, SERVING when ready, NOT_SERVING when it drains; every watcher
    hears of it, and one that leaves does not silence the others."""
    shard, server, caller = gated(open_gate=False, wait=False, inline_queries=0)
    health = health_pb2_grpc.HealthStub(caller.channel)
    request = health_pb2.HealthCheckRequest(service=service)
    assert health.Check(request, timeout=WAIT_S).status == NOT_SERVING
    leaves, *watches = [health.Watch(request, timeout=WAIT_S) for _ in range(3)]
    assert [next(watch).status for watch in (leaves, *watches)] == [NOT_SERVING] * 3
    leaves.cancel()
    shard.gate.set()
    assert [next(watch).status for watch in watches] == [SERVING] * 2
    assert health.Check(request, timeout=WAIT_S).status == SERVING
    server.post(Event.STOP)
    assert [[one.status for one in watch] for watch in watches] == [[NOT_SERVING]] * 2
    assert server.status.result(WAIT_S) == 0


def test_unknown_service_is_not_found(gated):
    """Check says NOT_FOUND, Watch says SERVICE_UNKNOWN, as the protocol wants it."""
    _, _, caller = gated()
    health = health_pb2_grpc.HealthStub(caller.channel)
    request = health_pb2.HealthCheckRequest(service="dlm.v1.Nothing")
    with pytest.raises(Exception, match="NOT_FOUND"):
        health.Check(request, timeout=WAIT_S)
    watch = health.Watch(request, timeout=WAIT_S)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
