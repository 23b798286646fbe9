"""Plans which slots move when a shard set is rebalanced, or gets more or fewer shards.

A slot is never split, and a move rewrites the files of two shards. So the plan moves as few slots
as needed to bring every shard within a bound of the mean. A shard that stays heavier, because of
one heavy slot, needs replicas: `replicas_needed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError
from dlm.index.settings import ReshardSettings
from dlm.ngram.partition import SLOTS, check_shards

# A shard whose load is below this many times the mean of the others gets no replica: each of its
# two servers would have less than three quarters of the mean load of the others.
HOT = 1.5
BOUND = ReshardSettings().bound
MOST_WEIGHT = 1 << 50  # limit of the sum over all slots: sums stay below 2^63

Table = NDArray[np.uint16]
Weight = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """A new slot table, and its relation to the old one.

    before, after  (4096,)  the shard of each slot
    origin         (shards,)  for each new shard, the old one whose slots it starts with; -1: none.
                   Shards keep their numbers, except those that take a removed shard's number
    """

    before: Table
    after: Table
    origin: NDArray[np.int64]

    @property
    def moved(self) -> NDArray[np.int64]:
        """The slots that move, ascending: those that their new shard did not hold before."""
        return np.flatnonzero(self.origin[self.after] != self.before)

    def flows(self, weight: Weight) -> list[tuple[int, int, int, int]]:
        """Returns the moves as (old shard, new shard, slots, weight), the heaviest first."""
        moved = self.moved
        pairs = np.stack([self.before[moved], self.after[moved]]).T.astype(np.int64)
        ways, which, slots = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
        total = np.zeros(len(ways), np.int64)
        np.add.at(total, which.reshape(-1), weight[moved])
        rows = zip(ways.tolist(), slots.tolist(), total.tolist(), strict=True)
        found = [(old, new, count, heavy) for (old, new), count, heavy in rows]
        return sorted(found, key=lambda row: (-row[3], -row[2], row[:2]))


def plan_slots(
    table: Table,
    weight: Weight,
    shards: int,
    *,
    removed: Sequence[int] | None = None,
    bound: float = BOUND,
) -> SlotPlan:
    """Moves few slots, so that no shard weighs more than `bound` times the mean.

    A slot that outweighs the mean keeps a shard to itself; the mean is then taken over the others.

    Slots of removed shards move first, the heaviest first, each to the lightest shard. Then, while
    a shard is above the bound, the heaviest shard gives a slot to the lightest: the largest slot
    that keeps the giver above the mean and the taker below it; if there is none, the slot that
    brings both closest together. A shard without such a slot keeps its slots. No slot moves twice.

    Shapes      table, weight (4096,)  each slot's shard; each slot's bytes, or recorded queries
    Args        removed  numbers of the removed shards, as many as the set loses; by default the
                         last ones. Kept shards numbered `shards` or above take over these numbers
    Raises      ConfigError  an impossible number of shards, or choice of removed ones
    Guarantees  the same plan for the same arguments, on every machine; nothing moves if every shard
                is within the bound and none is removed. Slots without weight count a little, which
                only breaks ties, so that every new shard gets some slots
    """
    check_shards(shards)
    if len(table) != SLOTS or len(weight) != SLOTS:
        raise ConfigError(
            f"the table has {len(table)} slots and there are {len(weight)} weights; expected "
            f"{SLOTS} of each"
        )
    if int(weight.min()) < 0 or float(weight.sum(dtype=np.float64)) > MOST_WEIGHT:
        raise ConfigError(
            f"the weights of the slots must be at least 0, and their sum at most {MOST_WEIGHT:,}"
        )
    ReshardSettings(bound=bound)
    origin = _origins(int(table.max()) + 1, shards, removed)
    number = np.full(int(table.max()) + 1, -1)
    number[origin[origin >= 0]] = np.flatnonzero(origin >= 0)
    own = number[table]
    # Each slot counts slightly more than its weight, so that slots without weight break ties.
    scaled = weight.astype(np.int64) * SLOTS + 1
    free = own >= 0
    load = loads_of(own[free], scaled[free], shards)
    orphans = np.flatnonzero(~free)
    for slot in orphans[np.argsort(-scaled[orphans], kind="stable")]:
        own[slot] = np.argmin(load)
        load[own[slot]] += scaled[slot]
    mean = _mean_of_others(scaled, shards)
    limit = int(mean * bound)
    stuck = np.zeros(shards, np.bool_)
    while not stuck.all():
        giver = int(np.argmax(np.where(stuck, -1, load)))
        taker = int(np.argmin(load))
        if load[giver] <= limit:
            break
        slots = np.flatnonzero((own == giver) & free)
        slot = _slot_to_move(scaled, slots, int(load[giver]), int(load[taker]), mean)
        if slot is None:
            # The lightest shard only gets heavier, so this giver will have no slot to give later.
            stuck[giver] = True
            continue
        own[slot], free[slot] = taker, False
        load[giver] -= scaled[slot]
        load[taker] += scaled[slot]
    return SlotPlan(table, own.astype(np.uint16), origin)


def _slot_to_move(
    weight: Weight, slots: NDArray[np.int64], giver: int, taker: int, mean: int
) -> int | None:
    """Picks the best of the giver's slots to move, given both shards' loads; None if none helps."""
    own = weight[slots]
    room = min(giver - mean, mean + 1 - taker)
    fits = own <= room
    if fits.any():
        return int(slots[np.argmax(np.where(fits, own, -1))])
    helps = own < giver - taker
    if not helps.any():
        return None
    heavier = np.maximum(giver - own, taker + own)
    return int(slots[np.argmin(np.where(helps, heavier, np.iinfo(np.int64).max))])


def _mean_of_others(weight: Weight, shards: int) -> int:
    """Gives each slot above the mean its own shard; returns the mean load of the other shards."""
    total, left = int(weight.sum()), shards
    for heavy in np.sort(weight)[::-1][: shards - 1].tolist():
        if heavy * left <= total:
            break
        total, left = total - heavy, left - 1
    return total // left


def _origins(before: int, shards: int, removed: Sequence[int] | None) -> NDArray[np.int64]:
    gone = max(before - shards, 0)
    if removed is None:
        removed = range(shards, before)
    if len(set(removed)) != len(removed) or not all(0 <= one < before for one in removed):
        raise ConfigError(
            f"the removed shards are {list(removed)}; expected distinct shard numbers from 0 to "
            f"{before - 1}"
        )
    if len(removed) != gone:
        raise ConfigError(
            f"{len(removed)} shards to remove were named; going from {before} to {shards} shards "
            f"removes {gone}. Name that many, or none"
        )
    origin = np.full(shards, -1, np.int64)
    kept = min(before, shards)
    origin[:kept] = np.arange(kept)
    holes = sorted(one for one in removed if one < shards)
    movers = [one for one in range(shards, before) if one not in set(removed)]
    origin[holes] = movers
    return origin


def loads_of(table: Table, weight: Weight, shards: int) -> NDArray[np.int64]:
    """Returns (shards,) the summed weight of each shard's slots."""
    load = np.zeros(shards, np.int64)
    np.add.at(load, table, weight)
    return load


def imbalance_of(load: NDArray[np.int64], servers: NDArray[np.int64] | None = None) -> float:
    """Divides the busiest server's load by the mean, with `servers` (shards,) servers per shard."""
    each = np.ones(len(load), np.int64) if servers is None else servers
    total = int(load.sum())
    return float((load / each).max() * int(each.sum()) / total) if total else 1.0


def replicas_needed(load: NDArray[np.int64], weight: Weight) -> NDArray[np.int64]:
    """Returns (shards,) how many servers each shard needs: 1 or, if it is hot, enough that each is
    at most as busy as the busiest server of the shards that are not hot.

    Args  load  load of each shard;  weight  weight of each slot
    """
    servers = np.ones(len(load), np.int64)
    hot = load > HOT * max(_mean_of_others(weight, len(load)), 1)
    if hot.any():
        others = int(load[~hot].max(initial=0)) or -(-int(load.sum()) // len(load))
        servers[hot] = -(-load[hot] // others)
    return servers
