"""The topology of a distilled model: the n-grams of a `ModelColumns`, whose values are ignored. It
is closed: it contains the prefix and the suffix of each n-gram, and each word of the source."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.estimate.merge.union import Walk, unite
from dlm.ngram.vocab import UNK_ID, Vocabulary

U32, F32 = np.uint32, np.float32


@dataclass(frozen=True)
class Restriction:
    """A topology in the words of a source, with the source's ids. `foreign_words` is the number
    of words that the source lacks; `dropped` counts n-grams of order 2 or more with such words."""

    model: ModelColumns
    foreign_words: int
    dropped: int


def restricted(topology: ModelColumns, vocabulary: Vocabulary) -> Restriction:
    """Keeps the n-grams of a topology whose words a source knows, with the source's ids, and adds
    the source's other words; ConfigError if the topology is empty, or no n-gram is left."""
    known = np.fromiter((word in vocabulary.ids for word in topology.vocabulary.words), np.bool_)
    ordinary = known.copy()
    own = topology.vocabulary
    ordinary[[UNK_ID, own.begin_id, own.end_id]] = False
    if len(known) <= 3:
        raise ConfigError(
            "the topology is empty: it has no words except <unk> and the sentence marks; give a "
            "topology with words"
        )
    if not ordinary.any():
        raise ConfigError(
            f"the source knows none of the topology's {len(known) - 3:,} words; give a topology "
            "of the source's words, in the same spelling and case"
        )
    # Row 0 is <unk>, even for a model without <unk>.
    known[UNK_ID] = vocabulary.unk_in_model
    foreign = int((~known[1:]).sum()) + (own.unk_in_model and not vocabulary.unk_in_model)
    ids = vocabulary.ids_of(topology.vocabulary.words)
    words = np.arange(len(vocabulary), dtype=U32)[:, None]
    sections = [without_values(words)]
    dropped = left = 0
    for columns in topology.orders[1:]:
        stays = known[columns.ids].all(axis=1)
        sections.append(without_values(ids[columns.ids[stays]]))
        dropped += len(columns) - int(stays.sum())
        left += int(stays.sum())
    if dropped and not left:
        raise ConfigError(
            f"each of the topology's {dropped:,} n-grams has a word that the source does not know; "
            "give a topology of the source's words, in the same spelling and case"
        )
    while len(sections) > 1 and not len(sections[-1][0]):
        sections.pop()
    return Restriction(ModelColumns.of(vocabulary, sections), foreign, dropped)


def closed(topology: ModelColumns, threads: int = 2) -> ModelColumns:
    """Adds the suffixes that a topology, such as a pruned model, lacks. The state after a history
    is then its longest suffix in the topology, as backing off and counting assume."""
    return united([topology], threads)


def united(topologies: list[ModelColumns], threads: int = 2) -> ModelColumns:
    """Returns the union of topologies with the same vocabulary, plus all suffixes."""
    union = unite(topologies)
    if len(topologies) == 1 and union.blanks is None:
        return topologies[0]
    with ThreadPoolExecutor(threads, "distill") as pool:
        sections = [without_values(nodes.ids) for nodes in Walk(union, pool, threads).orders()]
    return ModelColumns.of(topologies[0].vocabulary, sections)


def first_child(topology: ModelColumns, length: int) -> NDArray[np.uint32]:
    """Returns where the n-grams of each context of `length` words begin, then where all end."""
    if length == 0:
        return np.array([0, len(topology.orders[0])], U32)
    return topology.orders[length - 1].first_child


def without_values(
    ids: NDArray[np.uint32],
) -> tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]:
    return ids, np.zeros(len(ids), F32), np.zeros(len(ids), F32)
