"""`dlm score` and `dlm perplexity`: log10 probabilities of sentences, and a model's perplexity on
text, from servers or from a model on disk."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.checks import SCRATCH, check_reads, within
from dlm.cli.options import (
    SECURITY,
    Options,
    PiecesFile,
    Quiet,
    ServedModel,
    Skip,
    TextColumn,
    Threads,
)
from dlm.cli.output import as_json_line, stage_printer
from dlm.cli.scoring import (
    any_bytes_on_stdout,
    open_here,
    open_text,
    open_there,
    print_json_summary,
    print_summary,
    quick_start,
)
from dlm.client.config import PLAIN, ClientSecurity
from dlm.errors import ConfigError
from dlm.resources import parse_size
from dlm.scoring import (
    BLOCK_BYTES,
    SERVED_BYTES,
    Scored,
    ScoreSummary,
    scored_by_servers,
    scored_here,
)
from dlm.units import counted, finite

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
    pieces: PiecesFile = None,
    threads: Annotated[
        int, typer.Option(metavar="N", help="Number of threads with --local."), within(low=1)
    ] = 2,
    deadline: Annotated[float, typer.Option(help="Time limit per batch, in seconds.")] = 30.0,
    security: Annotated[ClientSecurity, Options(SECURITY)] = PLAIN,
    quiet: Quiet = False,
) -> None:
    """Score text: log10 probability, tokens and OOVs per sentence.

    The perplexities of all lines come last, on standard error, so that a pipe gets only rows. Each
    line is scored as it arrives, even from a pipe. A line that --skip leaves out still has a row:
    nan and 0 tokens, or null and "skipped" with --json. With --local, an ARPA file is first sharded
    into a temporary folder; a KenLM binary file is scored in place, with KenLM's scores. The
    options for TLS and tokens override cluster.toml.

    Examples:
        echo "the man went home" | dlm score
        dlm score --cluster cluster.toml heldout.txt
        dlm score --local shards/model --words heldout.txt
        dlm score --local model.arpa.zst heldout.txt
        dlm score --local model.binary heldout.txt
    """
    if cluster is not None and local is not None:
        raise ConfigError("--cluster and --local were both given; give one of them")
    if model is not None and local is not None:
        raise ConfigError(
            "--model and --local were both given; --model applies to servers only, so leave it out"
        )
    any_bytes_on_stdout()  # words need not be UTF-8
    texts = [] if file is None else [file]
    with quick_start():
        block_bytes = BLOCK_BYTES if local is not None else SERVED_BYTES
        reader = open_text(texts, skip, column, pieces, block_bytes)
    summary = ScoreSummary()
    with ExitStack() as stack:
        if local is not None:
            opened = open_here(local, None, None, stack, stage_printer(quiet=quiet))
            scored = scored_here(opened, reader.read(), threads)
        else:
            from dlm.client.cluster_file import ClusterToml

            cluster = cluster or Path("cluster.toml")
            ClusterToml(cluster).servers()
            utterance = open_there(cluster, model, stack, deadline_s=deadline, **asdict(security))
            scored = scored_by_servers(utterance, reader.read())
        if not as_json and not words:
            print("log10_prob\ttokens\toovs")
        for block, found in scored:
            found.add_to(summary)
            print(_answers(block, found, words=words, as_json=as_json), end="", flush=True)
    if as_json:
        print_json_summary(summary, reader, skip)
    else:
        print_summary(summary, reader, skip, sys.stderr)


def _answers(block: Block, found: Scored, *, words: bool, as_json: bool) -> str:
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


def perplexity(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL [TEXT]...",
            help="An ARPA or KenLM binary file, or the folder of a shard set (none with "
            "--cluster), then texts, one sentence per line: plain, .gz, .zst, .xz, .bz2 or "
            "parquet. Without a text, or for -, standard input.",
        ),
    ],
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="cluster.toml of the servers to query, instead of a MODEL."
        ),
    ] = None,
    model: ServedModel = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, `summary`.")
    ] = False,
    memory: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Memory limit for an ARPA file, such as 800M.  [default: half of the free memory]",
        ),
    ] = None,
    tmp: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for the shards of an ARPA file.  [default: the system's]"
        ),
        SCRATCH,
    ] = None,
    skip: Skip = False,
    column: TextColumn = "text",
    pieces: PiecesFile = None,
    threads: Threads = 2,
    deadline: Annotated[float, typer.Option(help="Time limit per batch, in seconds.")] = 30.0,
    quiet: Quiet = False,
) -> None:
    """Compute the perplexity of text, and the matches per order.

    The summary, with and without OOVs, is that of `dlm score`. An ARPA file is first sharded into a
    temporary folder, at about 12 bytes per n-gram, which is removed afterwards. TLS and tokens for
    servers come from cluster.toml.

    Examples:
        dlm perplexity model.arpa.zst heldout.txt
        dlm perplexity shards/model heldout.txt --json
        dlm perplexity --cluster cluster.toml heldout.txt
    """
    tell = stage_printer(quiet=quiet)

    with ExitStack() as stack:
        if cluster is not None:
            if memory is not None or tmp is not None:
                raise ConfigError(
                    "--memory and --tmp apply to an ARPA file, not --cluster; leave them out"
                )
            check_reads("--cluster", cluster, stores=True)
            check_reads("TEXT", *paths)
            reader = open_text(paths, skip, column, pieces, SERVED_BYTES)
            utterance = open_there(cluster, model, stack, deadline_s=deadline)
            order = utterance.order
            scored = scored_by_servers(utterance, reader.read())
        else:
            if model is not None:
                raise ConfigError(
                    "--model applies to servers only; add --cluster, or leave --model out"
                )
            check_reads("MODEL", paths[0], folders=True, stores=True)
            check_reads("TEXT", *paths[1:])
            opened = open_here(paths[0], memory, tmp, stack, tell)
            reader = open_text(paths[1:], skip, column, pieces)
            order = opened.order
            scored = scored_here(opened, reader.read(), threads)
        found = ScoreSummary(by_order=[0] * order)
        for _, some in scored:
            some.add_to(found)
    tell(f"{counted(found.tokens, 'token')} scored")
    if as_json:
        print_json_summary(found, reader, skip, hits=found.by_order)
        return
    print_summary(found, reader, skip)
    for k, hits in enumerate(found.by_order, 1):
        share = 100 * hits / found.tokens if found.tokens else 0.0
        print(f"Hits of order {k}:\t{hits}\t{share:.2f} %")
