"""Every event that a gateway logs; `*` stands for a word. What it shares with servers is theirs."""

from __future__ import annotations

from dlm.logs import DeclaredEvent

EVENTS: dict[str, DeclaredEvent] = {
    "gateway.ready": DeclaredEvent(
        "It has connected to the servers, and answers.",
        ("cause", "to_state", "port", "http_port", "in_flight"),
    ),
    "gateway.state": DeclaredEvent(
        "It drains, or could not start.",
        ("cause", "to_state", "port", "http_port", "in_flight"),
    ),
    "gateway.stopped": DeclaredEvent(
        "It has ended. `whole`: true if every call in flight was answered.", ("whole",)
    ),
    "gateway.*.failed": DeclaredEvent(
        "A fault in dlm. `*`: the call in lower case, or `http`. The stack follows; it has no "
        "text of a query.",
        ("error",),
    ),
}
