"""`dlm rollout`: replaces the model of a running cluster by another, or goes back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dlm.cli.checks import READ, READ_FOLDER, parsed
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
        READ_FOLDER,
    ] = None,
    cluster: ClusterFile = Path("cluster.toml"),
    undo: Annotated[
        bool, typer.Option("--undo", help="Return to the model before, from wherever it is.")
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
        bool, typer.Option("--other-words", help="Accept another order or vocabulary.")
    ] = False,
    sets: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The list that the servers follow.  [default: that of dlm cluster, beside "
            "cluster.toml; without one, the command prints what to write]",
        ),
        READ,
    ] = None,
    given: Annotated[ClientSecurity, Options(SECURITY)],
    as_json: Json = False,
) -> None:
    """Replace the model of a running cluster, or go back.

    Servers load the new set beside the old one; both are compared on sampled sentences; a share of
    new utterances gets the new model; then all do, and the old set is unloaded. Utterances stay on
    the model they began with. If the new model fails, scores other than its files, or is slow, the
    command goes back and exits with 1. After Ctrl-C or a crash, the same command goes on.

    Examples:
        dlm rollout shards/new --share 5%
        dlm rollout --undo
    """
    import sys
    from dataclasses import asdict
    from functools import partial

    from dlm.resources import give_way

    give_way()  # before what takes time: servers may share this machine
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
    from dlm.index.layout import read_manifest
    from dlm.server.sets import sets_file_of

    if new is None and not undo:
        raise ConfigError("NEW is missing; give the folder of a shard set, or --undo")
    flags = dict(times)
    if share is not None:
        flags["share"] = parsed("--share", share, _share, "a share such as 5% or 0.05")
    rules = resolve(Rules, "rollout", flags=flags)
    if sets is None and sets_file_of(cluster).exists():
        sets = sets_file_of(cluster)
    manifest = None if new is None else read_manifest(new)
    with only_one(cluster):
        toml = ClusterToml(cluster)
        security = given.over(toml.security())
        check_files(security)
        connect = partial(Connection, security=security)
        held, default, named = models_served(toml, connect)
        edited(toml.text, default, toml.rollout())  # or it is refused
        known = {**manifests_of(sets), **held}
        pair = find_pair(toml, manifest, known, default, undo=undo)
        check_token(named, pair)
        places = places_of(cluster, sets, pair, new)
        if not undo:
            check_pair(pair, toml.servers(), other_words=other_words)
            if new is not None and sets is not None and pair.new.shard_set not in held:
                check_files_whole(new, pair.new)
        lines = [] if text is None else text.read_text(encoding="utf-8").splitlines()[:1000]

        def tell(line: str) -> None:
            print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

        rolling = Rolling(pair, places, rules, given, tell, sentences=lines)
        try:
            ended = rolling.run(undo=undo)
        except (KeyboardInterrupt, DlmError, OSError):
            tell("stopped where it was; the same command goes on, and --undo goes back")
            raise
    stays = pair.old if ended.undone else pair.new
    if as_json:
        compared = None if rolling.last is None else asdict(rolling.last)
        print_json(
            {"shard_set": stays.shard_set, "failure": ended.failure or None, "compared": compared}
        )
    else:
        print(f"the cluster serves shard set {stays.shard_set}")
        if spare := not_needed(ClusterToml(cluster).servers(), stays):
            print(f"it has no shard for {shown(spare)}: remove them from {cluster}, then stop them")
    if ended.failure:
        raise typer.Exit(1)


def _share(text: str) -> float:
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
