"""JSON for `--json`: the only place where a command prints JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from dlm.units import finite

# Made once: json.dumps would make one per line of `dlm score --json`.
_LINE = json.JSONEncoder(allow_nan=False)
_INDENTED = json.JSONEncoder(allow_nan=False, indent=1)


def _encoded(facts: Mapping[str, Any], encoder: json.JSONEncoder) -> str:
    """JSON, in ASCII, has no infinity and no nan: both become null."""
    try:
        return encoder.encode(facts)
    except ValueError:
        return encoder.encode(finite(facts))


def as_json_line(facts: Mapping[str, Any]) -> str:
    """One object on one line."""
    return _encoded(facts, _LINE)


def print_json(facts: Mapping[str, Any], *, to: TextIO | None = None) -> None:
    """Prints one object, for commands that answer once."""
    print(_encoded(facts, _INDENTED), file=sys.stdout if to is None else to)


def print_json_line(facts: Mapping[str, Any]) -> None:
    """Prints one object on one line, for commands that answer many times."""
    print(as_json_line(facts), flush=True)
