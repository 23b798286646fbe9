"""Phrases that callers sent, kept by their id for their later calls; nothing logs one.

Whoever guesses a list has its id, and must not learn whether another client sent it: each token
finds its own lists only.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dlm.client import Phrases
from dlm.gateway.turns import GatewayTurns, Left
from dlm.server.refusals import Refusal
from dlm.server.security import token_name
from dlm.wire.status import Reason


@dataclass(slots=True)
class _Kept:
    phrases: Phrases
    size: int  # bytes
    calls: int = 0  # that use it now

    def end(self) -> None:
        """One of them has ended."""
        self.calls -= 1


class PhraseStore:
    """The lists used last, as many as fit; on the event loop.

    Args  max_bytes  of all lists together; one that is alone is kept even if it has more
    """

    def __init__(self, max_bytes: int, turns: GatewayTurns) -> None:
        self._max_bytes = max_bytes
        self._turns = turns
        # By the name of the token, and id; the last used is last.
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self.bytes = 0

    async def of(
        self, request: Any, vocabulary_size: int, left: Left, held: ExitStack
    ) -> Phrases | None:
        """The phrases of a request; None if it has none.

        Args    left   seconds in which they must have been read
                held   until it is closed, they are not forgotten
        Raises  Refusal  an id that is not known here, no memory, too late
                QueryError  see `Phrases`
        """
        kept = await self._find(request.phrases, vocabulary_size, left)
        if kept is None:
            return None
        kept.calls += 1
        held.callback(kept.end)
        return kept.phrases

    async def _find(self, given: Any, vocabulary_size: int, left: Left) -> _Kept | None:
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
        # While one is read, it is many times as large as its message.
        found = await self._turns.aside(lambda: Phrases(weights), left())
        return self._keep(found, found.memory_bytes(vocabulary_size))

    def _known(self, digest: str) -> _Kept:
        key = token_name(), digest
        if key not in self._kept:
            raise Refusal(
                Reason.PHRASES_UNKNOWN,
                "this gateway does not know, or no longer knows, the phrases of this id; send the "
                "phrases in place of their id",
            )
        self._kept.move_to_end(key)
        return self._kept[key]

    def _keep(self, phrases: Phrases, size: int) -> _Kept:
        key = token_name(), phrases.digest
        if key in self._kept:
            return self._known(phrases.digest)
        unused = [other for other, kept in self._kept.items() if not kept.calls]
        while unused and self.bytes + size > self._max_bytes:
            self.bytes -= self._kept.pop(unused.pop(0)).size
        if self._kept and self.bytes + size > self._max_bytes:
            raise Refusal(
                Reason.OVERLOADED,
                f"the phrases take {size:,} bytes, and those of calls in flight leave fewer of "
                f"{self._max_bytes:,}. Ask another gateway, or retry later; the operator may raise "
                "max_phrases_bytes",
            )
        self.bytes += size
        self._kept[key] = kept = _Kept(phrases, size)
        return kept
