"""Models for tests: random ones, and ones made by hand for what real models lack.

A model here is plain: the words by id, the order, and n-gram -> (probability, back-off weight).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Ngram = tuple[str, ...]


@dataclass(frozen=True)
class PlainModel:
    """n-gram (words, oldest first) -> (log10 probability, log10 back-off weight or None)."""

    order: int
    ngrams: dict[Ngram, tuple[float, float | None]]

    def arpa(self) -> str:
        """The model as the text of an ARPA file."""
        by_order = [[n for n in self.ngrams if len(n) == k] for k in range(1, self.order + 1)]
        lines = ["\\data\\"]
        lines += [f"ngram {k}={len(rows)}" for k, rows in enumerate(by_order, 1)]
        for k, rows in enumerate(by_order, 1):
            lines += ["", f"\\{k}-grams:"]
            for ngram in rows:
                log10_prob, log10_backoff = self.ngrams[ngram]
                fields = [repr(log10_prob), " ".join(ngram)]
                if log10_backoff is not None and k < self.order:
                    fields.append(repr(log10_backoff))
                lines.append("\t".join(fields))
        return "\n".join([*lines, "", "\\end\\", ""])

    def padded(self) -> PlainModel:
        """The same model with n-grams of other words, so that KenLM's tables have room for blanks.

        KenLM sizes its tables by the counts in the header, which leave out the blanks it adds.
        """
        fillers = [f"filler{i}" for i in range(30)]
        ngrams = dict(self.ngrams)
        for k in range(1, self.order + 1):
            for i in range(min(30**k, 900)):
                ngram = tuple(fillers[i // 30**j % 30] for j in reversed(range(k)))
                if k > 1 and ngram[:-1] not in ngrams:
                    continue
                ngrams[ngram] = (-1.0, None)
        return PlainModel(self.order, ngrams)

    def write(self, path: Path) -> Path:
        """The model in an ARPA file at `path`; returns the path."""
        path.write_bytes(self.arpa().encode("utf-8", "surrogateescape"))
        return path


def random_model(
    seed: int,
    *,
    order: int = 4,
    words: int = 8,
    per_order: int = 30,
    missing_suffixes: bool = True,
    unk: bool = True,
    below_one: bool = False,
) -> PlainModel:
    """A random model: prefixes closed, suffixes missing at random, many weights zero.

    Probabilities need not sum to one: exactness is what is tested, on any numbers. With `below_one`
    no back-off gives a probability above 1, which KenLM cannot store in its blanks.
    """
    rng = random.Random(seed)
    vocabulary = ["<s>", "</s>"] + [f"w{i}" for i in range(words)] + (["<unk>"] if unk else [])
    rng.shuffle(vocabulary)

    def value() -> float:
        if below_one:
            return float(np.float32(-3 - rng.random()))
        return float(np.float32(-rng.choice([rng.random() * 5, rng.random(), 0.0, 1.0])))

    def weight() -> float | None:
        return rng.choice([None, 0.0, 0.0, float(np.float32(rng.uniform(-1, 0.5)))])

    ngrams: dict[Ngram, tuple[float, float | None]] = {(w,): (value(), weight()) for w in vocabulary}
    shorter: list[Ngram] = list(ngrams)
    for k in range(2, order + 1):
        candidates = {
            (*rng.choice(shorter), rng.choice(vocabulary)) for _ in range(per_order if shorter else 0)
        }
        if not missing_suffixes and k > 2:
            candidates = {n for n in candidates if n[1:] in ngrams}
        rows = sorted(candidates)
        rng.shuffle(rows)
        ngrams.update({n: (value(), weight()) for n in rows})
        shorter = rows
    return PlainModel(order, ngrams)


def _model(order: int, **ngrams: tuple[float, float | None]) -> PlainModel:
    return PlainModel(order, {tuple(k.split()): v for k, v in ngrams.items()})


BASE: dict[str, tuple[float, float | None]] = {
    "<unk>": (-2.0, None),
    "<s>": (-99.0, -0.25),
    "</s>": (-1.5, None),
    "a": (-1.0, -0.5),
    "b": (-1.125, -0.375),
    "c": (-1.25, -0.0625),
    "d": (-1.375, None),
}

HAND_MADE: dict[str, PlainModel] = {
    # A weight that no n-gram follows: gamma(a b c) != 0, and nothing begins with b c.
    "weight_without_continuation": _model(
        4,
        **BASE,
        **{
            "a b": (-0.5, -0.125),
            "b c": (-0.625, None),
            "c d": (-0.6875, None),
            "a b c": (-0.25, -0.75),
            "a b c d": (-0.1875, None),
        },
    ),
    # The same, and the pair itself exists only as the end of a longer context.
    "blank_pair_with_weight": _model(
        4,
        **BASE,
        **{
            "a b": (-0.5, -0.125),
            "a b c": (-0.25, -0.75),
            "a b c d": (-0.1875, None),
        },
    ),
    "weight_only_at_the_end": _model(
        4,
        **BASE,
        **{
            "a b": (-0.5, -0.125),
            "b c": (-0.625, None),
            "a b c": (-0.25, -0.75),
        },
    ),
    # (a b c d) without (b c d), (c d) or (b c): blanks two deep.
    "missing_suffixes": _model(
        4,
        **BASE,
        **{
            "a b": (-0.5, None),
            "a b c": (-0.25, -0.75),
            "a b c d": (-0.1875, None),
            "d a": (-0.875, -0.03125),
            "d a b": (-0.34375, None),
        },
    ),
    "five_grams_deep_suffixes_missing": _model(
        5,
        **BASE,
        **{
            "a b": (-0.5, -0.5),
            "a b c": (-0.25, None),
            "a b c d": (-0.1875, -0.125),
            "a b c d a": (-0.0625, None),
            "d a": (-0.3125, None),
            "<s> a": (-0.75, -0.25),
            "<s> a b": (-0.28125, -0.0625),
        },
    ),
    "empty_top_orders": PlainModel(4, {**{(k,): v for k, v in BASE.items()}, ("a", "b"): (-0.5, -0.25)}),
    "empty_order_two_and_up": PlainModel(3, {(k,): v for k, v in BASE.items()}),
    "unigrams_only": PlainModel(1, {(k,): (v[0], None) for k, v in BASE.items()}),
    "bigrams_only": _model(2, **BASE, **{"a b": (-0.5, None), "<s> a": (-0.25, None)}),
    "no_unknown_word": PlainModel(
        3,
        {
            **{(k,): v for k, v in BASE.items() if k != "<unk>"},
            ("a", "b"): (-0.5, -0.25),
            ("a", "b", "c"): (-0.125, None),
        },
    ),
    "unknown_word_in_longer_ngrams": _model(
        3,
        **{k: v for k, v in BASE.items() if k != "<unk>"},
        **{
            "<UNK>": (-2.0, -0.875),
            "a <UNK>": (-0.5, -0.25),
            "<UNK> b": (-0.4375, -0.5),
            "a <UNK> b": (-0.125, None),
        },
    ),
}
