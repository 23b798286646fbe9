"""Phrases that callers sent, kept by their id for their later calls; nothing logs one.

Whoever guesses a list has its id, and must not learn whether another client sent it: each token
finds its own lists only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dlm.client import Phrases
from dlm.server.refusals import Refusal, too_late
from dlm.server.security import token_name
from dlm.wire.status import Reason


class PhraseStore:
    """The lists used last, as many as fit; on the event loop.

    Args  max_bytes  of all lists together; the last one is kept even if it alone has more
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # By the name of the token, and id; the last used is last.
        self._kept: OrderedDict[tuple[str, str], tuple[Phrases, int]] = OrderedDict()
        self.bytes = 0
        # One list at a time is read: while it is, it is many times as large as its message.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="dlm-phrases")

    async def of(self, request: Any, vocabulary_size: int, left_s: float) -> Phrases | None:
        """The phrases of a request; None if it has none.

        Args    left_s   seconds in which they must have been read
        Raises  Refusal  an id that is not known here, too late;  QueryError  see `Phrases`
        """
        given = request.phrases
        if given.id and given.phrases:
            raise Refusal(
                Reason.MALFORMED, "phrases and their id are both given; expected one of them"
            )
        if given.id:
            return self._known(given.id)
        if not given.phrases:
            return None
        weights = {one.text: one.bonus for one in given.phrases}
        if len(weights) < len(given.phrases):
            raise Refusal(Reason.MALFORMED, "a phrase is there twice; expected each once")
        # Thousands take tens of milliseconds, in which others are answered.
        reading = asyncio.get_running_loop().run_in_executor(self._reader, Phrases, weights)
        try:
            found = await asyncio.wait_for(reading, left_s)
        except TimeoutError:
            raise too_late() from None
        self._keep(found, found.memory_bytes(vocabulary_size))
        return found

    def _known(self, digest: str) -> Phrases:
        key = token_name(), digest
        if key not in self._kept:
            raise Refusal(
                Reason.PHRASES_UNKNOWN,
                "this gateway does not know, or no longer knows, the phrases of this id; send the "
                "phrases in place of their id",
            )
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def _keep(self, phrases: Phrases, size: int) -> None:
        key = token_name(), phrases.digest
        _, before = self._kept.pop(key, (None, 0))
        self._kept[key] = phrases, size
        self.bytes += size - before
        while self.bytes > self._max_bytes and len(self._kept) > 1:
            self.bytes -= self._kept.popitem(last=False)[1][1]
