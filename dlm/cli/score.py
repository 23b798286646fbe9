"""`dlm score`: log10 probabilities of sentences, from servers or from a shard set on disk."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.json_output import as_json_line, print_json_line
from dlm.cli.options import (
    Ca,
    Cert,
    Insecure,
    Key,
    Quiet,
    ServedModel,
    ServerName,
    Skip,
    TextColumn,
    TokenFile,
    UseProxy,
)
from dlm.cli.scoring import any_bytes_on_stdout, open_here, open_text, print_summary, quick_start
from dlm.scoring import (
    BLOCK_BYTES,
    SERVED_BYTES,
    Scored,
    ScoreSummary,
    scored_by_servers,
    scored_here,
)
from dlm.units import finite

if TYPE_CHECKING:
    from dlm.client import SentenceScore
    from dlm.estimate.text import Block, LineFault


def score(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="TEXT",
            help="Text, one sentence per line: plain, .gz, .zst, .xz, .bz2 or parquet.  "
            "[default: standard input]",
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="cluster.toml that lists the servers.  [default: cluster.toml in this folder]",
        ),
    ] = None,
    local: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="Shard set, ARPA or KenLM binary file on disk to score from, without servers.",
        ),
    ] = None,
    model: ServedModel = None,
    words: Annotated[
        bool, typer.Option("--words", help="Print every token with its matched order.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object per sentence, then one `summary`."),
    ] = False,
    skip: Skip = False,
    column: TextColumn = "text",
    threads: Annotated[int, typer.Option(metavar="N", help="Number of threads with --local.")] = 2,
    deadline: Annotated[float, typer.Option(help="Time limit per batch, in seconds.")] = 30.0,
    ca: Ca = "",
    cert: Cert = "",
    key: Key = "",
    server_name: ServerName = "",
    token_file: TokenFile = "",
    insecure: Insecure = False,
    use_proxy: UseProxy = False,
    quiet: Quiet = False,
) -> None:
    """Score text: log10 probability, tokens and OOVs per sentence.

    Perplexities of all lines come last, on standard error: a pipe gets rows alone. Each line is
    scored as it arrives, also from a pipe. A line that --skip leaves out still has a row: nan and 0
    tokens, or null and "skipped" with --json. With --local, an ARPA file is first sharded into a
    temporary folder; a KenLM binary file is scored as it lies, with KenLM's scores. The options for
    TLS and tokens override cluster.toml.

    Examples:
        echo "the man went home" | dlm score
        dlm score --cluster cluster.toml heldout.txt
        dlm score --local shards/model --words heldout.txt
        dlm score --local model.arpa.zst heldout.txt
        dlm score --local model.binary heldout.txt
    """
    from dlm.cli.compiling import compile_kernels
    from dlm.errors import ConfigError

    if cluster is not None and local is not None:
        raise ConfigError("--cluster and --local were both given; give one of them")
    if model is not None and local is not None:
        raise ConfigError(
            "--model and --local were both given; --model applies to servers only, so leave it out"
        )
    if threads < 1:
        raise ConfigError(f"--threads is {threads}; expected 1 or more")
    any_bytes_on_stdout()  # words
    texts = [] if file is None else [file]
    with quick_start():
        reader = open_text(texts, skip, column, BLOCK_BYTES if local is not None else SERVED_BYTES)
    summary = ScoreSummary()
    with ExitStack() as stack:
        if local is not None:
            from dlm.cli.progress import stage_printer

            opened = open_here(local, None, None, stack, stage_printer(quiet=quiet))
            scored = scored_here(opened, reader.read(), threads)
        else:
            from dlm.client import Client, ClientConfig
            from dlm.client.config.cluster_file import ClusterToml
            from dlm.client.deliver.warm import KERNELS as ASKING

            cluster = cluster or Path("cluster.toml")
            ClusterToml(cluster).servers()
            compile_kernels(ASKING)
            config = ClientConfig(
                deadline_s=deadline,
                ca=ca,
                cert=cert,
                key=key,
                server_name=server_name,
                token_file=token_file,
                insecure=insecure,
                use_proxy=use_proxy,
            )
            client = Client.connect(cluster, config, model=model)
            utterance = stack.enter_context(client).utterance()
            scored = scored_by_servers(utterance, reader.read())
        if not as_json and not words:
            print("log10_prob\ttokens\toovs")
        for block, found in scored:
            found.add_to(summary)
            print(_answers(block, found, words=words, as_json=as_json), end="", flush=True)
    if as_json:
        facts = summary.facts()
        if skip:
            facts["skipped"] = reader.totals.skipped
        print_json_line({"summary": facts})
    else:
        print_summary(summary, reader, skip, sys.stderr)


def _answers(block: Block, found: Scored, *, words: bool, as_json: bool) -> str:
    """The rows of a block's lines, with those of the skipped lines in their places."""
    if not words and not as_json:
        rows = found.rows()
        if not block.left_out:
            return rows
        texts = rows.splitlines(keepends=True)
    else:
        texts = [
            _sentence(line, score, words=words, as_json=as_json)
            for line, score in found.sentences(block)
        ]
    out: list[str] = []
    done = 0
    for after, fault in block.left_out:
        out += [*texts[done:after], _gap(fault, words=words, as_json=as_json)]
        done = after
    return "".join([*out, *texts[done:]])


def _gap(fault: LineFault, *, words: bool, as_json: bool) -> str:
    """The row of a skipped line."""
    if as_json:
        return as_json_line({"log10_prob": None, "tokens": 0, "oovs": 0, "skipped": fault}) + "\n"
    return "= nan\t0\t0\n\n" if words else "nan\t0\t0\n"


def _tokens(sentence: list[bytes], count: int) -> list[str]:
    from dlm.ngram.vocab import END_SENTENCE, as_text

    return [*map(as_text, sentence), END_SENTENCE.decode()][:count]


def _sentence(line: list[bytes], score: SentenceScore, *, words: bool, as_json: bool) -> str:
    tokens = (
        zip(
            _tokens(line, score.tokens),
            score.token_matched_order.tolist(),
            score.token_log10_prob.tolist(),
            score.token_oov.tolist(),
            strict=True,
        )
        if words
        else ()
    )
    if as_json:
        facts: dict[str, Any] = {
            "log10_prob": finite(score.log10_prob),
            "tokens": score.tokens,
            "oovs": score.oovs,
        }
        if words:
            facts["words"] = [
                {"word": word, "matched_order": order, "log10_prob": finite(prob), "oov": oov}
                for word, order, prob, oov in tokens
            ]
        return as_json_line(facts) + "\n"
    rows = [
        f"{word}\t{order}\t{prob:.6f}" + ("\tOOV\n" if oov else "\n")
        for word, order, prob, oov in tokens
    ]
    total = f"{score.log10_prob:.6f}\t{score.tokens}\t{score.oovs}\n"
    return "".join([*rows, f"= {total}\n"])
