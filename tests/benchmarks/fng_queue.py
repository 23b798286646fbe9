"""A queue of dear experiments: each is done once, and its result is a file of its own.

A queue that is stopped goes on where it was: what has a result is not done again. An item whose
needs have none waits for the next call; one that fails is reported, and the others go on.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm.errors import DlmError
from dlm.files import write_whole

Result = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One experiment.

    Fields
        name   of its result
        make   does it; what it returns is kept as JSON
        needs  items that must have results
    """

    name: str
    make: Callable[[], Mapping[str, Any]]
    needs: Sequence[str] = ()


class ResultFolder:
    """Results by name, a JSON file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, name: str) -> Path:
        return self.folder / (re.sub(r"[^A-Za-z0-9+@-]+", ".", name) + ".json")

    def read(self, name: str) -> Result | None:
        """The result of an item; None where there is none yet."""
        file = self._file(name)
        if not file.exists():
            return None
        found: Result = json.loads(file.read_text(encoding="utf-8"))
        assert found["item"] == name, f"{file} is the result of {found['item']}, not of {name}"
        return found

    def write(self, name: str, result: Mapping[str, Any]) -> None:
        """Keeps a result, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"item": name, **result}, ensure_ascii=False)
        write_whole(self._file(name), text.encode())


def run_queue(
    items: Iterable[Item],
    results: ResultFolder,
    *,
    minutes: float = math.inf,
    tell: Callable[[str], None] = print,
) -> list[str]:
    """Does what has no result yet, in order.

    Args
        minutes  no item begins after so many
    Returns
        the names of those that failed
    """
    until = time.monotonic() + 60 * minutes
    failed = []
    for item in items:
        if results.read(item.name) is not None:
            continue
        missing = [name for name in item.needs if results.read(name) is None]
        if missing:
            tell(f"{item.name} waits for {', '.join(missing)}")
            continue
        if time.monotonic() > until:
            tell(f"time is up before {item.name}; the same command goes on")
            break
        tell(f"{item.name} begins")
        began = time.process_time()
        try:
            result = item.make()
        except DlmError as exc:
            tell(f"{item.name} failed: {exc}")
            failed.append(item.name)
            continue
        spent = time.process_time() - began
        results.write(item.name, {**result, "cpu_seconds": round(spent, 1)})
        tell(f"{item.name} done, {spent:.0f} CPU seconds")
    return failed
