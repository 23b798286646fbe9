"""A model's provenance: a comment of its ARPA file, which shard sets keep."""

from __future__ import annotations

import json
from typing import Any

from dlm import __version__

_PREFIX = "provenance: "


def provenance_line(command: str, **facts: Any) -> str:
    """The comment of a model that a command of dlm makes, without `#`: one JSON object of
    `facts`."""
    return f"{_PREFIX}{json.dumps({'made_by': f'dlm {__version__} {command}', **facts})}"


def provenance_facts(line: str) -> dict[str, Any] | None:
    """What a `provenance_line` says; None of any other comment."""
    try:
        found = json.loads(line.removeprefix(_PREFIX)) if line.startswith(_PREFIX) else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
