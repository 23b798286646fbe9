"""Settings of a shard set."""

from __future__ import annotations

from dataclasses import dataclass

from dlm.config import check, setting
from dlm.errors import ConfigError

LOSSLESS_BITS = 32


@dataclass(frozen=True)
class ShardSettings:
    """How a model is split and encoded: the options of `dlm shard`."""

    shards: int = setting(
        1,
        "Number of shards.",
        low=1,
        high=4096,
        short="-B",
        why="Shards divide 4,096 hash values among themselves.",
    )
    encoding: str = setting(
        "exact",
        "Encoding of values; compact is smaller and quantises them.",
        one_of=("exact", "compact"),
    )
    bits: int | None = setting(
        None,
        "Bits per value with compact, 6 by default: 3 to 16, or 32 to keep exact values.",
        low=3,
        high=LOSSLESS_BITS,
    )

    def __post_init__(self) -> None:
        check("shard", self)
        if self.bits in (None, LOSSLESS_BITS):
            return
        if self.encoding == "exact":
            raise ConfigError(
                f"--bits is {self.bits}, but --encoding exact does not quantise values; pass "
                "--encoding compact"
            )
        if self.bits > 16:
            raise ConfigError(
                f"shard.bits is {self.bits}; expected 3 to 16, or 32 to keep values as they are"
            )


@dataclass(frozen=True)
class ReshardSettings:
    """Which slots move to other shards: the options of `dlm reshard`."""

    shards: int | None = setting(
        None,
        "Number of shards of the new set; by default, the current number.",
        low=1,
        high=4096,
        short="-B",
    )
    bound: float = setting(
        1.02,
        "Slots move until no shard is heavier than the mean by more than this factor.",
        low=1,
        why="A smaller bound moves more slots, and each move changes two files.",
    )

    def __post_init__(self) -> None:
        check("reshard", self)
