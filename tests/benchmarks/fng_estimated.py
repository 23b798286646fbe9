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
