"""A device with a few random sentences, as a process: `python toy_device.py SOCKET CLOCKS SEED`.

Tests start four; with the variable TOY_DEVICES, as many as it says.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from dlm.federated.devices.clocks import Clocks
from dlm.federated.devices.participant import Participant, Task
from dlm.federated.devices.primitives import Signer
from dlm.federated.devices.settings import OwnerLimits
from dlm.federated.devices.sockets import DeviceSocket
from dlm.federated.keys import Key
from dlm.federated.tokens import Ids

VOCABULARY = 12
DEVICES = int(os.environ.get("TOY_DEVICES", "4"))


def text_of(seed: int) -> list[Ids]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, rng.integers(1, 6)).astype(np.int32) for _ in range(4)]


def signer_of(seed: int) -> Signer:
    return Signer.drawn(np.random.default_rng(seed).bytes)


def order() -> np.random.Generator:
    return np.random.default_rng(0)


def rounding(task: Task) -> Key:
    """As in a simulation, which it is compared with; a device draws its own."""
    return Key.given(task.key).fold("device", task.me - 1)


if __name__ == "__main__":
    place, clocks, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    registered = frozenset(signer_of(one).public for one in range(DEVICES))
    allowed = OwnerLimits(rest_s=0.0, max_participations=3)
    device = Participant(
        lambda task: lambda: text_of(seed),
        Clocks(clocks),
        allowed,
        registered,
        signer_of(seed),
        os.urandom,
        order,
        rounding,
    )
    served = DeviceSocket(place, device.answer)
    print("ready", flush=True)
    served.serve()
