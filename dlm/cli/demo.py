"""`dlm demo`: serves and checks a small real model that comes with the package."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.options import Json
from dlm.cli.output import compile_kernels, print_json
from dlm.units import counted

if TYPE_CHECKING:
    from rich.console import Console

    from dlm.client.metrics import Stats
    from dlm.cluster.check import Checked
    from dlm.cluster.processes import Server

DEADLINE_S = 20.0  # a first start on a busy machine compiles while it answers
PACKAGED = 3  # number of shards of the set in dlm/data, which is used unchanged


def demo(
    shards: Annotated[
        int, typer.Option(min=1, max=16, help="Number of servers to start.")
    ] = PACKAGED,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text to score instead of the built-in sentences, one sentence per line.",
        ),
    ] = None,
    kill: Annotated[
        bool,
        typer.Option("--kill", help="Start two servers per shard, and kill one while they score."),
    ] = False,
    open_page: Annotated[
        bool,
        typer.Option(
            "--open",
            help="At the end, open a gateway's page in a browser, and serve it until Ctrl-C.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Serve a small real model, and check every score.

    Needs no files, and removes what it writes. Exits with 1 if a score differs.
    Shards for 3 servers come with the package; for another number they are built first.

    Examples:
        dlm demo
        dlm demo --kill
        dlm demo --shards 2
    """
    from rich.console import Console

    from dlm.client import Client, ClientConfig
    from dlm.client.table import KERNELS as asking
    from dlm.cluster.check import check_rescoring, check_sentences, counted_by_servers
    from dlm.cluster.processes import running_servers
    from dlm.files import scratch_folder
    from dlm.index.layout import read_manifest
    from dlm.index.making import build_shard_set
    from dlm.index.making.shard_set import KERNELS as building
    from dlm.ngram.arpa.rows import KERNELS as reading
    from dlm.ngram.backoff import DictModel
    from dlm.server.compiling import KERNELS as serving

    console = Console(highlight=False)
    stages = Console(highlight=False, stderr=as_json)
    began = time.monotonic()

    def tell(line: str) -> None:
        stages.print(f"[{time.monotonic() - began:5.1f} s] {line}", markup=False, soft_wrap=True)

    data = files("dlm") / "data"
    with (
        scratch_folder(None, "dlm-demo") as scratch,
        as_file(data / "books20k.arpa.zst") as arpa,
        as_file(data / "books20k") as packaged,
    ):
        folder = packaged if shards == PACKAGED else scratch / "shards"
        compile_kernels((*serving, *asking, *reading))
        if folder != packaged:
            compile_kernels(building)
            tell(f"splitting {arpa.name} into {counted(shards, 'shard')}")
            build_shard_set(arpa, folder, shards)
        manifest = read_manifest(folder)
        counts = " + ".join(f"{c:,}" for c in manifest.counts)
        replicas = 2 if kill else 1
        tell(f"{counts} n-grams; starting {counted(shards * replicas, 'server')}")
        with running_servers([folder], replicas=replicas) as servers:
            addresses = [server.endpoint.address for server in servers]
            tell("serving at " + ", ".join(addresses))
            config = ClientConfig(deadline_s=DEADLINE_S, cache_dir=Path(scratch) / "cache")
            with Client.connect(addresses, config) as client:
                tell("client connected, low orders fetched; reading the ARPA file to compare with")
                oracle = DictModel.from_arpa(arpa)
                raw = (data / "demo.txt").read_bytes() if text is None else text.read_bytes()
                lines = [line for line in raw.splitlines() if line.strip()]
                tell(f"scoring {counted(len(lines), 'sentence')}, then rescoring as a decoder does")
                sentences, sentence_stats = check_sentences(client, oracle, lines)
                if kill:
                    servers[0].process.kill()
                    tell(f"killed a server of shard 0 ({addresses.pop(0)}); scoring goes on")
                rescoring, rescoring_stats = check_rescoring(client, oracle, lines[:22])
                served = counted_by_servers(client, addresses, DEADLINE_S)
            if open_page:
                tell("checked every score; starting a gateway")
                _show_page(servers, scratch / "cluster.toml", tell)
                tell("stopping the servers")
            else:
                tell("checked every score; stopping the servers")
    tell("stopped")
    columns = [_facts(sentences, sentence_stats), _facts(rescoring, rescoring_stats)]
    asked = {"messages": served[0], "distinct_queries": served[1]}
    if as_json:
        print_json({"sentences": columns[0], "rescoring": columns[1], "servers": asked})
    else:
        _table(console, columns, asked)
    if sentences.differences + rescoring.differences:
        raise typer.Exit(1)


def _show_page(servers: list[Server], cluster: Path, tell: Callable[[str], None]) -> None:
    """Runs a gateway to these servers and opens its page in a browser, until Ctrl-C."""
    import webbrowser

    from dlm.client.cluster_file import write_cluster_file
    from dlm.cluster.processes import running_gateway

    write_cluster_file(cluster, [one.endpoint for one in servers if one.process.poll() is None])
    with running_gateway(cluster) as (gateway, notice), suppress(KeyboardInterrupt):
        url = f"http://127.0.0.1:{notice['http_port']}/"
        tell(f"a gateway shows these servers at {url} until Ctrl-C")
        webbrowser.open(url)
        gateway.wait()


def _facts(checked: Checked, stats: tuple[Stats, Stats]) -> dict[str, Any]:
    return {
        "queries": checked.queries,
        "calls": len(checked.calls_ms),
        "messages": stats[1].messages - stats[0].messages,
        "queries_without_message": stats[1].local_hits - stats[0].local_hits,
        "call_ms_median": checked.call_ms(0.5),
        "call_ms_p99": checked.call_ms(0.99),
        "differences": checked.differences,
    }


def _table(console: Console, columns: list[dict[str, Any]], asked: dict[str, int]) -> None:
    from rich.table import Table

    table = Table(title="n-gram queries over gRPC")
    table.add_column("")
    table.add_column("sentences", justify="right")
    table.add_column("rescoring", justify="right")
    rows = {
        "n-grams scored": [f"{one['queries']:,}" for one in columns],
        "calls": [f"{one['calls']:,}" for one in columns],
        "messages": [f"{one['messages']:,}" for one in columns],
        "n-grams per message": [
            f"{one['queries'] / max(one['messages'], 1):.1f}" for one in columns
        ],
        "answered without a message": [
            f"{one['queries_without_message'] / max(one['queries'], 1):.1%}" for one in columns
        ],
        "call, median": [f"{one['call_ms_median']:.2f} ms" for one in columns],
        "call, 99th percentile": [f"{one['call_ms_p99']:.2f} ms" for one in columns],
        "scores that differ": [f"{one['differences']:,}" for one in columns],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    messages = counted(asked["messages"], "message")
    console.print(
        f"The servers counted {messages} with {asked['distinct_queries']:,} distinct queries.",
        markup=False,
    )
    if sum(one["differences"] for one in columns):
        console.print("Some scores differ from the ARPA model's. This is a bug.", markup=False)
    else:
        total = sum(one["queries"] for one in columns)
        console.print(f"All {total:,} scores equal the ARPA model's, bit for bit.", markup=False)
