"""What a round of secure aggregation costs a device and the server, beside the paper's formula.

    python tests/benchmarks/devices_cost.py [--devices 8 32 100] [--numbers 1400000]

The pure steps, in one process, of keys that are registered; one device in twenty vanishes before it
sends its input. Bytes are of whole messages, without the task (parameters and vocabulary). Two
devices mask their inputs, the others send random ones, which costs the server as much. CPU time.

`paper_mb` is 2 n a_K + (5 n - 4) a_S + d ceil(log2 M) bits, which a user sends and receives by
Bonawitz et al. 2017, with a_K = 32 and a_S = 33 bytes and the d numbers that the encoding pads to.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from dlm.federated.devices import device as machine
from dlm.federated.devices import summing
from dlm.federated.devices.encoding import Encoding
from dlm.federated.devices.messages import to_bytes
from dlm.federated.devices.participant import DeviceAnswer, Request, segments_of
from dlm.federated.devices.primitives import Signer, Vector
from dlm.federated.devices.protocol import MaskedInput, RoundTerms, least_threshold
from dlm.federated.devices.shamir import SHARE_BYTES

MEASURED = (1, 2)  # devices, by number
KEY_BYTES = 32


class Ledger:
    """Seconds and bytes of a party."""

    def __init__(self) -> None:
        self.seconds, self.sent, self.received = 0.0, 0, 0

    def timed(self, work: Any, *given: Any) -> Any:
        began = time.process_time()
        found = work(*given)
        self.seconds += time.process_time() - began
        return found


def measured(devices: int, numbers: int) -> dict[str, float]:
    encoding = Encoding(numbers, 1.0, 1000.0, devices)
    segments = segments_of(encoding)
    signers = {one: Signer.drawn(os.urandom) for one in range(1, devices + 1)}
    public = {one: signer.public for one, signer in signers.items()}
    terms = RoundTerms(b"run/0", least_threshold(devices, active=True), segments, public)
    rng = np.random.default_rng(0)
    inputs: list[Vector] = [rng.integers(0, one.modulus, one.size, np.int64) for one in segments]
    parts = zip(segments, inputs, strict=True)
    sent_by_others = MaskedInput(tuple(one.astype(part.dtype).tobytes() for part, one in parts))
    vanish = set(range(devices, devices - max(1, devices // 20), -1))
    books, server = {one: Ledger() for one in signers}, Ledger()
    states: dict[int, machine.DeviceState] = {}

    def act(number: int, told: Any) -> Any:
        book = books[number]
        if told is None:
            states[number], said = book.timed(
                machine.advertise, terms, number, signers[number], os.urandom
            )
            return said
        if isinstance(told, summing.Roster):
            states[number], said = book.timed(machine.share, states[number], told, os.urandom)
        elif isinstance(told, summing.SharesDelivery) and number in MEASURED:
            states[number], said = book.timed(machine.mask, states[number], told, inputs)
        elif isinstance(told, summing.SharesDelivery):
            after = states[number].after(machine.MASKED)
            states[number], said = replace(after, shares=dict(told.sealed)), sent_by_others
        elif isinstance(told, summing.Survivors):
            states[number], said = book.timed(machine.consent, states[number], told)
        else:
            states[number], said = book.timed(machine.open_shares, states[number], told)
        return said

    state = summing.SummingState(terms)
    told: dict[int, Any] = dict.fromkeys(signers)
    while state.step is not summing.Step.ENDED:
        for number, one in told.items():
            if state.step is summing.Step.INPUTS and number in vanish:
                continue
            said = act(number, one)
            if number in MEASURED:
                books[number].sent += len(to_bytes(DeviceAnswer("", to_bytes(said), bytes(64))))
                if one is not None:
                    books[number].received += len(to_bytes(Request("survivors", to_bytes(one))))
            state = server.timed(summing.hear, state, number, said)
        state, replies = server.timed(summing.go_on, state)
        told = dict(replies)
    _, survivors = server.timed(summing.summed, state)
    assert len(survivors) == devices - len(vanish)
    padded, bits = encoding.padded, math.ceil(math.log2(encoding.modulus))
    paper = 2 * devices * KEY_BYTES + (5 * devices - 4) * SHARE_BYTES + padded * bits / 8

    def of(name: str) -> float:
        return statistics.mean(getattr(books[one], name) for one in MEASURED)

    return {
        "devices": devices,
        "vanished": len(vanish),
        "sent_mb": round(of("sent") / 1e6, 3),
        "received_mb": round(of("received") / 1e6, 3),
        "paper_mb": round(paper / 1e6, 3),
        "device_cpu_s": round(of("seconds"), 3),
        "server_cpu_s": round(server.seconds, 2),
    }


def main() -> None:
    """Prints a JSON object for each number of devices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 32, 100])
    parser.add_argument("--numbers", type=int, default=1_400_000)
    given = parser.parse_args()
    for devices in given.devices:
        print(json.dumps(measured(devices, given.numbers)), flush=True)


if __name__ == "__main__":
    main()
