"""The page /load: how many queries a server has answered for each slot, as JSON.

It has one object per model, whatever the number of slots that were asked, so its size is bounded.
It names slots, which are hashes of word pairs; no word, no text and no client.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dlm.server.collector import Served


def load_page(served: Sequence[Served]) -> bytes:
    """The load since the process started, by model."""
    return _text(
        {
            "model": one.model,
            "shard_set": one.shard_set,
            "shard": one.shard,
            "queries": one.metrics.queries,
            "slots": one.metrics.slot_queries.total().tolist(),
        }
        for one in served
    )


def joined_load(pages: Iterable[bytes]) -> bytes:
    """One page of the pages of several workers: their sum, by model."""
    found: dict[str, dict[str, Any]] = {}
    for page in pages:
        for one in json.loads(page)["models"]:
            same = found.setdefault(one["shard_set"], one)
            if same is not one:
                same["queries"] += one["queries"]
                same["slots"] = [a + b for a, b in zip(same["slots"], one["slots"], strict=True)]
    return _text(found.values())


def _text(models: Iterable[dict[str, Any]]) -> bytes:
    return json.dumps({"models": list(models)}, separators=(",", ":")).encode() + b"\n"
