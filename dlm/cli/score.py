"""`dlm score`: log10 probabilities of sentences, from a cluster or from a shard set on disk."""

from __future__ import annotations

import io
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.scoring import COLUMN, SKIP, open_text, print_summary, quick_start
from dlm.scoring import (
    BLOCK_BYTES,
    SERVED_BYTES,
    Scored,
    ScoreSummary,
    finite,
    scored_by_servers,
    scored_here,
)

if TYPE_CHECKING:
    from dlm.client import SentenceScore
    from dlm.estimate.text import Block, LineFault


def score(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Text, one sentence per line: plain, .gz, .zst, .xz, .bz2 or parquet; standard "
            "input without it."
        ),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="cluster.toml of the servers to ask.")
    ] = None,
    local: Annotated[
        Path | None, typer.Option(help="Score from this shard set on disk, without servers.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Which model of the servers: the first 6 digits of its id, or more."),
    ] = None,
    words: Annotated[
        bool, typer.Option("--words", help="Every token with its matched order.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One object a sentence, then one object `summary`.")
    ] = False,
    skip: Annotated[bool, typer.Option("--skip", help=SKIP)] = False,
    column: Annotated[str, typer.Option(help=COLUMN)] = "text",
    threads: Annotated[int, typer.Option(help="Threads that score with --local.")] = 2,
    deadline: Annotated[float, typer.Option(help="Seconds a batch of sentences may take.")] = 30.0,
    ca: Annotated[
        str, typer.Option(help="PEM file: who signs the servers' certificates; turns TLS on.")
    ] = "",
    cert: Annotated[str, typer.Option(help="PEM file: this client's certificate.")] = "",
    key: Annotated[str, typer.Option(help="PEM file: its key, mode 600.")] = "",
    server_name: Annotated[str, typer.Option(help="Name in the servers' certificates.")] = "",
    token_file: Annotated[str, typer.Option(help="File with this client's token, mode 600.")] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Send the token to other machines without TLS.")
    ] = False,
    use_proxy: Annotated[
        bool, typer.Option("--use-proxy", help="Use the environment's proxy; needs TLS.")
    ] = False,
) -> None:
    """Score text: log10 P, tokens and OOVs; then perplexities.

    Each line is answered as it comes, also from a pipe. A line that --skip leaves out has a row of
    its own: nan and no tokens, or null and "skipped" with --json.

    Without --cluster or --local, cluster.toml in this folder is used; what it says of TLS and
    tokens yields to --ca, --cert, --key, --server-name and --token-file.
    Example: dlm score --cluster cluster.toml text.txt
    """
    from dlm.cli.compiling import compile_kernels
    from dlm.errors import ConfigError

    if cluster is not None and local is not None:
        raise ConfigError("--cluster and --local were both given; one of them is expected")
    if model is not None and local is not None:
        raise ConfigError("--model chooses among what servers hold; --local names a folder")
    if threads < 1:
        raise ConfigError(f"--threads {threads}: give 1 or more")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # words are bytes
    texts = [] if file is None else [file]
    with quick_start():
        reader = open_text(texts, skip, column, BLOCK_BYTES if local is not None else SERVED_BYTES)
        if local is not None:
            from dlm.index.layout import read_manifest
            from dlm.index.search.local import LocalModel
            from dlm.index.search.shard import OPENING
            from dlm.index.search.text.score import KERNELS

            read_manifest(local)  # what is wrong with it is said before anything is compiled
            compile_kernels((*KERNELS, *OPENING))
            opened = LocalModel.open(local)
            _ = opened.word_table
    summary = ScoreSummary()
    with ExitStack() as stack:
        if local is not None:
            scored = scored_here(opened, reader.read(), threads)
        else:
            from dlm.client import Client, ClientConfig
            from dlm.client.topology import read_cluster_file
            from dlm.client.warm import KERNELS as ASKING

            cluster = cluster or Path("cluster.toml")
            read_cluster_file(cluster)
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
        print(json.dumps({"summary": facts}))
    else:
        print_summary(summary, reader, skip)


def _answers(block: Block, found: Scored, *, words: bool, as_json: bool) -> str:
    """The rows of the lines of a block, those that were left out among them."""
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
    """What stands in the place of a line that was left out."""
    if as_json:
        return json.dumps({"log10_prob": None, "tokens": 0, "oovs": 0, "skipped": fault}) + "\n"
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
        return json.dumps(facts) + "\n"
    rows = [
        f"{word}\t{order}\t{prob:.6f}" + ("\tOOV\n" if oov else "\n")
        for word, order, prob, oov in tokens
    ]
    total = f"{score.log10_prob:.6f}\t{score.tokens}\t{score.oovs}\n"
    return "".join([*rows, f"= {total}\n"])
