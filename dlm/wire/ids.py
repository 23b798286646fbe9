"""Checks ids of models and shard sets as people write them: the first hex digits. Also says how
many shard sets a server may hold."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dlm.errors import ConfigError

MAX_SHARD_SETS = 64  # no server holds more shard sets, and no client asks for more


def check_beginning(model: str) -> str:
    """Returns `model` in lower case; raises `ConfigError` unless it is 6 to 32 hex digits."""
    if re.fullmatch(r"[0-9a-f]{6,32}", model.lower()):
        return model.lower()
    raise ConfigError(
        f"the model {model!r} is not an id; expected the first 6 to 32 hex digits of the id of a "
        "model or of its shard set, as `dlm info` prints it"
    )


def is_named(beginnings: Iterable[str], model: str, shard_set: str) -> bool:
    """Whether one of `beginnings` begins the id of this model, or of this shard set."""
    return any(model.startswith(one) or shard_set.startswith(one) for one in beginnings)
