"""There is one of each in dlm/index."""

from __future__ import annotations

from pathlib import Path

import dlm
from test_reached import pieces

PACKAGE = Path(dlm.__file__).parent
INDEX = PACKAGE / "index"


def callers(name: str) -> list[str]:
    """The functions of dlm/index that use a name, by file; a list of kernels calls none."""
    return sorted(
        {
            str(piece.path.relative_to(INDEX))
            for path in INDEX.rglob("*.py")
            for piece in pieces(path)
            if name in piece.uses and "KERNELS" not in piece.defines
        }
    )


def test_there_is_one_builder() -> None:
    """One place makes a manifest, one writes columns, and one puts bits in lists of words."""
    assert callers("make_manifest") == ["making/shard_set.py"]
    assert callers("new_file") == ["making/files.py"]  # Arrow's writer
    assert callers("write_parts") == ["making/builder.py"]
    assert callers("put_records") == ["making/pack.py"]
    assert callers("put_key_lists") == ["making/builder.py"]
