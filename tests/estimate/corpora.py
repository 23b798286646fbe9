"""Small texts that break things: one line, one word, repeated lines, counts that are rare."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dlm.estimate.pipeline import Fallback


@dataclass(frozen=True)
class Case:
    """A text and how it is estimated."""

    lines: tuple[bytes, ...]
    order: int
    prune: tuple[int, ...]
    vocabulary: frozenset[bytes] | None
    fallback: Fallback | None

    @property
    def text(self) -> bytes:
        """As a file."""
        return b"".join(line + b"\n" for line in self.lines)


def case(seed: int) -> Case:
    """A random text with random settings."""
    r = random.Random(seed)
    size = r.choice([1, 2, 3, 5, 10, 40, 200])
    words = [b"w%d" % i for i in range(size)]
    lines: list[bytes] = []
    for _ in range(r.choice([1, 1, 2, 5, 20, 100, 400])):
        if lines and r.random() < 0.2:
            lines.append(r.choice(lines))
            continue
        length = r.choice([0, 1, 1, 2, 5, 10, 15])
        picked = (words[min(int(r.expovariate(3 / size)), size - 1)] for _ in range(length))
        lines.append(r.choice([b" ", b" ", b"\t", b"  "]).join(picked))
    order = r.choice([1, 2, 2, 3, 3, 4, 5, 6])
    prune: list[int] = []
    if r.random() < 0.5:
        prune = sorted(r.choice([0, 0, 1, 2, 3]) for _ in range(r.randint(1, order)))
        # Where lmplz would prune </s> its numbers are not meant; see README.md.
        if r.random() < 0.7 or prune[0] >= len(lines):
            prune[0] = 0
        if prune[0] >= len(lines):
            prune = []
    vocabulary = None
    if r.random() < 0.3:
        vocabulary = frozenset([*r.sample(words, max(1, size // 2)), b"elsewhere"])
    fallback = (0.5, 1.0, 1.5) if r.random() < 0.8 else None
    return Case(tuple(lines), order, tuple(prune), vocabulary, fallback)
