"""Every event that a server logs, as a JSON line; `*` stands for a word."""

from __future__ import annotations

from dlm.logs import DeclaredEvent

_STEP = ("cause", "from_state", "to_state", "address", "port", "shard", "shard_sets", "in_flight")
_WORKER = ("worker", "pid", "status", "signal", "lived_s", "again_in_s", "error")

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
        ("shard", "workers", "whole"),
    ),
    "server.child.failed": DeclaredEvent("A helper process failed by a fault in dlm.", ("error",)),
    # Workers.
    "server.supervisor.warmed": DeclaredEvent(
        "Files are checked, kernels loaded.", ("duration_s",)
    ),
    "server.supervisor.ready": DeclaredEvent("All workers answer.", ("port", "workers")),
    "server.supervisor.draining": DeclaredEvent(
        "A signal asked all workers to drain.", ("workers",)
    ),
    "server.worker.started": DeclaredEvent("A worker was started.", ("worker", "pid", "restarts")),
    "server.worker.exited": DeclaredEvent(
        "A worker ended. An error if it was not asked to; it is started again.", _WORKER
    ),
    "server.worker.stuck": DeclaredEvent(
        "A worker's loop did not run for a while; it is replaced.", ("worker", "pid", "error")
    ),
    "server.worker.not_started": DeclaredEvent(
        "The system could not start a worker; it is tried again.",
        ("worker", "again_in_s", "error"),
    ),
    "server.worker.failed": DeclaredEvent("A worker failed by a fault in dlm.", ("worker",)),
    "server.exposition.started": DeclaredEvent(
        "The process that answers the metrics port started.", ("worker", "pid", "restarts")
    ),
    "server.exposition.exited": DeclaredEvent("That process ended; it is started again.", _WORKER),
    "server.metrics.unread": DeclaredEvent(
        "A worker's metrics could not be read; the page leaves them out.", ("worker", "error")
    ),
    # Files.
    "server.file.damaged": DeclaredEvent(
        "A mapped file was truncated, or its disk fails. Restore it; see `damaged_file`.",
        ("error",),
    ),
    "server.file.recovered": DeclaredEvent("The damaged file is intact again.", ("worker",)),
    "server.open_files.exhausted": DeclaredEvent(
        "No file or connection can be opened; new clients wait. Once per minute.",
        ("limit", "hard_limit", "error"),
    ),
    "server.open_files.recovered": DeclaredEvent("Files can be opened again.", ("open",)),
    "server.sets.checking": DeclaredEvent(
        "The list of shard sets changed; new ones are read.", ("sets",)
    ),
    "server.sets.changed": DeclaredEvent(
        "This process serves another list of shard sets.", ("shard_sets", "loaded")
    ),
    "server.sets.loaded": DeclaredEvent("All workers serve the new list.", ("shard_sets",)),
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
        "A fault in dlm. `*`: the call, or `http` (with `path`). The stack follows; it has no "
        "text of a query.",
        ("error", "shard", "path"),
    ),
}
