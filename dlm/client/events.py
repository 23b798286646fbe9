"""Every event that a client logs, by loggers below `dlm.client`; `*` stands for a word."""

from __future__ import annotations

from dlm.logs import DeclaredEvent

EVENTS: dict[str, DeclaredEvent] = {
    "client.model.changed": DeclaredEvent("New utterances use another model.", ("before", "after")),
    "client.model.kept": DeclaredEvent(
        "cluster.toml names a model, but the servers do not have all of its shards.",
        ("named", "model"),
    ),
    "client.model.gone": DeclaredEvent(
        "Once per model: an utterance is open on a model that no server has any longer, and its "
        "2-grams answer. Open a new utterance.",
        ("model", "error"),
    ),
    "client.model.not_loaded": DeclaredEvent(
        "The low orders of the next model could not be fetched.", ("model", "error")
    ),
    "client.rollout.changed": DeclaredEvent(
        "A share of new utterances uses the model that is being rolled out, or no longer does.",
        ("model", "share"),
    ),
    "client.cluster_file.read": DeclaredEvent(
        "cluster.toml was read, or servers changed.",
        ("shard_set", "shards_known"),
    ),
    "client.cluster_file.rejected": DeclaredEvent(
        "Reading or looking up failed, or a new client would refuse the file.", ("error",)
    ),
    "client.setting.needs_restart": DeclaredEvent(
        "`token_file`, `tls.*` or `local_fallback` changed; they take effect when the client "
        "restarts.",
        ("setting", "advice"),
    ),
    "client.certificates.kept": DeclaredEvent(
        "A certificate or key has changed and is unusable; the last usable content stays. Once "
        "per error.",
        ("error",),
    ),
    "client.token.kept": DeclaredEvent(
        "The token's file has changed and is unusable; the last token stays. Once per error.",
        ("error",),
    ),
    "client.mode.changed": DeclaredEvent(
        "New utterances switched between the full and the local fallback. `messages`, `failed` "
        "and `slow_shards` are those of the old mode. A warning, unless full again.",
        ("to", "reason", "messages", "failed", "slow_shards"),
    ),
    "client.server.changed": DeclaredEvent(
        "A server can no longer be asked, or is up again; both are warnings. That a heartbeat was "
        "missed is not one: `suspect` for the reason `silent`, until it is `down`. `before` and "
        "`after`: `up`, `not_ready`, `suspect` or `down`. `reason`: `silent`, `lost`, `draining`, "
        "`warming`, `unauthenticated` or `answered`.",
        ("address", "shard", "before", "after", "reason"),
    ),
    "client.bigram_fallback.started": DeclaredEvent(
        "The 2-grams started to answer. `shard` if one was asked; `error`: its kind.",
        ("shard", "error"),
    ),
    "client.bigram_fallback.changed": DeclaredEvent(
        "The cause became `StaleShardSet`, which does not end by itself: open a new utterance.",
        ("shard", "before", "error"),
    ),
    "client.bigram_fallback.ended": DeclaredEvent(
        "A message was answered, and for ten seconds no score came from the 2-grams.",
        ("seconds", "queries"),
    ),
    "client.local_fallback.started": DeclaredEvent(
        "A new client begins with the local fallback, since servers or their low orders could not "
        "be reached: `error` says why.",
        ("local_fallback", "error"),
    ),
    "client.connection.renewed": DeclaredEvent("A silent connection was replaced.", ("address",)),
    "client.server.restarted": DeclaredEvent("Another process answers heartbeats.", ("address",)),
    "client.fork.on_loop": DeclaredEvent(
        "A callback forked the process; the child's client can send nothing.", ("thread",)
    ),
    "client.*.failed": DeclaredEvent(
        "A fault in dlm, or in a program's callback. `*`: `callback`, `cascade`, `loop`, "
        "`message` (with `shard`), `reply`, `resume`, `retry`.",
        ("shard", "error"),
    ),
}
