"""Lattices the plain way: every path written out, one after another."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from dlm.asr.rescoring.lattice import Lattice, LatticeDraft


def random_lattice(
    seed: int, *, nodes: int = 7, words: Sequence[str] = ("w0", "w1", "w2")
) -> Lattice:
    """A random small lattice: words, silences and arcs without a label, in any order of nodes."""
    rng = random.Random(seed)
    names = rng.sample(range(100), nodes)
    draft = LatticeDraft(f"utt-{seed}")
    for name, at in zip(names, range(nodes), strict=True):
        draft.time(name, at * 0.25)
    pairs = [(i, i + 1) for i in range(nodes - 1)]  # one path at the least
    pairs += [tuple(sorted(rng.sample(range(nodes), 2))) for _ in range(nodes)]  # type: ignore[misc]
    rng.shuffle(pairs)
    for i, j in pairs:
        label = rng.choice([*words, *words, "", "!SIL"])
        draft.arc(names[i], names[j], label, rng.uniform(-9, 0), rng.uniform(-5, 0))
    return draft.finish()


def all_paths(lattice: Lattice) -> Iterator[list[int]]:
    """The arcs of every path from the start to the end."""

    def from_node(node: int) -> Iterator[list[int]]:
        if node == lattice.end:
            yield []
        for arc in range(lattice.arcs):
            if lattice.sources[arc] == node:
                for rest in from_node(int(lattice.targets[arc])):
                    yield [arc, *rest]

    return from_node(0)


def words_of(lattice: Lattice, path: Sequence[int]) -> tuple[str, ...]:
    """The words on a path."""
    return tuple(lattice.labels[arc] for arc in path if lattice.is_word[arc])
