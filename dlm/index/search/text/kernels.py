"""Scores of consecutive words.

The context of a word is that of the word before and that word: the pair found when a word is scored
is the root of the next word's context, and an n-gram that was not found is no context. So each
list is searched once, where separate queries search it as a context and again for the word.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.index.packed.kernels import (
    find_few,
    find_key,
    offset_at,
    rank_bits,
    read_head,
)
from dlm.index.packed.low import BLANK, PAIR_FLAG_BITS, STATE_LENGTH, STORED
from dlm.index.search import view as at
from dlm.index.search.kernels import ANSWERS
from dlm.index.search.step_kernels import (
    ask_offset,
    find_near,
    log10_prob_of,
    open_list,
    share,
)
from dlm.jit import inlined, kernel
from dlm.ngram.digit_kernels import COUNT_BYTES, FIXED_BYTES, put_count, put_fixed
from dlm.ngram.memory_kernels import (
    as_float32,
    field,
    get,
    load_float32,
    mask_of,
    prefetch,
    two_fields,
)

TOKENS = 256  # of a block
STAGE = 32  # that go through a stage before the next begins
# Columns of the table of a block's tokens, and of that of a stage's searches; see index.kernels.
T_SIZE, T_RANK, T_LOW, T_BIT, T_FOUND, T_MATCHED, T_STATE, T_NODES, T_COLUMNS = range(9)
S_BIT, S_STEP, S_KEYS, S_REST, S_KEY, S_LOW, S_HIGH = range(7)
S_COLUMNS = 8

TAB, NEWLINE = ord("\t"), ord("\n")
ROW_BYTES = FIXED_BYTES + 2 * COUNT_BYTES + 3  # of `put_totals`

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)


@inlined
def child_at(view, level, node):  # type: ignore[no-untyped-def]
    return offset_at(
        view[level + at.N_CHILD],
        view[level + at.N_CHILD_BASE],
        view[level + at.N_CHILD_DELTA],
        view[level + at.N_CHILD_WIDE],
        node,
    )


@inlined
def keep_weight(view, level, n, place, weight, weight_at, address):  # type: ignore[no-untyped-def]
    """Where the weight of node n is stored, to be read when it is needed; see `score_tokens`."""
    bits = view[level + at.N_BACKOFF_BITS]
    code = get(view[level + at.N_BACKOFF], n * bits, bits)
    table = view[level + at.N_BACKOFF_TABLE]
    if table:
        address[place] = table + (code << _2)
    else:
        weight[place] = as_float32(code)
        address[place] = weight_at + (place << _2)


@kernel(f"int64[:], int64, uint32[:], uint8[:], {ANSWERS}")
def score_tokens(  # type: ignore[no-untyped-def]
    view, order, words, reach, log10_prob, matched_order, ngram_length, state_length
):
    """Scores each word after those before it.

    Shapes      view  view.tree_view of the one shard of a set;  order  N
                words  (T,)  word ids, sentence after sentence
                reach  (T,) uint8  words of the sentence before each, N - 1 at most
                log10_prob  (T,) float32 filled, like those after it
                matched_order, ngram_length, state_length  (T,) uint8
    Guarantees  equals ngram.backoff.score bit for bit
    Trusts      ids below the vocabulary's size; reach[i] <= reach[i - 1] + 1: checked in text.score
    """
    key_bits = view[at.KEY_BITS]
    key_mask = mask_of(key_bits)
    multiplier = view[at.MULTIPLIER]
    word_value = view[at.WORD_VALUE]
    word_bits = view[at.WORD_PROB_BITS] + _1
    word_table = view[at.WORD_PROB_TABLE]
    list_bit = view[at.LIST] << _3
    pair_backoff_bits = view[at.PAIR_BACKOFF_BITS]
    near_bits = view[at.PAIR_PROB_BITS] + np.int64(PAIR_FLAG_BITS)
    value_bits = near_bits + pair_backoff_bits
    pair_table = view[at.PAIR_PROB_TABLE]
    word_entry = view[at.WORD_ENTRY] << _3
    begin_bits = view[at.BEGIN_BITS]
    place_bits = view[at.PLACE_BITS]
    word_backoff_bits = view[at.WORD_BACKOFF_BITS]
    entry_bits = begin_bits + place_bits + word_backoff_bits
    roots = view[at.ROOTS]
    root_key_bits = view[at.ROOT_KEY_BITS]
    bucket_bits = view[at.ROOT_BUCKET_BITS]
    root_bucket = view[at.ROOT_BUCKET]
    root_key = view[at.ROOT_KEY]
    word_backoff_table = view[at.WORD_BACKOFF_TABLE]
    pair_backoff_table = view[at.PAIR_BACKOFF_TABLE]

    # Row i + 1 belongs to token i of the block, row 0 to the last one of the block before.
    count = np.int64(len(words))
    rows = min(count, np.int64(TOKENS)) + _1
    lengths = max(np.int64(order), _2) + _1
    # One allocation for all: those of each array took as long as two tokens.
    halves = (rows * lengths + _1) >> _1  # of arrays of float32
    places = rows * np.int64(T_COLUMNS + 3) + _3 + (2 * rows * lengths) + 2 * halves
    memory = np.zeros(places + np.int64(2 * STAGE + 1 + STAGE * S_COLUMNS), np.int64)
    end = rows * np.int64(T_COLUMNS)
    token = memory[:end].reshape(rows, T_COLUMNS)
    # By length k of the context that ends in the token: its node; its weight, where no table holds
    # it; and the address of its weight, which is read at the end if it is needed: most are not,
    # and the tables are larger than the near caches.
    node = memory[end : end + rows * lengths]
    end += rows * lengths
    address = memory[end : end + rows * lengths]
    end += rows * lengths
    weight = memory[end : end + halves].view(np.float32)
    end += halves
    best = memory[end : end + halves].view(np.float32)
    end += halves
    weight_at = np.int64(weight.ctypes.data)
    zero_at = weight_at  # the weight of no words
    address[:] = zero_at
    # Rows of tokens: those that a stage goes through. A row is written before it is known whether
    # it belongs, so that there is no branch to predict; hence one place more.
    found = memory[end : end + rows + _1]
    end += rows + _1
    live = memory[end : end + rows + _1]
    end += rows + _1
    kept = memory[end : end + rows + _1]
    end += rows + _1
    alone = memory[end : end + np.int64(2 * STAGE + 1)]
    end += np.int64(2 * STAGE + 1)
    # A search, by its place in its stage.
    search = memory[end : end + np.int64(STAGE * S_COLUMNS)].reshape(STAGE, S_COLUMNS)

    # The list of the word before.
    first, size, step, rest = _0, _0, _0, key_bits
    bit, keys = list_bit, list_bit

    for i in range(min(count, np.int64(STAGE))):
        entry = word_entry + np.int64(words[i]) * entry_bits
        prefetch(entry >> _3)
        prefetch((entry + entry_bits + begin_bits) >> _3)
    block = _0
    while block < count:
        here = min(count - block, np.int64(TOKENS))
        pairs = _0
        root_count = _0
        part = _0
        while part < here:
            asked = min(here - part, np.int64(STAGE))
            begin = block + part
            # --- 1. where the word should be in the list of the one before, and its own list
            for i in range(asked):
                word = np.int64(words[begin + i])
                key = (word * multiplier) & key_mask
                if reach[begin + i] == 0:
                    size, step = _0, _0
                at_bit = bit + (key >> rest) * step
                prefetch(at_bit >> _3)
                search[i, S_BIT] = at_bit
                search[i, S_STEP] = step
                search[i, S_KEYS] = keys
                search[i, S_REST] = rest
                search[i, S_HIGH] = size
                search[i, S_KEY] = key & mask_of(rest)
                t = part + i + _1
                token[t, T_SIZE] = size
                token[t, T_RANK] = first
                token[t, T_NODES] = _1
                entry = word_entry + word * entry_bits
                first = field(entry, begin_bits)
                size = field(entry + entry_bits, begin_bits) - first
                bit = list_bit + field(entry + begin_bits, place_bits)
                code = field(entry + begin_bits + place_bits, word_backoff_bits)
                place = t * lengths + _1
                if word_backoff_table:
                    address[place] = word_backoff_table + (code << _2)
                else:
                    weight[place] = as_float32(code)
                    address[place] = weight_at + (place << _2)
                step, keys, rest = open_list(bit, size, key_bits)
            after = begin + asked
            for i in range(after, min(after + np.int64(STAGE), count)):
                entry = word_entry + np.int64(words[i]) * entry_bits
                prefetch(entry >> _3)
                prefetch((entry + entry_bits + begin_bits) >> _3)
            # --- 2. the bucket
            for i in range(asked):
                width = search[i, S_STEP]
                low, high = two_fields(search[i, S_BIT], width)
                high = high if width else search[i, S_HIGH]
                stride = search[i, S_REST] + value_bits
                at_bit = search[i, S_KEYS] + low * stride
                prefetch(at_bit >> _3)
                prefetch((at_bit + (high - low) * stride) >> _3)
                search[i, S_LOW] = low
                search[i, S_HIGH] = high - low
                search[i, S_BIT] = at_bit
            # --- 3. the pair
            alone_count = _0
            stage_found = pairs
            for i in range(asked):
                t = part + i + _1
                entries = search[i, S_HIGH]
                width = search[i, S_REST]
                at_bit = search[i, S_BIT]
                place = find_few(at_bit, width, entries, search[i, S_KEY])
                there = np.int64(place < entries)
                # The number of the pair, for now.
                token[t, T_LOW] = search[i, S_LOW] + place
                token[t, T_BIT] = at_bit + entries * width + place * value_bits
                token[t, T_FOUND] = _1 + there
                token[t, T_MATCHED] = _1
                found[pairs] = t
                pairs += there
                alone[alone_count] = t
                alone_count += _1 - there
            for j in range(alone_count):
                word = np.int64(words[block + alone[j] - _1])
                prefetch(word_value + ((word * word_bits) >> _3))
            stage_roots = root_count
            for j in range(stage_found, pairs):
                t = found[j]
                at_bit = token[t, T_BIT]
                value = field(at_bit, near_bits)
                code = field(at_bit + near_bits, pair_backoff_bits)
                place = t * lengths + _2
                if pair_backoff_table:
                    address[place] = pair_backoff_table + (code << _2)
                else:
                    weight[place] = as_float32(code)
                    address[place] = weight_at + (place << _2)
                best[t] = log10_prob_of(value >> np.int64(PAIR_FLAG_BITS), pair_table)
                blank = np.int64(value & np.int64(BLANK) != 0)
                token[t, T_STATE] = value & np.int64(STATE_LENGTH)
                token[t, T_MATCHED] = np.int64(2) - blank
                alone[alone_count] = t
                alone_count += blank
                pair = token[t, T_RANK] + token[t, T_LOW]
                token[t, T_RANK] = token[t, T_LOW]
                prefetch(root_bucket + (((pair >> root_key_bits) * bucket_bits) >> _3))
                token[t, T_BIT] = pair
                kept[root_count] = t
                root_count += np.int64(value & np.int64(STORED) != 0)
            if roots == 0:
                root_count = _0
            # --- 4. the root that the pair is
            for j in range(stage_roots, root_count):
                i = j - stage_roots
                at_bit = (token[kept[j], T_BIT] >> root_key_bits) * bucket_bits
                low = get(root_bucket, at_bit, bucket_bits)
                search[i, S_LOW] = low
                search[i, S_HIGH] = get(root_bucket, at_bit + bucket_bits, bucket_bits) - low
                prefetch(root_key + ((low * root_key_bits) >> _3))
            for j in range(alone_count):
                t = alone[j]
                word = np.int64(words[block + t - _1])
                value = get(word_value, word * word_bits, word_bits)
                best[t] = log10_prob_of(value >> _1, word_table)
                if token[t, T_FOUND] == 1:
                    token[t, T_STATE] = value & _1
            level = np.int64(at.LEVEL)
            for j in range(stage_roots, root_count):
                t = kept[j]
                i = j - stage_roots
                low = search[i, S_LOW]
                target = token[t, T_BIT] & mask_of(root_key_bits)
                entries = search[i, S_HIGH]
                place = find_few(
                    (root_key << _3) + low * root_key_bits, root_key_bits, entries, target
                )
                if place < entries:
                    node[t * lengths + 2] = low + place
                    token[t, T_NODES] = np.int64(2)
                    ask_offset(
                        view[level + at.N_PLACE],
                        view[level + at.N_PLACE_BASE],
                        view[level + at.N_PLACE_DELTA],
                        low + place,
                    )
            part += asked
        # --- 5. longer contexts, a length at a time
        level = np.int64(at.LEVEL)
        k = np.int64(2)
        while k < order and pairs:
            # Words whose shorter context has them and whose context of k words is a node.
            alive = _0
            for j in range(pairs):
                t = found[j]
                live[alive] = t
                alive += np.int64(token[t - _1, T_NODES] >= k) & np.int64(
                    reach[block + t - _1] >= k
                )
            list_address = view[level + at.N_LIST] << _3
            place_address = view[level + at.N_PLACE]
            place_base = view[level + at.N_PLACE_BASE]
            place_delta = view[level + at.N_PLACE_DELTA]
            place_wide = view[level + at.N_PLACE_WIDE]
            flag_bits = view[level + at.N_FLAG_BITS]
            record = view[level + at.N_PROB_BITS] + flag_bits
            table = view[level + at.N_PROB_TABLE]
            pairs = _0
            extended = _0
            part = _0
            while part < alive:
                asked = min(alive - part, np.int64(STAGE))
                for i in range(asked):
                    n = node[(live[part + i] - _1) * lengths + k]
                    at_bit = list_address + offset_at(
                        place_address, place_base, place_delta, place_wide, n
                    )
                    search[i, S_BIT] = at_bit
                    prefetch(at_bit >> _3)
                for i in range(asked):
                    t = live[part + i]
                    shorter = token[t, T_SIZE]
                    rank = token[t, T_RANK]
                    at_bit = search[i, S_BIT]
                    entries, head = read_head(at_bit, shorter)
                    at_bit += head
                    if entries == shorter:
                        # All words of the shorter context follow: ranks are places.
                        width, start, left = _0, at_bit, _0
                        low, high = rank, rank + _1
                    else:
                        width, start, left = open_list(at_bit, entries, rank_bits(entries, shorter))
                        low, high = _0, entries
                    at_bit += (rank >> left) * width
                    prefetch(at_bit >> _3)
                    token[t, T_SIZE] = entries
                    search[i, S_BIT] = at_bit
                    search[i, S_STEP] = width
                    search[i, S_KEYS] = start
                    search[i, S_REST] = left
                    search[i, S_KEY] = rank & mask_of(left)
                    search[i, S_LOW] = low
                    search[i, S_HIGH] = high
                for i in range(asked):
                    width = search[i, S_STEP]
                    low, high = two_fields(search[i, S_BIT], width)
                    low = low if width else search[i, S_LOW]
                    high = high if width else search[i, S_HIGH]
                    at_bit = search[i, S_KEYS] + low * (search[i, S_REST] + record)
                    prefetch(at_bit >> _3)
                    prefetch((at_bit + (high - low) * (search[i, S_REST] + record)) >> _3)
                    search[i, S_LOW] = low
                    search[i, S_HIGH] = high - low
                    search[i, S_BIT] = at_bit
                stage_found = pairs
                for i in range(asked):
                    t = live[part + i]
                    entries = search[i, S_HIGH]
                    width = search[i, S_REST]
                    at_bit = search[i, S_BIT]
                    place = find_few(at_bit, width, entries, search[i, S_KEY])
                    place = place if width else _0
                    token[t, T_RANK] = search[i, S_LOW] + place
                    token[t, T_BIT] = at_bit + entries * width + place * record
                    found[pairs] = t
                    pairs += np.int64(place < entries)
                for j in range(stage_found, pairs):
                    t = found[j]
                    value = field(token[t, T_BIT], record)
                    token[t, T_FOUND] = k + _1
                    if flag_bits < 2 or value & np.int64(2) == 0:
                        best[t] = log10_prob_of(value >> flag_bits, table)
                        token[t, T_MATCHED] = k + _1
                    if flag_bits and value & _1:
                        token[t, T_STATE] = k + _1
                        # A suffix that nothing extends was left out, and is on the way here.
                        depth = token[t, T_NODES]
                        above = at.LEVEL + (depth - _2) * at.LEVEL_PLACES
                        while depth >= 2 and depth < k:
                            place = t * lengths + depth
                            key = (np.int64(words[block + t - depth - _1]) * multiplier) & key_mask
                            low = child_at(view, above, node[place])
                            high = child_at(view, above, node[place] + _1)
                            above += at.LEVEL_PLACES
                            n = find_key(view[above + at.N_KEY] << _3, key_bits, low, high, key)
                            if n < 0:
                                break
                            depth += _1
                            node[place + 1] = n
                            keep_weight(view, above, n, place + 1, weight, weight_at, address)
                            token[t, T_NODES] = depth
                        if token[t, T_NODES] == k:
                            ask_offset(
                                view[level + at.N_CHILD],
                                view[level + at.N_CHILD_BASE],
                                view[level + at.N_CHILD_DELTA],
                                node[t * lengths + k],
                            )
                            kept[extended] = t
                            extended += _1
                part += asked
            k += _1
            if k == order:
                break
            # Contexts of one word more: what nothing extends has no weight and no list.
            below = level + at.LEVEL_PLACES
            part = _0
            while part < extended:
                asked = min(extended - part, np.int64(STAGE))
                alive = _0
                for j in range(part, part + asked):
                    t = kept[j]
                    n = node[t * lengths + k - _1]
                    low = child_at(view, level, n)
                    high = child_at(view, level, n + _1)
                    if high > low:
                        key = (np.int64(words[block + t - k]) * multiplier) & key_mask
                        guess = low + share(key, high - low, key_bits)
                        prefetch(view[below + at.N_KEY] + ((guess * key_bits) >> _3))
                        search[alive, S_LOW] = low
                        search[alive, S_HIGH] = high
                        search[alive, S_BIT] = guess
                        search[alive, S_KEY] = key
                        live[alive] = t
                        alive += _1
                nodes = _0
                for i in range(alive):
                    t = live[i]
                    n = find_near(
                        view[below + at.N_KEY] << _3,
                        key_bits,
                        search[i, S_LOW],
                        search[i, S_HIGH],
                        search[i, S_BIT],
                        search[i, S_KEY],
                    )
                    if n >= 0:
                        node[t * lengths + k] = n
                        token[t, T_NODES] = k
                        bits = view[below + at.N_BACKOFF_BITS]
                        prefetch(view[below + at.N_BACKOFF] + ((n * bits) >> _3))
                        ask_offset(
                            view[below + at.N_PLACE],
                            view[below + at.N_PLACE_BASE],
                            view[below + at.N_PLACE_DELTA],
                            n,
                        )
                        live[nodes] = t
                        nodes += _1
                for i in range(nodes):
                    place = live[i] * lengths + k
                    keep_weight(view, below, node[place], place, weight, weight_at, address)
                part += asked
            level = below
        # --- 6. the answers
        for i in range(here):
            longest = min(np.int64(reach[block + i]), token[i, T_STATE])
            matched = token[i + 1, T_MATCHED]
            prefetch(address[i * lengths + 1] if matched == 1 and longest >= 1 else zero_at)
            prefetch(address[i * lengths + 2] if matched <= 2 and longest >= 2 else zero_at)
        for i in range(here):
            t = i + _1
            q = block + i
            total = np.float32(0.0)
            longest = min(np.int64(reach[q]), token[i, T_STATE])
            matched = token[t, T_MATCHED]
            for k in range(order - _1, 0, -1):
                # To add 0 changes no bit, and needs no guess at how many weights there are.
                needed = matched <= k and k <= longest
                total = np.float32(
                    total + load_float32(address[i * lengths + k] if needed else zero_at)
                )
            log10_prob[q] = np.float32(total + best[t])
            matched_order[q] = np.uint8(matched)
            ngram_length[q] = np.uint8(token[t, T_FOUND])
            state_length[q] = np.uint8(token[t, T_STATE])
        # The last token stands before the next block.
        last = here * lengths
        for k in range(_1, lengths):
            node[k] = node[last + k]
            weight[k] = weight[last + k]
            inside = address[last + k] == weight_at + ((last + k) << _2)
            address[k] = weight_at + (k << _2) if inside else address[last + k]
        token[0, T_NODES] = token[here, T_NODES]
        token[0, T_STATE] = token[here, T_STATE]
        block += here


@kernel("uint32[:], int64[:], int64, int64, int64, int64, int64, out uint32[:], out uint8[:]")
def lay_out(ids, sentence_begin, begin_id, end_id, bos, eos, order, words, reach):  # type: ignore[no-untyped-def]
    """Sentences with their marks, one after the other.

    Shapes  ids (n,)  words of all sentences;  sentence_begin (S + 1,)  where each begins
            bos, eos  1: a mark stands there
            words, reach (T,) filled, T = n + S * (bos + eos): see `score_tokens`
    """
    longest = np.int64(max(order - 1, 0))
    at_token = np.int64(0)
    for s in range(len(sentence_begin) - 1):
        before = _0
        if bos:
            words[at_token] = begin_id
            reach[at_token] = np.uint8(0)
            at_token += 1
            before = min(_1, longest)
        for i in range(sentence_begin[s], sentence_begin[s + 1]):
            words[at_token] = ids[i]
            reach[at_token] = np.uint8(before)
            at_token += 1
            before = min(before + _1, longest)
        if eos:
            words[at_token] = end_id
            reach[at_token] = np.uint8(before)
            at_token += 1


@kernel("float32[:], int64[:], int64, int64, out float64[:]")
def sum_sentences(log10_prob, sentence_begin, bos, eos, totals):  # type: ignore[no-untyped-def]
    """What the tokens of each sentence come to: words and, with `eos`, the sentence end.

    Shapes  log10_prob (T,)  of the tokens, as `lay_out` lays them
            sentence_begin (S + 1,)  where the words of each begin, marks not counted
            totals (S,) float64 filled: sums of log10_prob, in double precision
    """
    for s in range(len(totals)):
        first = sentence_begin[s] + s * (bos + eos) + bos
        total = 0.0
        for i in range(first, first + sentence_begin[s + 1] - sentence_begin[s] + eos):
            total += np.float64(log10_prob[i])
        totals[s] = total


@kernel(
    "uint32[:], float32[:], uint8[:], int64[:], int64, int64, out int64[:], out float64[:], out "
    "int64[:]"
)
def count_sentences(  # type: ignore[no-untyped-def]
    words, log10_prob, matched_order, sentence_begin, bos, eos, oovs, log10_oovs, hits
):
    """Which tokens of each sentence are unknown, and how long the n-grams are that were found.

    Shapes  words, log10_prob, matched_order, sentence_begin  as in `sum_sentences`
            oovs, log10_oovs (S,) filled: tokens whose id is 0, and the sum of their log10_prob
            hits (order + 1,)  added to: tokens by matched order
    """
    for s in range(len(oovs)):
        first = sentence_begin[s] + s * (bos + eos) + bos
        of_oovs = 0.0
        unknown = np.int64(0)
        for i in range(first, first + sentence_begin[s + 1] - sentence_begin[s] + eos):
            hits[matched_order[i]] += 1
            if words[i] == 0:  # the unknown word
                of_oovs += np.float64(log10_prob[i])
                unknown += 1
        oovs[s] = unknown
        log10_oovs[s] = of_oovs


@kernel("float64[:], int64[:], int64[:], out uint8[:]")
def put_totals(totals, tokens, oovs, text):  # type: ignore[no-untyped-def]
    """Writes a row for each sentence: log10 P with six decimals, tokens and OOVs, tabs between.

    Shapes   totals, tokens, oovs (S,);  text (S * ROW_BYTES,) filled
    Returns  bytes written
    Trusts   as `put_fixed`: text.score
    """
    at = np.int64(0)
    for s in range(len(totals)):
        at = put_fixed(text, at, totals[s])
        text[at] = TAB
        at = put_count(text, at + 1, tokens[s])
        text[at] = TAB
        at = put_count(text, at + 1, oovs[s])
        text[at] = NEWLINE
        at += 1
    return at
