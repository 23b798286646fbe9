"""Reads the load of each slot from the /load pages of servers, or from files with such pages."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError
from dlm.index.layout import Manifest
from dlm.ngram.partition import SLOTS

MAX_BYTES = 16 << 20  # limit of a page's size; 100 models with 4,096 numbers of 20 digits take less
TIMEOUT_S = 10.0
MOST_QUERIES = 1 << 50  # limit of a slot's count, so that sums stay far below 2^63


def slot_load(places: Sequence[str], manifest: Manifest) -> NDArray[np.int64]:
    """Returns the number of queries answered for each slot, (4096,), summed over the pages at
    `places` (files or HTTP addresses, one per server). Raises ConfigError if a page cannot be read,
    or if a shard of this set has no page."""
    total = np.zeros(SLOTS, np.int64)
    shards: set[int] = set()
    others: set[str] = set()
    for place in places:
        for name, shard, slots in _models(place, _page(place)):
            if name != manifest.shard_set:
                others.add(name)
                continue
            shards.add(shard)
            total += slots
    if not shards:
        raise ConfigError(
            f"--load: {', '.join(places)} {'has' if len(places) == 1 else 'have'} the load of "
            f"{', '.join(sorted(others)) or 'no shard set'}; expected shard set "
            f"{manifest.shard_set}. Fetch /load from the metrics ports of this set's servers"
        )
    silent = sorted(set(range(manifest.shards)) - shards)
    if silent:
        raise ConfigError(
            f"--load: no page was given for shard {', '.join(map(str, silent))}; expected one for "
            f"every shard, 0 to {manifest.shards - 1}. Give --load for each server"
        )
    return total


def _page(place: str) -> Any:
    try:
        if place.startswith(("http://", "https://")):
            # The environment's proxy is not used, since the servers are on this network.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(place, timeout=TIMEOUT_S) as reply:
                data = reply.read(MAX_BYTES + 1)
        else:
            with Path(place).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"--load: {place} cannot be read: {exc}. Name a file, or a server's page: "
            "http://HOST:METRICS_PORT/load"
        ) from exc
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"--load: {place} has more than {MAX_BYTES:,} bytes, too many for a server's page "
            "/load. Fetch that page again"
        )
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise _malformed(place, f"not JSON: {exc}") from exc


def _models(place: str, page: Any) -> list[tuple[str, int, NDArray[np.int64]]]:
    found = []
    try:
        for one in page["models"]:
            slots, shard = one["slots"], one["shard"]
            good = len(slots) == SLOTS and all(
                type(n) is int and 0 <= n <= MOST_QUERIES for n in slots
            )
            if not good or type(shard) is not int:
                raise ValueError(
                    f"expected slots to be a list of {SLOTS} counts, and shard to be an integer"
                )
            found.append((str(one["shard_set"]), shard, np.array(slots, np.int64)))
    except (TypeError, KeyError, ValueError) as exc:
        raise _malformed(place, str(exc)) from exc
    return found


def _malformed(place: str, fault: str) -> ConfigError:
    return ConfigError(
        f"--load: {place} is not a page of a server's load ({fault}). Fetch it again from /load on "
        "the metrics port"
    )
