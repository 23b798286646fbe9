"""Models for tests: random ones, and ones made by hand for what real models lack.

A model here is plain: the words by id, the order, and n-gram -> (probability, back-off weight).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dlm.ngram.backoff import DictModel
    from dlm.ngram.query import Answers

Ngram = tuple[str, ...]


@dataclass(frozen=True)
class PlainModel:
    """n-gram (words, oldest first) -> (log10 probability, log10 back-off weight or None)."""

    order: int
    ngrams: dict[Ngram, tuple[float, float | None]]

    def arpa(self) -> str:
        """The model as the text of an ARPA file."""
        by_order = [[n for n in self.ngrams if len(n) == k] for k in range(1, self.order + 1)]
        by_order[0].sort(key=self.place)
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

    def place(self, unigram: Ngram) -> tuple[bool, bool, float]:
        """What 1-grams are sorted by: so their words have the ids that they have in a shard set."""
        prob, weight = self.ngrams[unigram]
        heavy = self.order > 1 and bool(weight)
        return unigram[0].upper() != "<UNK>", not heavy, -float(np.float32(prob))

    def unsorted(self) -> str:
        """As `arpa`, its words not in the order of their ids in a shard set."""
        head, words, rest = re.split(r"(?s)(?<=1-grams:\n)(.*?)(?=\n\n)", self.arpa(), maxsplit=1)
        return head + "\n".join(reversed(words.split("\n"))) + rest

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

    ngrams: dict[Ngram, tuple[float, float | None]] = {
        (w,): (value(), weight()) for w in vocabulary
    }
    shorter: list[Ngram] = list(ngrams)
    for k in range(2, order + 1):
        candidates = {
            (*rng.choice(shorter), rng.choice(vocabulary))
            for _ in range(per_order if shorter else 0)
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
        4, **BASE, **{"a b": (-0.5, -0.125), "a b c": (-0.25, -0.75), "a b c d": (-0.1875, None)}
    ),
    "weight_only_at_the_end": _model(
        4, **BASE, **{"a b": (-0.5, -0.125), "b c": (-0.625, None), "a b c": (-0.25, -0.75)}
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
    "empty_top_orders": PlainModel(
        4, {**{(k,): v for k, v in BASE.items()}, ("a", "b"): (-0.5, -0.25)}
    ),
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


# Not among the hand-made: no shard set holds it as it stands.
MISSING_PREFIX = PlainModel(
    4,
    {
        **{(k,): v for k, v in BASE.items()},
        ("a", "b"): (-0.5, -0.125),
        ("b", "c"): (-0.625, -0.25),
        ("a", "b", "c", "d"): (-0.1875, None),
        ("d", "c", "b"): (-0.21875, None),
    },
)


# ------------------------------------------------- shard sets, read back and changed on purpose

# Manifest content and files by name. `changed` gives the files unpacked: the low orders as the
# fields of `LowPlain`, a shard as a list of the fields of `LevelPlain`. `tampered` gives columns.
Change = Callable[[dict[str, Any], dict[str, Any]], None]


def build(model: PlainModel, folder: Path, shards: int = 2, **options: Any) -> Path:
    """The model as `folder`/model.arpa and its shard set, whose folder is returned."""
    from dlm.index.making import build_shard_set

    build_shard_set(model.write(folder / "model.arpa"), folder / "set", shards, **options)
    return folder / "set"


def changed(source: Path, target: Path, change: Change) -> Path:
    """A copy of a shard set, unpacked, changed and packed again.

    Sizes, checksums, the counts of each shard and the shard-set id are set right again, so that
    only the change itself can be told.
    """
    from dlm.index.coding import coding_of_set
    from dlm.index.packed.low import LowPlain, key_bits_of
    from dlm.index.packed.tree import LevelPlain
    from dlm.index.search.shard import ShardSet
    from index.oracle import pack_low, pack_tree, tree_codes

    opened = ShardSet.open(source)
    content = json.loads(opened.manifest.text)
    names = [entry["name"] for entry in content["files"]]
    plain: dict[str, Any] = {
        names[0]: columns_of(source, names[0]),
        names[1]: _writable(opened.low.plain()),
    }
    for name, shard in zip(names[2:], opened.shards, strict=True):
        plain[name] = [_writable(level) for level in shard.plain()]
    change(content, plain)

    coding = coding_of_set(content["encoding"])
    low = LowPlain(**plain[names[1]])
    key_bits = key_bits_of(len(low.log10_prob))
    files = {names[0]: plain[names[0]], names[1]: pack_low(low, coding.prob_table)}
    trees: list[list[LevelPlain]] = []
    for name, entry in zip(names[2:], content["files"][2:], strict=True):
        levels = plain[name]
        for depth, level in enumerate(levels):
            if depth:
                above = levels[depth - 1]
                parent = np.repeat(np.arange(len(above["key"])), np.diff(above["child"]))
                level["parent_size"] = np.diff(above["begin"])[parent]
            else:
                level["parent_size"] = np.zeros(len(level["key"]), np.int64)
        blanks = sum(int(level["blank"].sum()) for level in levels)
        grams = sum(len(level["rank"]) for level in levels)
        entry |= {
            "nodes": sum(len(level["key"]) for level in levels),
            "blanks": blanks,
            "ngrams": grams - blanks,
        }
        trees.append([LevelPlain(**level) for level in levels])
    codes = tree_codes(trees, coding.prob_table)
    for name, tree in zip(names[2:], trees, strict=True):
        files[name] = pack_tree(tree, len(low.key), key_bits, codes)
    return _write_set(target, content, files)


def tampered(source: Path, target: Path, change: Change) -> Path:
    """A copy of a shard set with its packed columns changed; sizes, checksums and ids fit."""
    content = json.loads((source / "manifest.json").read_bytes())
    files = {entry["name"]: columns_of(source, entry["name"]) for entry in content["files"]}
    change(content, files)
    return _write_set(target, content, files)


def columns_of(source: Path, name: str) -> dict[str, Any]:
    """The columns of one file of a shard set, to change."""
    from dlm.index import layout

    entry = next(e for e in layout.read_manifest(source).files if e.name == name)
    return {k: v.copy() for k, v in layout.map_columns(source / name, entry).items()}


def _writable(plain: Any) -> dict[str, Any]:
    return {field.name: getattr(plain, field.name).copy() for field in fields(plain)}


def _write_set(target: Path, content: dict[str, Any], files: dict[str, Any]) -> Path:
    from index.oracle import write_columns

    target.mkdir()
    for entry in content["files"]:
        arrays = files[entry["name"]]
        size, digest = write_columns(target / entry["name"], entry["kind"], arrays)
        entry |= {"bytes": size, "xxh3_128": digest}
    seal(target, content)
    return target


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def seal(directory: Path, content: dict[str, Any]) -> None:
    """Writes the manifest with this content and the ids that follow from it."""
    from dlm.index import layout

    content["shard_set"] = layout.shard_set_id(content)
    content["check"] = layout.manifest_check(content)
    (directory / layout.MANIFEST).write_bytes(layout.canonical_text(content))


def queries(
    oracle: DictModel, count: int, seed: int = 0
) -> tuple[NDArray[np.uint32], NDArray[np.uint8], NDArray[np.uint32]]:
    """Contexts, lengths and words as `LocalModel.score` takes them, half of them from n-grams."""
    rng = random.Random(seed)
    known = sorted(oracle.closure)
    size, width = len(oracle.vocabulary), oracle.order - 1
    contexts = np.zeros((count, width), np.uint32)
    lengths = np.zeros(count, np.uint8)
    words = np.zeros(count, np.uint32)
    for q in range(count):
        if rng.random() < 0.6:
            ngram = list(rng.choice(known))
            if rng.random() < 0.4:
                ngram.append(rng.randrange(size))
        else:
            ngram = [rng.randrange(size) for _ in range(rng.randrange(1, width + 2))]
        *context, words[q] = [rng.randrange(size) for _ in range(rng.randrange(2))] + ngram
        lengths[q] = length = min(len(context), width)
        if length:
            contexts[q, width - length :] = context[-length:]
    return contexts, lengths, words


def assert_equals_oracle(
    answers: Answers,
    oracle: DictModel,
    contexts: NDArray[np.uint32],
    lengths: NDArray[np.uint8],
    words: NDArray[np.uint32],
) -> None:
    """Every answer has the oracle's bits."""
    width = contexts.shape[1]
    for q, (length, word) in enumerate(zip(lengths.tolist(), words.tolist(), strict=True)):
        context = contexts[q, width - length :].tolist()
        expected = oracle.score(context, word)
        found = (
            answers.log10_prob[q].tobytes(),
            int(answers.matched_order[q]),
            int(answers.ngram_length[q]),
            int(answers.state_length[q]),
        )
        assert found == (
            expected.log10_prob.tobytes(),
            expected.matched_order,
            expected.ngram_length,
            expected.state_length,
        ), (context, word, expected, answers.log10_prob[q])


def packed(answers: Answers) -> NDArray[np.uint8]:
    """(7 Q,): as a server's search leaves them."""
    small = answers.matched_order, answers.ngram_length, answers.state_length
    return np.concatenate([answers.log10_prob.view(np.uint8), *small])
