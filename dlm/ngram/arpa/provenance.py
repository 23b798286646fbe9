"""A model's provenance: a comment of its ARPA file, which shard sets keep."""

from __future__ import annotations

import json
from typing import Any

from dlm import __version__


def provenance_line(command: str, **facts: Any) -> str:
    """The comment of a model that a command of dlm makes, without `#`: one JSON object.

    Args
        command  as `prune`
        facts    JSON values: the method, its arguments, and the name of the source model
    """
    return f"provenance: {json.dumps({'made_by': f'dlm {__version__} {command}', **facts})}"
