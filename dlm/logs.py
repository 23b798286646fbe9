"""Log events: each has a name, and fields in the line that any formatter prints.

A record's message is `client.server.changed address=10.0.0.12:50060 before=up after=suspect`, so
that an application with only `logging.basicConfig` shows what happened and where. A structured
logger finds the same in the record itself: `record.event` and an attribute for each field.
Fields are places, counts and types of errors; never text or words of a query.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_NEEDS_QUOTES = re.compile(r'[\s="]|^$')


def line_of(name: str, fields: Mapping[str, Any]) -> str:
    """The message of an event: its name, then `field=value`; values with spaces are quoted."""
    return " ".join([name, *(f"{field}={_text(value)}" for field, value in fields.items())])


def _text(value: Any) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if _NEEDS_QUOTES.search(text) else text


class DeclaredEvent(NamedTuple):
    """Says when an event is logged, and which fields its line may have."""

    meaning: str
    fields: tuple[str, ...] = ()


class EventLog(logging.LoggerAdapter[logging.Logger]):
    """A logger of events: `log.warning("client.mode.changed", extra={"to": "local_fallback"})`."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):
            return
        name = str(msg) % args if args else str(msg)
        fields = dict(kwargs.pop("extra", None) or {})
        line = line_of(name, fields)
        level_up = kwargs.pop("stacklevel", 1) + 1  # so that the record has the caller's line
        self.logger.log(level, line, stacklevel=level_up, extra={**fields, "event": name}, **kwargs)
