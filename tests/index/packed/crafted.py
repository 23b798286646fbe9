"""Crafted columns, opened and asked in a process that may die: `python crafted.py SEED ROUNDS`.

Each column ends where memory ends: the page after it cannot be read, so that a kernel that reads
beyond a column kills the process. Standard output has a JSON object for each round before and after
it. ROUNDS of -1 reads beyond a column on purpose.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dlm.index.packed.check import check_low, check_tree
from dlm.index.packed.kernels import get_all
from dlm.index.packed.low import Arrays, unpack_low
from dlm.index.packed.tree import LEVEL_SHAPE, TREE_SHAPE, unpack_tree
from dlm.index.search.shard import ShardSet, run_kernel
from dlm.index.search.view import low_view, tree_view
from dlm.ngram.query import QueryGroups
from models import PlainModel, build, random_model

PAGE = mmap.PAGESIZE
ROOM = 1 << 20  # of a column, in bytes
NUMBERS = (0, 1, 2, 31, 32, 33, 48, 63, 64, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)
WEIGHTS = (np.nan, np.inf, -np.inf, 0.5, -0.0, -3e38)


class Guarded:
    """Memory whose end is followed by a page that cannot be read."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, ROOM + PAGE)
        self.data = np.frombuffer(self.map, np.uint8)
        guard = ctypes.c_void_p(self.data.ctypes.data + ROOM)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(guard, ctypes.c_size_t(PAGE), 0) == 0

    def place(self, array: np.ndarray) -> np.ndarray:
        """`array`, copied to the end."""
        assert array.nbytes <= ROOM
        found = self.data[ROOM - array.nbytes : ROOM].view(array.dtype)
        found[:] = array
        return found


def guarded(arrays: Arrays, memory: dict[str, Guarded]) -> Arrays:
    """Every column at the end of its memory."""
    return {name: memory.setdefault(name, Guarded()).place(a) for name, a in arrays.items()}


class Subject:
    """A model's low orders and one of its shards, in columns."""

    def __init__(self, model: PlainModel, **options: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            opened = ShardSet.open(build(model, Path(folder), 2, **options))
            self.low = {k: v.copy() for k, v in opened.low.arrays.items()}
            self.tree = {k: v.copy() for k, v in opened.shards[0].arrays.items()}
        self.order = opened.manifest.order
        self.words = opened.manifest.vocabulary_size
        self.nodes = opened.manifest.files[2].nodes
        self.low_memory: dict[str, Guarded] = {}
        self.tree_memory: dict[str, Guarded] = {}

    def open_and_ask(self, low: Arrays, tree: Arrays, nodes: int, rng: random.Random) -> None:
        """Raises ValueError where a check refuses; else asks the kernel and unpacks everything."""
        low, tree = guarded(low, self.low_memory), guarded(tree, self.tree_memory)
        pairs = check_low(low, self.words, self.order)
        unpack_low(low)
        check_tree(tree, max(self.order - 2, 0), self.words, pairs, nodes)
        unpack_tree(tree)
        lengths = [rng.randrange(self.order) for _ in range(60)]
        groups = QueryGroups(
            np.array(lengths, np.uint8),
            np.array([rng.randrange(self.words) for n in lengths for _ in range(n)], np.uint32),
            np.full(len(lengths), self.words, np.uint32),
            np.tile(np.arange(self.words, dtype=np.uint32), len(lengths)),
        )
        tree_at = tree_view(tree, self.words)
        trees, slots = np.array([tree_at.ctypes.data], np.int64), np.zeros(4096, np.uint16)
        for asked in (trees[:0], trees):
            answers, _ = run_kernel(low_view(low), self.order, groups, asked, slots)
            assert not np.isnan(answers.log10_prob).any()


def craft(arrays: Arrays, rng: random.Random) -> str:
    """One change to one column; says which."""
    name = rng.choice([name for name in arrays if len(arrays[name])] or ["shape"])
    if not len(arrays[name]):
        return "nothing is left"
    if rng.random() < 0.3 and len(arrays["shape"]):
        name = "shape"
    column = arrays[name] = arrays[name].copy()
    at = rng.randrange(len(column))
    if column.dtype == np.float32:
        column[at] = rng.choice(WEIGHTS)
        return f"{name}[{at}] = {column[at]}"
    kind = rng.choice(("flip", "flip", "set", "near", "cut", "longer"))
    if kind == "cut":
        arrays[name] = column[: rng.randrange(len(column))]
    elif kind == "longer":
        arrays[name] = np.append(column, np.uint64(rng.getrandbits(64)))
    elif kind == "near":
        column[at] += np.uint64(rng.choice((1, (1 << 64) - 1)))
    elif kind == "set":
        column[at] = rng.choice((*NUMBERS, rng.getrandbits(64)))
    else:
        column[at] ^= np.uint64(1 << rng.randrange(64 if name != "shape" else 12))
    return f"{kind} {name}[{at}]"


def main(seed: int, rounds: int) -> None:
    """Prints each round before and after it."""
    if rounds < 0:
        beyond = Guarded().place(np.zeros(1, np.uint64))
        get_all(beyond.ctypes.data, 8, 0, 57, np.zeros(1, np.uint64))
    np.seterr(over="ignore")
    subjects = [
        Subject(random_model(7, words=8, per_order=60)),
        Subject(random_model(7, words=8, per_order=60), encoding="compact", bits=32),
        Subject(random_model(8, words=30, per_order=300, order=5), encoding="compact", bits=3),
        Subject(random_model(9, words=60, per_order=400, order=3)),
        Subject(random_model(9, words=20, per_order=60, order=2)),
    ]
    for subject in subjects:
        subject.open_and_ask(subject.low, subject.tree, subject.nodes, random.Random(seed))
    rng = random.Random(seed)
    for round_ in range(rounds):
        subject = rng.choice(subjects)
        low, tree = dict(subject.low), dict(subject.tree)
        said = [craft(rng.choice((low, tree)), rng) for _ in range(rng.choice((1, 1, 2, 3)))]
        # The manifest's number of nodes is as easily forged as the file's.
        levels = np.asarray(tree["shape"][len(TREE_SHAPE) :: len(LEVEL_SHAPE)], object)
        nodes = int(sum(levels)) if rng.random() < 0.5 else subject.nodes
        print(json.dumps({"round": round_, "said": said}), flush=True)
        try:
            subject.open_and_ask(low, tree, nodes, rng)
            outcome = "accepted"
        except ValueError as exc:
            outcome = str(exc) or "no message"
        print(json.dumps({"outcome": outcome}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
