"""Sorts and merges rows. The kernels use no Python objects and no GIL.

A *packed* number is some bits of a row's key above the row's place: the numbers are all different,
so any sort of them, stable or not, gives the one order in which equal keys stay as they came. A key
too long for one number is cut into *levels*, which `sort.cut_key` lays out as *segments*:
consecutive bits of one column.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import kernel

INSERTION = 24  # rows up to which insertion is the fastest sort
LARGEST = np.uint64(0xFFFFFFFF)
SMALL = 512  # rows up to which a sort here beats a return to the caller and numpy's sort


@kernel("uint32[:, :], out uint32[:], out uint32[:]")
def column_range(rows, low, high):  # type: ignore[no-untyped-def]
    """Fills low and high (K,) with the least and largest values of rows (n, W), columns 0 to K - 1.

    Trusts  K <= W and n >= 1, which sorter.Sorter checks
    """
    for j in range(len(low)):
        low[j] = rows[0, j]
        high[j] = rows[0, j]
    for i in range(len(rows)):
        for j in range(len(low)):
            value = rows[i, j]
            if value < low[j]:
                low[j] = value
            if value > high[j]:
                high[j] = value


@kernel("uint32[:, :], out uint64[:], int64, int64, bool, int64, int64[:], int64[:, :], int64")
def pack(rows, packed, begin, end, first, level, level_begin, segments, place_bits):  # type: ignore[no-untyped-def]
    """Packs one level of the rows' keys, for rows whose places are in packed[begin:end].

    Shapes   rows (n, W)
             packed (n,)  places in the low `place_bits` bits; replaced from begin to end
             first  whether packed is still empty, so that the places are begin .. end - 1
             level_begin (L + 1,)  where each level begins in segments
             segments (S, 4)  column, value to subtract, bits to drop, bits to keep
    Returns  whether the new numbers are in ascending order
    Trusts   places below n and level < L, as sort.sort_order makes them
    """
    place_shift = np.uint64(place_bits)
    mask = (np.uint64(1) << place_shift) - np.uint64(1)
    ascending = True
    before = np.uint64(0)
    for i in range(begin, end):
        place = np.uint64(i) if first else packed[i] & mask
        row = np.int64(place)
        bits = np.uint64(0)
        for s in range(level_begin[level], level_begin[level + 1]):
            value = np.uint64(rows[row, segments[s, 0]]) - np.uint64(segments[s, 1])
            keep = np.uint64(segments[s, 3])
            value = (value >> np.uint64(segments[s, 2])) & ((np.uint64(1) << keep) - np.uint64(1))
            bits = (bits << keep) | value
        number = (bits << place_shift) | place
        if number < before:
            ascending = False
        before = number
        packed[i] = number
    return ascending


@kernel
def _sort_small(packed, begin, end):  # type: ignore[no-untyped-def]
    if end - begin > INSERTION:
        packed[begin:end].sort()
        return
    for i in range(begin + 1, end):
        number = packed[i]
        j = i
        while j > begin and packed[j - 1] > number:
            packed[j] = packed[j - 1]
            j -= 1
        packed[j] = number


@kernel("uint32[:, :], out uint64[:], out int64[:, :], int64, int64[:], int64[:, :], int64")
def refine(rows, packed, frames, depth, level_begin, segments, place_bits):  # type: ignore[no-untyped-def]
    """Sorts rows with equal first levels by the later levels; stops where a sort is large.

    Args     rows, level_begin, segments, place_bits  as in `pack`
             packed (n,)  sorted by level d inside the frame of depth d
             frames (L, 2)  of each level: begin and end, in packed, of the rows still to sort
             depth  the deepest frame in use; frames[0] covers the caller's part at the first call
    Returns  (begin, end, depth): the caller sorts packed[begin:end] and calls again; begin is -1
             when all is done
    Trusts   as `pack` does, and that sort.sort_order makes no frame that cuts a group
    """
    place_shift = np.uint64(place_bits)
    levels = len(level_begin) - 1
    while depth >= 0:
        i = frames[depth, 0]
        limit = frames[depth, 1]
        if depth + 1 == levels or i >= limit:
            depth -= 1
            continue
        bits = packed[i] >> place_shift
        end = i + 1
        while end < limit and packed[end] >> place_shift == bits:
            end += 1
        frames[depth, 0] = end
        if end - i == 1:
            continue
        depth += 1
        frames[depth, 0] = i
        frames[depth, 1] = end
        ascending = pack(rows, packed, i, end, False, depth, level_begin, segments, place_bits)
        if not ascending:
            if end - i > SMALL:
                return i, end, depth
            _sort_small(packed, i, end)
    return np.int64(-1), np.int64(-1), np.int64(-1)


@kernel("uint64[:], int64, int64")
def group_end(packed, at, place_bits):  # type: ignore[no-untyped-def]
    """Returns the first place from `at` (1 to n) on where a group of equal keys begins."""
    shift = np.uint64(place_bits)
    while at < len(packed) and packed[at] >> shift == packed[at - 1] >> shift:
        at += 1
    return at


@kernel("uint32[:, :], uint64[:], int64, out uint32[:, :]")
def gather(rows, packed, place_bits, out):  # type: ignore[no-untyped-def]
    """Copies the rows (n, W) at the places in `packed` (m,) to `out` (m, W), in that order.

    Trusts  places below n, as `pack` writes them
    """
    mask = (np.uint64(1) << np.uint64(place_bits)) - np.uint64(1)
    width = rows.shape[1]
    for i in range(len(packed)):
        row = np.int64(packed[i] & mask)
        for j in range(width):
            out[i, j] = rows[row, j]


@kernel
def _head(rows, row, key):  # type: ignore[no-untyped-def]
    head = np.uint64(rows[row, 0]) << np.uint64(32)
    if key > 1:
        head |= np.uint64(rows[row, 1])
    return head


@kernel
def _tie_before(rows, key, run_a, row_a, run_b, row_b):  # type: ignore[no-untyped-def]
    """Returns whether row a precedes row b, which has the same head; the run decides ties."""
    for j in range(2, key):
        a = rows[row_a, j]
        b = rows[row_b, j]
        if a != b:
            return a < b
    return run_a < run_b


@kernel(
    "uint32[:, :], out int64[:], int64[:], int64, out uint64[:], out int64[:], "
    "out uint32[:, :], int64"
)
def merge(rows, place, end, key, head, tree, out, filled):  # type: ignore[no-untyped-def]
    """Merges sorted runs until `out` is full or the buffer of one run is empty.

    Shapes      rows (n, W)  the buffers of all runs
                out (m, W)  filled from row `filled` on
                place, end (k,)  where each run's unmerged rows begin and end; place is advanced
                head (k,)  scratch: the head of each run's next row
                tree (k,)  scratch: at node i >= 1, the loser of the match between the winners of
                    nodes 2 i and 2 i + 1; nodes k .. 2 k - 1 are the runs, in the order added
    Returns     (rows of out that are filled, run whose buffer is empty or -1)
    Guarantees  rows with equal keys come in the order of their runs
    Cost        log2 k comparisons per row, and 2 k per call
    Trusts      k >= 1, 0 <= place < end <= n and filled < m, as merge.merged makes them
    """
    runs = len(place)
    width = rows.shape[1]
    room = len(out)
    if runs == 1:
        copied = min(room - filled, end[0] - place[0])
        for i in range(copied):
            for j in range(width):
                out[filled + i, j] = rows[place[0] + i, j]
        place[0] += copied
        return filled + copied, np.int64(0 if place[0] == end[0] else -1)
    winner = np.int64(-1)
    for i in range(runs):
        head[i] = _head(rows, place[i], key)
        tree[i] = -1
    for i in range(runs):
        winner = np.int64(i)
        node = (winner + runs) >> 1
        while node >= 1:
            other = tree[node]
            if other < 0:  # the match waits for its second run
                tree[node] = winner
                break
            if head[other] < head[winner] or (
                head[other] == head[winner]
                and _tie_before(rows, key, other, place[other], winner, place[winner])
            ):
                tree[node] = winner
                winner = other
            node >>= 1
    while filled < room:
        at = place[winner]
        for j in range(width):
            out[filled, j] = rows[at, j]
        filled += 1
        at += 1
        place[winner] = at
        if at == end[winner]:
            return filled, winner
        winner_head = _head(rows, at, key)
        head[winner] = winner_head
        node = (winner + runs) >> 1
        while node >= 1:
            other = tree[node]
            other_head = head[other]
            if other_head == winner_head:
                wins = _tie_before(rows, key, other, place[other], winner, place[winner])
            else:
                wins = other_head < winner_head
            # The winner is unpredictable, so this selects instead of branching.
            tree[node] = winner if wins else other
            winner = other if wins else winner
            winner_head = other_head if wins else winner_head
            node >>= 1
    return filled, np.int64(-1)


@kernel("out uint32[:, :]")
def add_up(rows):  # type: ignore[no-untyped-def]
    """Adds up the last numbers of neighbouring rows (n, W) that are otherwise equal, into one row.

    Returns     how many rows are left, at the beginning
    Guarantees  rows whose sum would exceed 32 bits stay separate
    Trusts      n >= 1
    """
    last = rows.shape[1] - 1
    found = np.int64(0)
    for i in range(1, len(rows)):
        total = np.uint64(rows[found, last]) + np.uint64(rows[i, last])
        same = total <= LARGEST
        for j in range(last):
            same &= rows[i, j] == rows[found, j]
        if same:
            rows[found, last] = np.uint32(total)
            continue
        found += 1
        if found < i:
            for j in range(last + 1):
                rows[found, j] = rows[i, j]
    return found + 1
