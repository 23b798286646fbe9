"""A child ends with its parent; a parent's threads and channels do it no harm."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cluster import WAIT_S
from dlm import __version__

STARTS = """
import threading
from concurrent.futures import ThreadPoolExecutor
import grpc
from dlm.cluster.processes import _start

server = grpc.server(ThreadPoolExecutor(1))
address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
server.start()
over = threading.Event()

def connect_again_and_again():
    while not over.is_set():
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(60)

with ThreadPoolExecutor(2) as pool:
    for _ in range(2):
        pool.submit(connect_again_and_again)
    print([_start(["--version"]).wait(60) for _ in range(6)], flush=True)
    over.set()
server.stop(0).wait()
"""


@pytest.mark.slow
def test_servers_start_from_a_process_whose_channels_are_busy() -> None:
    """gRPC's handlers of a fork crash a child that runs Python before its exec."""
    done = subprocess.run(
        [sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.stdout.splitlines() == [*[f"dlm {__version__}"] * 6, str([0] * 6)], done.stderr
