"""Few slots move, and every shard comes within the bound: compared with the plain form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from dlm.errors import ConfigError
from dlm.index.moving import plan
from dlm.index.moving.plan import (
    BOUND,
    imbalance_of,
    loads_of,
    plan_slots,
    replicas_needed,
)
from dlm.ngram.partition import MAX_SHARDS, SLOTS, balanced_slot_table

FEW = 64  # slots, so that the plain form is quick


def plainly(table: list[int], weight: list[int], shards: int, gone: list[int]) -> list[int]:
    """The new shard of each slot, by lists and loops."""
    scaled = [FEW * w + 1 for w in weight]
    before = max(table) + 1
    names: dict[int, int] = {old: old for old in range(min(before, shards)) if old not in gone}
    spare = [old for old in range(shards, before) if old not in gone]
    names |= dict(zip(spare, [old for old in sorted(gone) if old < shards], strict=True))
    own = [names.get(old, -1) for old in table]
    still = [slot for slot in range(FEW) if own[slot] >= 0]

    def load(shard: int) -> int:
        return sum(scaled[slot] for slot in range(FEW) if own[slot] == shard)

    def lightest() -> int:
        return min(range(shards), key=load)

    for slot in sorted(set(range(FEW)) - set(still), key=lambda slot: (-scaled[slot], slot)):
        own[slot] = lightest()
    rest = sorted(scaled, reverse=True)
    while len(rest) > FEW - shards + 1 and rest[0] * (shards - FEW + len(rest)) > sum(rest):
        rest = rest[1:]
    mean = sum(rest) // (shards - FEW + len(rest))
    stuck: set[int] = set()
    while len(stuck) < shards:
        giver = max((s for s in range(shards) if s not in stuck), key=lambda s: (load(s), -s))
        taker = lightest()
        if load(giver) <= int(mean * BOUND):
            break
        slots = [slot for slot in still if own[slot] == giver]
        room = min(load(giver) - mean, mean + 1 - load(taker))
        small = [slot for slot in slots if scaled[slot] <= room]
        helpful = [slot for slot in slots if scaled[slot] < load(giver) - load(taker)]
        if small:
            best = max(small, key=lambda slot: (scaled[slot], -slot))
        elif helpful:
            high, low = load(giver), load(taker)
            best = min(helpful, key=lambda x: (max(high - scaled[x], low + scaled[x]), x))
        else:
            stuck.add(giver)
            continue
        own[best] = taker
        still.remove(best)
    return own


WEIGHTS = st.one_of(st.integers(0, 9), st.integers(0, 1000), st.just(5000))


@pytest.mark.promise("memory_and_reshard")
@given(st.data())
@settings(
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_the_plan_is_that_of_the_plain_form(monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    """Any weights, more shards and fewer, any of them removed; and what every plan holds to."""
    monkeypatch.setattr(plan, "SLOTS", FEW)
    weight = np.array(data.draw(st.lists(WEIGHTS, min_size=FEW, max_size=FEW)))
    before, shards = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    table = np.concatenate([np.arange(before), data.draw(st.permutations(range(FEW - before)))])
    table = (table % before).astype(np.uint16)
    gone = data.draw(st.permutations(range(before)))[: max(before - shards, 0)]
    found = plan_slots(table, weight, shards, removed=gone)
    assert found.after.tolist() == plainly(table.tolist(), weight.tolist(), shards, list(gone))
    assert set(found.after.tolist()) == set(range(shards))
    assert sum(slots for _, _, slots, _ in found.flows(weight)) == len(found.moved)
    again = plan_slots(found.after, weight, shards)
    if loads_of(found.after, weight, shards).max() * shards <= BOUND * weight.sum():
        assert len(again.moved) <= len(found.moved)
    kept = found.origin[found.origin >= 0]
    assert sorted([*kept.tolist(), *gone]) == list(range(before))


@pytest.mark.promise("memory_and_reshard")
@pytest.mark.parametrize("shards", [4, 128])
def test_a_slot_with_a_fifth_of_all_queries_gets_the_others_out_of_its_way(shards: int) -> None:
    """On few servers the others make room; on many its shard keeps nothing else, and replicas."""
    load = np.full(SLOTS, 1000)
    load[7] = load.sum() // 4
    table = balanced_slot_table(np.ones(SLOTS, np.int64), shards)
    found = plan_slots(table, load, shards)
    each = loads_of(found.after, load, shards)
    servers = replicas_needed(each, load)
    assert imbalance_of(loads_of(table, load, shards)) > 1.5
    assert imbalance_of(each, servers) < 1.03
    hot = int(found.after[7])
    assert servers[hot] == (32 if shards == 128 else 1)
    assert servers.sum() == shards + servers[hot] - 1
    assert (found.after == hot).sum() == 1 or shards == 4


@pytest.mark.parametrize(
    ("shards", "removed", "said"),
    [
        (0, None, "0"),
        (MAX_SHARDS + 1, None, "4,096"),
        (3, [0, 1], "^2 shards"),
        (3, [4], "4"),
        (2, [1, 1], "1, 1"),
        (5, [1], "^1 shards"),
    ],
)
def test_a_change_that_cannot_be_is_refused(
    shards: int, removed: list[int] | None, said: str
) -> None:
    """Numbers of shards that slots do not allow, and choices of shards that do not add up."""
    weight = np.ones(SLOTS, np.int64)
    with pytest.raises(ConfigError, match=said):
        plan_slots(balanced_slot_table(weight, 4), weight, shards, removed=removed)


@pytest.mark.parametrize("weight", [np.full(SLOTS, 1 << 40), np.full(SLOTS, -1), np.ones(5)])
def test_weights_that_no_set_has_are_refused(weight: Any) -> None:
    """Sums that would not fit in 63 bits, negative ones, and another number of slots."""
    with pytest.raises(ConfigError, match=r"expected 4096|at least 0"):
        plan_slots(np.zeros(SLOTS, np.uint16), weight, 2)
