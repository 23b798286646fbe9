"""Files that may change under a running server: when to read them again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dlm.errors import ConfigError
from dlm.logs import EventLog
from dlm.wire.secret import signature

logger = EventLog(__name__)

POLL_S = 0.25  # a change is applied at the second look: within half a second


class FileWatcher:
    """Whether files have changed and settled: alike at two looks, unlike what was loaded."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._loaded = self._seen = signature(*self.paths)

    def changed(self) -> bool:
        """A look; True once for each change, when it is over."""
        before, self._seen = self._seen, signature(*self.paths)
        if self._seen != before or self._seen == self._loaded:
            return False
        self._loaded = self._seen
        return True


# Applies a change; returns what to log about it, if anything.
Reload = Callable[[], Mapping[str, object] | None]


def reload_if_changed(watch: FileWatcher, reload: Reload, *, what: str) -> None:
    """Calls `reload` after a change; if that is rejected, logs it and keeps the old files."""
    if not watch.changed():
        return
    try:
        told = reload()
    except ConfigError as exc:
        logger.error("server.%s.kept", what, extra={"error": str(exc)})
    else:
        logger.info("server.%s.reloaded", what, extra={"files": len(watch.paths), **(told or {})})


async def follow(watch: FileWatcher, reload: Reload, *, what: str) -> None:
    """Looks repeatedly."""
    while True:
        await asyncio.sleep(POLL_S)
        reload_if_changed(watch, reload, what=what)
