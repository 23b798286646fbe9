"""Makes shard sets from models of any size in bounded memory.

An n-gram w1 .. wk is kept as a row of numbers, in one of two orders:

* *suffix order*, as a node: the id of w[k-1], then the keys of wk, w[k-2], w[k-3], .. w1;
* *list order*, as an entry of its context's list: its context in suffix order, then the key of wk.

From the highest order down, three sorted streams are merged (`join`): the k-grams of the file in
suffix order, the suffixes that order k + 1 requires, and the contexts of order k + 1 in list order.
The result, in suffix order, is order k with its blanks and flags, and the nodes of k words.
"""

from dlm.index.making.shard_set import build_shard_set

__all__ = ["build_shard_set"]
