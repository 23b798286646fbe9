"""A client that has connected compiles nothing more: the deadlines of its calls are for answers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cluster import Cluster, build
from models import random_model

# Every kind of question, each twice, since messages that share a turn are merged; and the kernels
# that each phase was the first to compile (or to load from numba's cache).
SCRIPT = """
import gc, json, sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from dlm.client import Client, ClientConfig

def compiled():
    return {
        f"{d.py_func.__module__}.{d.py_func.__qualname__}{s}"
        for d in gc.get_objects() if isinstance(d, Dispatcher) for s in d.signatures
    }

config = ClientConfig(cache_dir=sys.argv[1], bigram_fallback=True)
with Client.connect(sys.argv[2:], config) as client:
    before = compiled()
    utterance = client.utterance()
    words = [f"w{i}" for i in range(40)]
    for _ in range(2):
        utterance.score([words[i : i + 3] for i in range(30)], words[5:35])
        utterance.score_sentences([" ".join(words), " ".join(words[::-1])])
        states = [utterance.begin(), utterance.null()]
        for _ in range(3):
            extension = utterance.extend(states, words)
            states = extension.states[:, 3:9:2]
            states = utterance.extend(states[:, 1], words[0:3]).states.reshape(-1)
        utterance.extend(states, np.arange(20)[::2])
        utterance.next_words(states[1], 5)
        utterance.context_blocks(states).extend(words)
        utterance.context_blocks(states).score(0, words[0])
    after = compiled()
print(json.dumps([len(before), sorted(after - before)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_what_a_call_needs_is_compiled_when_the_client_has_connected(tmp_path, order: int) -> None:
    """Whatever the order of the model, and whatever is asked."""
    files = build(random_model(3, order=order, words=60, per_order=300), tmp_path / "m", 2)
    with Cluster(files) as cluster:
        line = [sys.executable, "-c", SCRIPT, str(tmp_path / "cache"), *cluster.addresses]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, later = json.loads(done.stdout)
    assert before > 4
    assert later == []
