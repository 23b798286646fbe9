"""Every event that a server logs, as a JSON line; `*` stands for a word."""

from __future__ import annotations

from dlm.logs import DeclaredEvent

_STEP = ("cause", "from_state", "to_state", "address", "port", "shard", "shard_sets", "in_flight")

EVENTS: dict[str, DeclaredEvent] = {
    # Start and end.
    "server.compiling": DeclaredEvent(
        "The server compiles kernels, which takes about a minute.", ("kernels", "duration_s")
    ),
    "server.compiled": DeclaredEvent("The kernels are compiled.", ("kernels", "duration_s")),
    "server.opened": DeclaredEvent(
        "A shard is mapped. `verified`: true if its checksums were compared.",
        ("shard", "shard_set", "verified", "duration_s"),
    ),
    "server.warmed": DeclaredEvent("The warm-up has ended.", ("messages", "duration_s")),
    "server.ready": DeclaredEvent(
        "The server answers calls; its health service and `/readyz` report it as ready.", _STEP
    ),
    "server.state": DeclaredEvent(
        "The server changed its state: it is draining, or the warm-up failed (`cause`).", _STEP
    ),
    "server.drained": DeclaredEvent(
        "No messages are in flight any longer, or the time to finish them has passed.",
        ("state", *_STEP[3:]),
    ),
    "server.stop": DeclaredEvent(
        "A second signal ended the server at once.", ("state", *_STEP[3:])
    ),
    "server.drain.timed_out": DeclaredEvent(
        "`shutdown_timeout_s` has passed with messages in flight, which end without an answer.",
        ("in_flight",),
    ),
    "server.stopped": DeclaredEvent(
        "The server has stopped. `whole`: true if all messages in flight were answered.",
        ("shard", "whole"),
    ),
    # Files.
    "server.open_files.exhausted": DeclaredEvent(
        "No file or connection can be opened; new clients wait. Logged once per minute.",
        ("limit", "hard_limit", "error"),
    ),
    "server.open_files.recovered": DeclaredEvent("Files can be opened again.", ("open",)),
    "server.sets.checking": DeclaredEvent(
        "The list of shard sets changed; the server reads those that are new in it.", ("sets",)
    ),
    "server.sets.changed": DeclaredEvent(
        "The server serves another list of shard sets. `loaded`: those that it had to load.",
        ("shard_sets", "loaded"),
    ),
    "server.sets.rejected": DeclaredEvent(
        "The new list is unusable; the old one is kept until the file changes. A URL is retried.",
        ("error",),
    ),
    # Clients.
    "server.unauthenticated": DeclaredEvent(
        "Calls were refused because of their token. `refusals`: their number since the last such "
        "line.",
        ("peer", "refusals"),
    ),
    "server.client.limit": DeclaredEvent(
        "Calls were refused because a client, or the server, had reached its limit.",
        ("peer", "refusals", "client"),
    ),
    "server.tokens.expired": DeclaredEvent(
        "Tokens expired; their open calls ended.", ("calls_ended",)
    ),
    "server.*.reloaded": DeclaredEvent(
        "The files changed, and the new ones are in use. `*` is `certificates` or `tokens`.",
        ("files", "clients", "calls_ended"),
    ),
    "server.*.kept": DeclaredEvent(
        "A file changed, but its new content is unusable; the server keeps the old content. `*` is "
        "`certificates` or `tokens`. Logged once per error.",
        ("error",),
    ),
    "server.stream.unread": DeclaredEvent(
        "A client did not read its replies for ten seconds; its stream ended.", ("client",)
    ),
    "server.reply.undelivered": DeclaredEvent(
        "A reply could not be sent, usually because the client had disconnected.", ("error",)
    ),
    "server.*.failed": DeclaredEvent(
        "A fault in dlm. `*` is the call, `http` or `beat`. A stack trace follows, without the "
        "text of any query.",
        ("error", "shard"),
    ),
}
