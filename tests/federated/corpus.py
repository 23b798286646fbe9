"""A small made-up population for tests: words by Zipf's law, each person with their own habits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.federated.users import UserDataset

WORDS = tuple(f"w{i:03}" for i in range(400))


def population(folder: Path, users: int = 300, seed: int = 0, outside: float = 0.1) -> UserDataset:
    """Users of very different lengths; `outside` of what they say is in no list.

    A user draws from a Dirichlet distribution about Zipf's law, so that they repeat themselves.
    """
    random = np.random.default_rng(seed)
    shape = 1 / np.arange(1, len(WORDS) + 1)
    shape /= shape.sum()
    lines = ["user_id\tutterance"]
    for user in range(users):
        taste = random.dirichlet(200 * shape)
        said = random.choice(WORDS, int(random.lognormal(4.5, 1.2)) + 1, p=taste)
        other = random.random(len(said)) < outside
        text = [f"x{user}" if o else str(w) for w, o in zip(said, other, strict=True)]
        lines += [
            f"user{user:04}\t{' '.join(text[at : at + 20])}" for at in range(0, len(text), 20)
        ]
    path = folder / "users.tsv"
    path.write_text("\n".join(lines) + "\n")
    return UserDataset.from_tsv(path)


def top_words(words: Sequence[str], counts: NDArray[np.float64], capacity: int) -> list[str]:
    """The `capacity` most frequent words; equal counts in the order of the list, zeros left out."""
    order = np.argsort(-counts, kind="stable")[:capacity]
    return [words[place] for place in order.tolist() if counts[place] > 0]
