"""Converts logarithms between bases, which no other module does, and turns numbers into text.

Serving and ARPA files use log10; training uses natural logarithms. A name that starts with
``log10_`` or ``ln_`` says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LN_10 = math.log(10.0)


def counted(number: int, noun: str) -> str:
    """A number with what it counts: "1 line", "1,200 lines"."""
    if number != 1:
        if noun.endswith("y") and noun[-2] not in "aeiou":
            noun = noun[:-1] + "ie"
        noun += "es" if noun.endswith("ss") else "s"
    return f"{number:,} {noun}"


def size_text(count: int) -> str:
    """Bytes as text, such as 512 KiB, 36.1 MiB, 2.0 GiB."""
    if count < 1 << 20:
        return f"{count / 1024:.0f} KiB"
    unit, power = ("MiB", 20) if count < 1 << 30 else ("GiB", 30)
    return f"{count / (1 << power):.1f} {unit}"


def perplexity(log10_total: float, tokens: int) -> float:
    """Perplexity per token of a text with log10 probability `log10_total`; nan without tokens."""
    if tokens == 0:
        return math.nan
    return float(10.0 ** min(-log10_total / tokens, 308.0))


def finite(value: Any) -> Any:
    """A value for JSON, in which null stands for infinity and nan."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
