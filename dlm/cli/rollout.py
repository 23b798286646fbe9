"""`dlm rollout`: replaces the model of a running cluster with another one, or goes back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dlm.cli.checks import READ, READ_PLACE, parsed
from dlm.cli.options import SECURITY, ClusterFile, Json, Options, option
from dlm.cli.output import print_json
from dlm.client.config import ClientSecurity
from dlm.cluster.rollout import Rules
from dlm.errors import ConfigError, DlmError


def rollout(
    *,
    new: Annotated[
        Path | None,
        typer.Argument(metavar="[NEW]", help="Folder of the shard set to roll out."),
        READ_PLACE,
    ] = None,
    cluster: ClusterFile = Path("cluster.toml"),
    undo: Annotated[
        bool,
        typer.Option("--undo", help="Return to the previous model, at any stage of the roll-out."),
    ] = False,
    share: Annotated[str | None, option(Rules, "share")] = None,
    times: Annotated[
        dict[str, Any], Options("watch_for load_within idle longest max_slowdown", of=Rules)
    ],
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Sentences to compare both models on, one per line; the first 1,000 are used.  "
            "[default: drawn from the old model]",
        ),
        READ,
    ] = None,
    other_words: Annotated[
        bool, typer.Option("--other-words", help="Accept a model with another order or vocabulary.")
    ] = False,
    sets: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The list that the servers follow.  [default: that of dlm cluster, beside "
            "cluster.toml; without one, the command prints what to write]",
        ),
        READ_PLACE,
    ] = None,
    given: Annotated[ClientSecurity, Options(SECURITY)],
    history: Annotated[
        bool,
        typer.Option("--history", help="Show who changed a cluster.toml in a store, when and why."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Replace the model of a running cluster, or go back.

    Servers load the new set beside the old one; both are compared on sampled sentences; a share of
    new utterances gets the new model; then all get it, and the old set is unloaded. Utterances keep
    the model that they began with. If the new model fails, is slow, or gives scores that differ
    from its files, the command goes back and exits with 1. After Ctrl-C or a crash, the same
    command continues.

    Examples:
        dlm rollout shards/new --share 5%
        dlm rollout --undo
        dlm rollout s3://models/en-2026-12 --cluster s3://models/cluster.toml
    """
    import sys
    from dataclasses import asdict
    from functools import partial

    from dlm.client.cluster_file import ClusterToml, check_files, edited
    from dlm.client.server import Connection
    from dlm.cluster.rolling import (
        Rolling,
        check_files_whole,
        check_pair,
        check_token,
        find_pair,
        manifests_of,
        models_served,
        not_needed,
        only_one,
        places_of,
    )
    from dlm.cluster.rollout import shown
    from dlm.config import resolve
    from dlm.index.placed import manifest_of
    from dlm.server.sets import replaced_sets, sets_file_of
    from dlm.stores.remote import RemotePath, located

    cluster, sets = located(cluster), sets and located(sets)
    if history:
        if not isinstance(cluster, RemotePath):
            raise ConfigError(
                f"{cluster} is a file on this machine, but only a cluster file in a store has a "
                "history; leave --history out"
            )
        for told, _ in cluster.history():
            print(told)
        return
    target = None if new is None else located(new)
    if target is None and not undo:
        raise ConfigError("NEW is missing; give the folder of a shard set, or --undo")
    flags = dict(times)
    if share is not None:
        flags["share"] = parsed("--share", share, _share, "a share such as 5% or 0.05")
    rules = resolve(Rules, "rollout", flags=flags)
    if sets is None and sets_file_of(cluster).exists():
        sets = sets_file_of(cluster)
    with only_one(cluster):
        toml = ClusterToml(cluster)
        if undo and toml.rollout() is None and sets is not None and replaced_sets(sets):
            target, undo = replaced_sets(sets)[-1], False  # the last roll-out is over
        manifest = None if target is None else manifest_of(target)
        security = given.over(toml.security())
        check_files(security)
        connect = partial(Connection, security=security)
        held, default, named = models_served(toml, connect)
        edited(toml.text, default, toml.rollout())  # refuse now what cannot be edited
        known = {**manifests_of(sets), **held}
        pair = find_pair(toml, manifest, known, default, undo=undo)
        check_token(named, pair)
        places = places_of(cluster, sets, pair, target)
        if not undo:
            check_pair(pair, toml.servers(), other_words=other_words)
            if isinstance(target, Path) and sets is not None and pair.new.shard_set not in held:
                check_files_whole(target, pair.new)
        lines = [] if text is None else text.read_text(encoding="utf-8").splitlines()[:1000]

        def tell(line: str) -> None:
            print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

        rolling = Rolling(pair, places, rules, given, tell, sentences=lines)
        try:
            ended = rolling.run(undo=undo)
        except (KeyboardInterrupt, DlmError, OSError):
            tell("stopped in the middle; the same command continues, and --undo goes back")
            raise
    stays = pair.old if ended.undone else pair.new
    if as_json:
        compared = None if rolling.last is None else asdict(rolling.last)
        failure = ended.failure or None
        print_json({"shard_set": stays.shard_set, "failure": failure, "compared": compared})
    else:
        print(f"the cluster serves shard set {stays.shard_set}")
        if spare := not_needed(ClusterToml(cluster).servers(), stays):
            print(f"servers not needed: {shown(spare)}; remove them from {cluster}, then stop them")
    if ended.failure:
        raise typer.Exit(1)


def _share(text: str) -> float:
    scale = 100 if text.endswith("%") else 1
    return float(text.removesuffix("%")) / scale
