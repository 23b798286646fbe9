"""`dlm score`: log10 probabilities of sentences, from a cluster or from a shard set on disk."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

if TYPE_CHECKING:
    from dlm.client import SentenceScore

SENTENCES = 512  # sentences in one call: enough to fill messages, little enough to show progress


@dataclass
class Summary:
    """Totals over sentences; perplexities as KenLM's `query -v summary` defines them.

    With OOVs: 10 ** -(log10 P / tokens). Without: their log10 P and their number are left out of
    both. Sentence ends are tokens.
    """

    sentences: int = 0
    tokens: int = 0
    oovs: int = 0
    log10_prob: float = 0.0
    log10_oovs: float = 0.0

    def add(self, score: SentenceScore) -> None:
        """Counts one sentence in."""
        self.sentences += 1
        self.tokens += score.tokens
        self.oovs += score.oovs
        self.log10_prob += score.log10_prob
        self.log10_oovs += score.log10_oovs

    def facts(self) -> dict[str, Any]:
        """What the JSON object `summary` holds; a perplexity over no token is null."""
        return {
            "sentences": self.sentences,
            "tokens": self.tokens,
            "oovs": self.oovs,
            "log10_prob": _finite(self.log10_prob),
            "perplexity": self.perplexity(self.log10_prob, self.tokens),
            "perplexity_without_oovs": self.perplexity(
                self.log10_prob - self.log10_oovs, self.tokens - self.oovs
            ),
        }

    @staticmethod
    def perplexity(log10_total: float, tokens: int) -> float | None:
        """None where there is no token or a probability of zero."""
        from dlm.units import perplexity

        return perplexity(log10_total, tokens) if tokens and log10_total > -1e308 else None


def score(
    file: Annotated[
        Path | None, typer.Argument(help="Text, a sentence a line; standard input without it.")
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
) -> None:
    """Score text: log10 P, tokens and OOVs; then perplexities.

    Without --cluster or --local, cluster.toml in this folder is used; what it says of TLS and
    tokens yields to --ca, --cert, --key, --server-name and --token-file.
    Example: dlm score --cluster cluster.toml text.txt
    """
    from dlm.client import Client, ClientConfig
    from dlm.client.local import LocalClient
    from dlm.client.utterance import split_words
    from dlm.errors import ConfigError

    if cluster is not None and local is not None:
        raise ConfigError("--cluster and --local were both given; one of them is expected")
    if model is not None and local is not None:
        raise ConfigError("--model chooses among what servers hold; --local names a folder")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # words are bytes
    with _input(file) as stream:
        client: Any
        if local is not None:
            client = LocalClient.open(local)
        else:
            config = ClientConfig(
                deadline_s=deadline,
                ca=ca,
                cert=cert,
                key=key,
                server_name=server_name,
                token_file=token_file,
                insecure=insecure,
            )
            client = Client.connect(cluster or Path("cluster.toml"), config, model=model)
        utterance = client.utterance()
        summary = Summary()
        if not as_json and not words:
            print("log10_prob\ttokens\toovs")
        source = _lines(stream)
        while lines := list(islice(source, SENTENCES)):
            sentences = [split_words(line) for line in lines]
            for sentence, result in zip(
                sentences, utterance.score_sentences(sentences), strict=True
            ):
                summary.add(result)
                _print(sentence, result, words=words, as_json=as_json)
    if as_json:
        print(json.dumps({"summary": summary.facts()}))
    else:
        print_summary(summary)


def _finite(value: float) -> float | None:
    """JSON has no infinity: a probability of zero is null."""
    return value if value > -1e308 else None


def _input(file: Path | None) -> BinaryIO:
    return sys.stdin.buffer if file is None or str(file) == "-" else file.open("rb")


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    for line in stream:
        yield line.rstrip(b"\r\n")


def _tokens(sentence: list[bytes], count: int) -> list[str]:
    from dlm.ngram.vocab import END_SENTENCE, as_text

    return [*map(as_text, sentence), END_SENTENCE.decode()][:count]


def _print(sentence: list[bytes], result: SentenceScore, *, words: bool, as_json: bool) -> None:
    tokens = (
        zip(
            _tokens(sentence, result.tokens),
            result.token_matched_order.tolist(),
            result.token_log10_prob.tolist(),
            result.token_oov.tolist(),
            strict=True,
        )
        if words
        else ()
    )
    if as_json:
        facts: dict[str, Any] = {
            "log10_prob": _finite(result.log10_prob),
            "tokens": result.tokens,
            "oovs": result.oovs,
        }
        if words:
            facts["words"] = [
                {"word": word, "matched_order": order, "log10_prob": _finite(prob), "oov": oov}
                for word, order, prob, oov in tokens
            ]
        print(json.dumps(facts))
        return
    for word, order, prob, oov in tokens:
        print(f"{word}\t{order}\t{prob:.6f}" + ("\tOOV" if oov else ""))
    total = f"{result.log10_prob:.6f}\t{result.tokens}\t{result.oovs}"
    print(f"= {total}\n" if words else total)


def print_summary(summary: Summary) -> None:
    facts = summary.facts()

    def number(value: float | None) -> str:
        return "undefined" if value is None else f"{value:.6f}"

    print(f"Perplexity including OOVs:\t{number(facts['perplexity'])}")
    print(f"Perplexity excluding OOVs:\t{number(facts['perplexity_without_oovs'])}")
    print(f"OOVs:\t{summary.oovs}")
    print(f"Tokens:\t{summary.tokens}")
    print(f"Sentences:\t{summary.sentences}")
