"""Every event that only a gateway logs; `*` stands for a word. `server.events` has shared ones."""

from __future__ import annotations

from dlm.logs import DeclaredEvent

EVENTS: dict[str, DeclaredEvent] = {
    "gateway.ready": DeclaredEvent(
        "The gateway has connected to the servers, and answers calls.",
        ("cause", "to_state", "port", "http_port", "in_flight"),
    ),
    "gateway.state": DeclaredEvent(
        "The gateway is draining, or could not start.",
        ("cause", "to_state", "port", "http_port", "in_flight"),
    ),
    "gateway.stopped": DeclaredEvent(
        "The gateway has stopped. `whole`: true if every call in flight was answered.", ("whole",)
    ),
    "gateway.*.failed": DeclaredEvent(
        "A fault in dlm; report it. `*` is the call in lower case, or `http`. A stack trace "
        "follows, without the text of any query.",
        ("error",),
    ),
}
