"""Every event that a server logs, as a JSON line; `*` stands for a word."""

from __future__ import annotations

from dlm.logs import DeclaredEvent

_STEP = ("cause", "from_state", "to_state", "address", "port", "shard", "shard_sets", "in_flight")

EVENTS: dict[str, DeclaredEvent] = {
    # Start and end.
    "server.compiling": DeclaredEvent(
        "It compiles kernels, for a minute.", ("kernels", "duration_s")
    ),
    "server.compiled": DeclaredEvent("The kernels are compiled.", ("kernels", "duration_s")),
    "server.opened": DeclaredEvent(
        "A shard is mapped. `verified`: its checksums were compared.",
        ("shard", "shard_set", "verified", "duration_s"),
    ),
    "server.warmed": DeclaredEvent("The warm-up has ended.", ("messages", "duration_s")),
    "server.ready": DeclaredEvent("It answers; health and `/readyz` say so.", _STEP),
    "server.state": DeclaredEvent(
        "Another step: it drains, or the warm-up failed (`cause`).", _STEP
    ),
    "server.drained": DeclaredEvent(
        "No message is in flight any more, or the time to finish them has passed.",
        ("state", *_STEP[3:]),
    ),
    "server.stop": DeclaredEvent("A second signal ends it at once.", ("state", *_STEP[3:])),
    "server.drain.timed_out": DeclaredEvent(
        "`shutdown_timeout_s` has passed with messages in flight, which end without an answer.",
        ("in_flight",),
    ),
    "server.stopped": DeclaredEvent(
        "It has ended. `whole`: true if all messages in flight were answered.",
        ("shard", "whole"),
    ),
    # Files.
    "server.open_files.exhausted": DeclaredEvent(
        "No file or connection can be opened; new clients wait. Once per minute.",
        ("limit", "hard_limit", "error"),
    ),
    "server.open_files.recovered": DeclaredEvent("Files can be opened again.", ("open",)),
    "server.sets.checking": DeclaredEvent(
        "The list of shard sets changed; new ones are read.", ("sets",)
    ),
    "server.sets.changed": DeclaredEvent(
        "It serves another list of shard sets; `loaded`: those that it had to load.",
        ("shard_sets", "loaded"),
    ),
    "server.sets.rejected": DeclaredEvent(
        "The new list cannot be served; the one before stays, until the file changes.", ("error",)
    ),
    # Clients.
    "server.unauthenticated": DeclaredEvent(
        "Calls were refused for their token. `refusals`: since the last such line.",
        ("peer", "refusals"),
    ),
    "server.client.limit": DeclaredEvent(
        "Calls were refused by a limit per client or of the server.",
        ("peer", "refusals", "client"),
    ),
    "server.tokens.expired": DeclaredEvent(
        "Tokens expired; their open calls ended.", ("calls_ended",)
    ),
    "server.*.reloaded": DeclaredEvent(
        "`*`: `certificates` or `tokens`. The files have changed, and are in use.",
        ("files", "clients", "calls_ended"),
    ),
    "server.*.kept": DeclaredEvent(
        "`*`: `certificates` or `tokens`. A file has changed and is unusable; the last usable "
        "content stays. Once per error.",
        ("error",),
    ),
    "server.stream.unread": DeclaredEvent(
        "A client did not read its replies for ten seconds; its stream ended.", ("client",)
    ),
    "server.reply.undelivered": DeclaredEvent("Mostly a client that went away first.", ("error",)),
    "server.*.failed": DeclaredEvent(
        "A fault in dlm. `*`: the call, `http` or `beat`. The stack follows; it has no text of a "
        "query.",
        ("error", "shard"),
    ),
}
