"""`dlm rollout`: replaces the model of a running cluster by another, or goes back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import (
    Ca,
    Cert,
    ClusterFile,
    Insecure,
    Json,
    Key,
    ServerName,
    TokenFile,
    UseProxy,
    option,
)
from dlm.cluster.rollout import Rules
from dlm.errors import ConfigError, DlmError


def rollout(
    new: Annotated[
        Path | None,
        typer.Argument(metavar="[NEW]", help="Folder of the shard set to roll out."),
    ] = None,
    cluster: ClusterFile = Path("cluster.toml"),
    undo: Annotated[
        bool, typer.Option("--undo", help="Return to the model before, from wherever it is.")
    ] = False,
    share: Annotated[str | None, option(Rules, "share", metavar="SHARE")] = None,
    watch_for: Annotated[float | None, option(Rules, "watch_for")] = None,
    load_within: Annotated[float | None, option(Rules, "load_within")] = None,
    idle: Annotated[float | None, option(Rules, "idle")] = None,
    longest: Annotated[float | None, option(Rules, "longest")] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Sentences to compare both models on, one per line; the first 1,000 are used.  "
            "[default: drawn from the old model]",
        ),
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
    ] = None,
    ca: Ca = "",
    cert: Cert = "",
    key: Key = "",
    server_name: ServerName = "",
    token_file: TokenFile = "",
    insecure: Insecure = False,
    use_proxy: UseProxy = False,
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
    from dlm.cli.paths import check_reads
    from dlm.client.config.cluster_file import ClusterToml
    from dlm.client.config.credentials import check_files
    from dlm.client.config.rollout import edited
    from dlm.client.config.security import ClientSecurity
    from dlm.client.deliver.transport import GrpcConnection
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
    check_reads("NEW", new, folders=True, what="folder")
    check_reads("--text", text)
    flags = {
        "share": None if share is None else _share(share),
        "watch_for": watch_for,
        "load_within": load_within,
        "idle": idle,
        "longest": longest,
    }
    rules = resolve(Rules, "rollout", flags=flags)
    if sets is None and sets_file_of(cluster).exists():
        sets = sets_file_of(cluster)
    check_reads("--sets", sets)
    given = ClientSecurity(
        ca, cert, key, server_name, token_file, insecure=insecure, use_proxy=use_proxy
    )
    manifest = None if new is None else read_manifest(new)
    with only_one(cluster):
        toml = ClusterToml(cluster)
        security = given.over(toml.security())
        check_files(security)
        connect = partial(GrpcConnection, security=security)
        held, default, named = models_served(toml, connect)
        edited(cluster.read_text(encoding="utf-8"), default, toml.rollout())  # or it is refused
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

    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ConfigError(f"--share is {text}; expected a share such as 5% or 0.05") from None
