"""A model's size on disk: as an ARPA file by order, and as a finite-state transducer."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.files import replacing
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.arpa.source import TextSource
from loadtest.paper.setup import Setup

BLOCK_BYTES = 1 << 22
# OpenFst's `const` type: a state has a weight, an arc offset and three counts; an arc has two
# labels, a weight and a next state. Each takes four bytes.
STATE_BYTES, ARC_BYTES = 20, 16
LARGEST_BUILT = 20_000_000  # arcs; more would not fit into a test machine's memory


def plain_arpa(setup: Setup) -> Path:
    """The ARPA file as other toolkits read it: uncompressed."""
    if setup.arpa.suffix == ".arpa":
        return setup.arpa
    path = setup.work / f"{setup.arpa.name.split('.arpa')[0]}.arpa"
    if not path.exists():
        with closing(TextSource(str(setup.arpa))) as source, replacing(path) as file:
            while block := source.read(BLOCK_BYTES):
                file.write(block)
    return path


def bytes_by_order(arpa: Path) -> list[int]:
    """Bytes of each section of an ARPA file, its head line included."""
    places, at, rest = list[int](), 0, b""
    with arpa.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            text = rest + block
            for number in range(len(places) + 1, 16):
                found = text.find(b"\n\\%d-grams:" % number)
                if found < 0:
                    break
                places.append(at - len(rest) + found + 1)
            at += len(block)
            rest = text[-16:]
    return [end - begin for begin, end in pairwise([*places, at])]


@dataclass(frozen=True)
class Transducer:
    """A model as a weighted finite-state transducer (Mohri et al. 2002).

    It has a state per context that a longer n-gram begins with or that has a weight, an arc per
    n-gram, and an epsilon arc from each context to the next shorter one. An n-gram that ends a
    sentence is a final weight, not an arc.

    states  by length of context, from 0 up;  ngrams  arcs by order of the n-gram, from 1 up
    source, label, target, weight  (A,)  of each arc; label 0 is epsilon
    final   (S,)  weights; inf for states that are not final
    """

    states: tuple[int, ...]
    ngrams: tuple[int, ...]
    source: NDArray[np.int64]
    label: NDArray[np.int64]
    target: NDArray[np.int64]
    weight: NDArray[np.float32]
    final: NDArray[np.float32]

    @property
    def bytes(self) -> int:
        """In OpenFst's `const` type, without its header."""
        return STATE_BYTES * len(self.final) + ARC_BYTES * len(self.source)


def transducer(arpa: Path) -> Transducer:
    """The transducer of an ARPA file; takes some 300 bytes of memory per n-gram."""
    ids, weights, backoffs = list[Any](), list[Any](), list[Any]()
    with ArpaReader(arpa) as reader:
        order = reader.order
        parts: list[list[Any]] = [[] for _ in range(order)]
        for batch in reader.batches():
            parts[batch.order - 1].append((batch.ids, batch.log10_prob, batch.log10_backoff))
        end = reader.vocabulary.id_of(b"</s>")
    for one in parts:
        ids.append(np.concatenate([p[0] for p in one]).astype(np.int64))
        weights.append(np.concatenate([p[1] for p in one]))
        backoffs.append(np.concatenate([p[2] for p in one]))
    # By a 64-bit hash of its words.
    known = [np.zeros(1, np.uint64)]
    for k in range(1, order):
        weighs = ids[k - 1][backoffs[k - 1] != 0]
        known.append(np.unique(np.concatenate([_hash(ids[k][:, :-1]), _hash(weighs)])))
    begins = np.cumsum([0, *map(len, known)])

    def state_of(words: NDArray[np.int64]) -> NDArray[np.int64]:
        found = np.zeros(len(words), np.int64)
        missing = np.ones(len(words), np.bool_)
        for length in range(min(words.shape[1], order - 1), 0, -1):
            rows = np.flatnonzero(missing)
            keys = _hash(words[rows, words.shape[1] - length :])
            place = np.minimum(np.searchsorted(known[length], keys), len(known[length]) - 1)
            hit = known[length][place] == keys
            found[rows[hit]] = begins[length] + place[hit]
            missing[rows[hit]] = False
        return found

    arcs, counts = list[Any](), list[int]()
    final = np.full(begins[-1], np.inf, np.float32)
    scale = np.float32(-np.log(10.0))
    for k in range(order):
        source = state_of(ids[k][:, :-1]) if k else np.zeros(len(ids[k]), np.int64)
        ends = ids[k][:, -1] == end
        final[source[ends]] = weights[k][ends] * scale
        kept = ~ends
        counts.append(int(kept.sum()))
        words = ids[k][kept]
        arcs.append((source[kept], words[:, -1] + 1, state_of(words), weights[k][kept] * scale))
    for k in range(order - 1):
        keys = _hash(ids[k])
        place = np.minimum(np.searchsorted(known[k + 1], keys), len(known[k + 1]) - 1)
        is_state = known[k + 1][place] == keys
        target = state_of(ids[k][is_state][:, 1:]) if k else np.zeros(int(is_state.sum()), np.int64)
        source = begins[k + 1] + place[is_state]
        epsilon = np.zeros(len(source), np.int64)
        arcs.append((source, epsilon, target, backoffs[k][is_state] * scale))
    source, label, target, weight = (np.concatenate([one[at] for one in arcs]) for at in range(4))
    states = tuple(map(len, known))
    return Transducer(states, tuple(counts), source, label, target, weight, final)


def _hash(words: NDArray[np.int64]) -> NDArray[np.uint64]:
    found = np.full(len(words), 0x9E3779B97F4A7C15, np.uint64)
    for column in words.T:
        found ^= column.astype(np.uint64) + np.uint64(1)
        found *= np.uint64(0xD6E8FEB86659FD93)
        found ^= found >> np.uint64(32)
    return found


def write_transducer(found: Transducer, path: Path) -> bool:
    """Writes OpenFst's `const` type; false without pynini, or if larger than `LARGEST_BUILT`."""
    try:
        import pywrapfst as openfst
    except ModuleNotFoundError:
        return False
    if len(found.source) > LARGEST_BUILT:
        return False
    fst = openfst.VectorFst()
    fst.add_states(len(found.final))
    fst.set_start(0)
    one = openfst.Weight.one(fst.weight_type())
    rows = zip(
        *(column.tolist() for column in (found.source, found.label, found.weight, found.target)),
        strict=True,
    )
    for source, label, weight, target in rows:
        fst.add_arc(source, openfst.Arc(label, label, weight or one, target))
    for state in np.flatnonzero(np.isfinite(found.final)).tolist():
        fst.set_final(state, float(found.final[state]))
    openfst.convert(fst, "const").write(str(path))
    return True
