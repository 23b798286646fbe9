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
        self.error = ""  # why the change was rejected

    def changed(self) -> bool:
        """A look; True when a change is over, and until it is applied."""
        before, self._seen = self._seen, signature(*self.paths)
        return self._seen == before != self._loaded

    def applied(self) -> None:
        self._loaded, self.error = self._seen, ""


# Applies a change; returns what to log about it, if anything.
Reload = Callable[[], Mapping[str, object] | None]


def reload_if_changed(watch: FileWatcher, reload: Reload, *, what: str) -> None:
    """Calls `reload` after a change; if that is rejected, keeps the old files and tries again.

    A reason is logged once. Trying again applies a change for which descriptors were short.
    """
    if not watch.changed():
        return
    try:
        told = reload()
    except ConfigError as exc:
        if str(exc) != watch.error:
            watch.error = str(exc)
            logger.error("server.%s.kept", what, extra={"error": watch.error})
    else:
        watch.applied()
        logger.info("server.%s.reloaded", what, extra={"files": len(watch.paths), **(told or {})})


async def follow(watch: FileWatcher, reload: Reload, *, what: str) -> None:
    while True:
        await asyncio.sleep(POLL_S)
        reload_if_changed(watch, reload, what=what)
