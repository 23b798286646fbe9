"""Models of text as ids over a given vocabulary; and the text that a network says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORDER = 3
MEMORY = 4 << 30
F32, U32 = np.float32, np.uint32
Ids = NDArray[np.uint32]


def witten_bell(text: Ids, vocabulary: Any) -> Any:
    """Interpolated Witten-Bell: P(w | h) = (c(hw) + T(h) P(w | h')) / (c(h) + T(h)), where T(h) is
    how many words follow h; words never seen share T evenly."""
    from dlm.estimate.columns import ModelColumns

    size = len(vocabulary)
    begin, end = vocabulary.begin_id, vocabulary.end_id
    starts = np.flatnonzero(np.concatenate([[True], text[:-1] == end]))
    padded = np.insert(text, starts, begin).astype(np.int64)
    grams: list[NDArray[np.int64]] = [padded]
    for _ in range(1, ORDER):
        grams.append(grams[-1][:-1] * size + padded[len(padded) - len(grams[-1]) + 1 :])
    counted = []
    for order, keys in enumerate(grams, 1):
        last = keys % size
        inside = last != begin
        if order > 1:  # no n-gram across an end, or with the begin behind its first word
            for back in range(1, order):
                inside &= (keys // size**back) % size != end
            for back in range(order - 1):
                inside &= (keys // size**back) % size != begin
        counted.append(np.unique(keys[inside], return_counts=True))
    keys, count = counted[0]
    prob = np.zeros(size)
    seen, total = len(keys), count.sum()
    prob[:] = seen / (total + seen) / (size - 1)
    prob[keys] += count / (total + seen)
    prob[begin] = 0.0
    lower, lower_keys = prob, np.arange(size)
    sections = []
    for order in range(2, ORDER + 1):
        keys, count = counted[order - 1]
        context = keys // size
        contexts, at = np.unique(context, return_inverse=True)
        types, total = np.bincount(at), np.bincount(at, count)
        weight = types / (total + types)
        suffix = keys % size ** (order - 1)
        here = count / (total + types)[at] + weight[at] * lower[np.searchsorted(lower_keys, suffix)]
        backoff = np.zeros(len(lower_keys))
        backoff[np.searchsorted(lower_keys, contexts)] = np.log10(weight)
        sections.append(_section(lower_keys, order - 1, size, lower, backoff))
        lower, lower_keys = here, keys
    sections.append(_section(lower_keys, ORDER, size, lower, np.zeros(len(lower_keys))))
    return ModelColumns.of(vocabulary, sections)


def _section(
    keys: NDArray[np.int64], order: int, size: int, prob: Any, backoff: Any
) -> tuple[Any, Any, Any]:
    ids = np.stack([keys // size**back % size for back in range(order - 1, -1, -1)], axis=1)
    with np.errstate(divide="ignore"):
        log10 = np.maximum(np.log10(prob), -99.0)
    return ids.astype(U32), log10.astype(F32), backoff.astype(F32)


def kneser_ney(text: Ids, vocabulary: Any, folder: Path) -> Any:
    """`dlm estimate` of the text, over the words of the network; those not seen share <unk>'s."""
    from dlm.estimate.columns import ModelColumns
    from dlm.estimate.pipeline import estimate
    from dlm.estimate.settings import DEFAULT_FALLBACK, EstimationSettings

    plain, arpa = folder / "sampled.txt", folder / "sampled.arpa"
    # Words are written as their ids, since the network says <unk> as any other word.
    with plain.open("w") as out:
        line: list[str] = []
        for word in text.tolist():
            if word == vocabulary.end_id:
                out.write(" ".join(line) + "\n")
                line = []
            else:
                line.append(str(word))
    settings = EstimationSettings(order=ORDER, fallback=DEFAULT_FALLBACK, memory_bytes=MEMORY)
    estimate([str(plain)], arpa, settings)
    found = ModelColumns.read(arpa)
    marks = {b"<s>": vocabulary.begin_id, b"</s>": vocabulary.end_id}
    own = np.array(
        [marks[w] if w in marks else 0 if w == b"<unk>" else int(w) for w in found.vocabulary.words]
    ).astype(U32)
    first = found.orders[0]
    prob = np.zeros(len(vocabulary))
    is_unk = np.array([w == b"<unk>" for w in found.vocabulary.words])
    prob[own[~is_unk]] = 10.0 ** first.log10_prob[~is_unk].astype(float)
    unseen = prob == 0
    unseen[vocabulary.begin_id] = False
    left = float(10.0 ** first.log10_prob[is_unk].astype(float).sum())
    if unseen.any():
        prob[unseen] = left / unseen.sum()
    else:
        prob /= prob[np.arange(len(prob)) != vocabulary.begin_id].sum()
    backoff = np.zeros(len(vocabulary), F32)
    backoff[own[~is_unk]] = first.log10_backoff[~is_unk]
    words = np.arange(len(vocabulary), dtype=U32)[:, None]
    with np.errstate(divide="ignore"):
        log10 = np.maximum(np.log10(prob), -99.0).astype(F32)
    log10[vocabulary.begin_id] = -99.0
    sections = [(words, log10, backoff)]
    sections += [(own[c.ids], c.log10_prob, c.log10_backoff) for c in found.orders[1:]]
    return ModelColumns.of(vocabulary, sections)


def pruned(model: Any, ngrams: int) -> Any:
    """By relative entropy, suffixes kept, as all topologies here have them."""
    from dlm.estimate.prune import Goal, prune

    if sum(model.counts) <= ngrams:
        return model
    return prune(model, Goal(ngrams=ngrams), keep_suffixes=True).model


def sampled_text(visits: Iterator[Any], vocabulary: Any) -> Ids:
    """What was said, sentence after sentence, an end after each; a cut one is ended, too."""
    seen = [(visit.places.astype(np.int32), visit.words.astype(U32)) for visit in visits]
    places, words = map(np.concatenate, zip(*seen, strict=True))
    said = words[np.argsort(places, kind="stable")]
    # Each begin but the first ends what stood before it.
    said[said == vocabulary.begin_id] = vocabulary.end_id
    return np.append(said[1:], U32(vocabulary.end_id))
