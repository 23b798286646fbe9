"""Packs a user's utterances, given as token ids, into batches of equal shape.

Ids follow a wordpiece model's defaults: 0 is an unknown word, 1 begins an utterance, 2 ends it, and
words or pieces start at 3. In batches, -1 marks empty positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError

OOV_ID = 0
BOS_ID = 1
EOS_ID = 2
FIRST_WORD_ID = 3
PAD = -1

Ids: TypeAlias = NDArray[np.int32]
Packing = Literal["utterances", "stream"]


def check_ids(utterances: Sequence[Ids], vocab_size: int) -> None:
    """Raises ConfigError for ids that have no row in the model, and for marks, which only packing
    may add: a run must not train with a wrong vocabulary."""
    for ids in utterances:
        if not len(ids):
            continue
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise ConfigError(
                f"an utterance holds id {low if low < 0 else high}, but the model's vocabulary has "
                f"ids 0 to {vocab_size - 1}; encode with the vocabulary that the model was made for"
            )
        if np.any((ids == BOS_ID) | (ids == EOS_ID)):
            raise ConfigError(
                f"an utterance holds id {BOS_ID} or {EOS_ID}, the marks of its start and end, "
                "which packing adds; encode utterances without them"
            )


def sequence(ids: Ids) -> Ids:
    out = np.empty(len(ids) + 2, np.int32)
    out[0], out[1:-1], out[-1] = BOS_ID, ids, EOS_ID
    return out


def windows(whole: Ids, unroll: int) -> Ids:
    """Cuts the sequence (n >= 2,) into rows of `unroll` inputs and their targets, each target once.

    Returns (w, unroll + 1) int32, padded with -1; a row's first id is the previous row's last, so
    that no target is lost at a cut.
    """
    targets = len(whole) - 1
    rows = -(-targets // unroll)
    out = np.full((rows, unroll + 1), PAD, np.int32)
    for row in range(rows):
        part = whole[row * unroll : row * unroll + unroll + 1]
        out[row, : len(part)] = part
    return out


def pack(
    utterances: Sequence[Ids],
    *,
    batch_size: int,
    unroll: int,
    packing: Packing,
    max_batches: int | None = None,
    shuffle: np.random.Generator | None = None,
) -> Ids:
    """Returns a user's utterances as batches, (batches, batch_size, unroll + 1) int32.

    `"utterances"` gives every utterance (or every `unroll` tokens of a long one) a separate row,
    which starts from a zero state. `"stream"` joins the utterances, lays them out in `batch_size`
    rows and cuts all rows at the same positions, so that a state can pass from batch to batch.

    Args
        max_batches  maximum batches in a round; the rest of the text waits for another round
        shuffle      draws the order of the utterances (stream) or rows; None keeps the text's order
    Raises  ConfigError  the user has no text at all
    """
    kept = [ids for ids in utterances if len(ids)]
    if not kept:
        raise ConfigError("a user without any text cannot train; leave the user out")
    if packing == "stream":
        if shuffle is not None:
            kept = [kept[i] for i in shuffle.permutation(len(kept))]
        stream = np.concatenate([sequence(ids) for ids in kept])
        per_row = -(-(len(stream) - 1) // batch_size)
        rows = [
            windows(part, unroll) if len(part) >= 2 else np.empty((0, unroll + 1), np.int32)
            for part in (stream[r * per_row : r * per_row + per_row + 1] for r in range(batch_size))
        ]
        out = np.full((len(rows[0]), batch_size, unroll + 1), PAD, np.int32)
        for row, part in enumerate(rows):
            out[: len(part), row] = part
    else:
        cut = np.concatenate([windows(sequence(ids), unroll) for ids in kept])
        if shuffle is not None:
            cut = cut[shuffle.permutation(len(cut))]
        batches = -(-len(cut) // batch_size)
        out = np.full((batches, batch_size, unroll + 1), PAD, np.int32)
        out.reshape(-1, unroll + 1)[: len(cut)] = cut
    return out if max_batches is None else out[:max_batches]


def target_count(batches: Ids) -> int:
    """Counts the tokens to predict: n_k, the number of a user's examples."""
    return int(np.count_nonzero(batches[..., 1:] >= 0))
