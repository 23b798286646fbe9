"""Which of gRPC's pollers a process has: as gRPC's own trace says, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dlm.server import poller

CALL = """
import os
from concurrent.futures import ThreadPoolExecutor

import grpc

server = grpc.server(ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    try:
        channel.unary_unary("/a/b")(b"", timeout=10)
    except grpc.RpcError as exc:
        print(exc.code().name, os.environ.get("GRPC_EXPERIMENTS"))
server.stop(None)
"""
TRACE = {"GRPC_VERBOSITY": "DEBUG", "GRPC_TRACE": "event_engine_endpoint,tcp"}
EARLIER, EVENT_ENGINE = "tcp_posix.cc", "posix_endpoint.cc"


def traced(before: str, **environ: str) -> tuple[str, str]:
    """What a call prints, and gRPC's trace of it, after the statement `before`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", before + CALL],
        env={**kept, **TRACE, **environ}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["dlm.server.app", "dlm.cluster"])
def test_a_server_has_the_earlier_poller(module: str) -> None:
    """Whatever was imported before it; processes that it starts are not told."""
    printed, trace = traced(f"import {module}, dlm.server.app")
    assert printed == "UNIMPLEMENTED None"
    assert EARLIER in trace
    assert EVENT_ENGINE not in trace
    assert "Unknown experiment" not in trace


@pytest.mark.parametrize(
    ("before", "environ", "left"),
    [
        ("import dlm.server", {"GRPC_EXPERIMENTS": ""}, ""),
        ("import grpc, dlm.server", {}, None),
    ],
)
def test_what_a_program_chose_stays(before: str, environ: dict[str, str], left: str | None) -> None:
    """By the variable, or by importing gRPC first."""
    printed, trace = traced(before, **environ)
    assert printed == f"UNIMPLEMENTED {left}".strip()
    assert EVENT_ENGINE in trace


def test_a_version_that_is_not_known_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that it lacks would be complained of."""
    monkeypatch.setattr(poller, "sys", type("Sys", (), {"modules": {}}))
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    for found, chosen in {"1.80.9": False, "1.81.0": True, "1.85.1": True, "1.86.0": False}.items():
        monkeypatch.setattr(poller, "version", lambda _, found=found: found)
        assert poller.chooses_poller() is chosen
