"""`dlm perplexity`: how well a model predicts text, from an ARPA file, a shard set or servers."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.score import SENTENCES, Summary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dlm.index.local import LocalModel

BLOCK_BYTES = 1 << 20  # of text scored at once by a thread; whole lines, so a longer one is more


@dataclass
class Hits(Summary):
    """The totals of `dlm score`, and how often each order was the longest n-gram found."""

    by_order: list[int] = field(default_factory=list)

    def count(self, matched_order: NDArray[np.uint8], order: int) -> None:
        """Counts the tokens of each matched order in."""
        import numpy as np

        found = np.bincount(matched_order, minlength=order + 1)[1:].tolist()
        self.by_order = self.by_order or [0] * order
        self.by_order = [a + b for a, b in zip(self.by_order, found, strict=True)]

    def merge(self, other: Hits) -> None:
        """Counts the totals of another text in."""
        self.sentences += other.sentences
        self.tokens += other.tokens
        self.oovs += other.oovs
        self.log10_prob += other.log10_prob
        self.log10_oovs += other.log10_oovs
        self.by_order = self.by_order or [0] * len(other.by_order)
        self.by_order = [a + b for a, b in zip(self.by_order, other.by_order, strict=True)]

    def facts(self) -> dict[str, Any]:
        """See `Summary.facts`; `hits[k - 1]` is the tokens whose longest n-gram has order k."""
        return {**super().facts(), "hits": self.by_order}


def perplexity(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL [TEXT]...",
            help="An ARPA file or the folder of a shard set, unless --cluster is given; then texts,"
            " a sentence a line, plain, .gz, .zst or .xz; standard input without one, or for -.",
        ),
    ],
    cluster: Annotated[
        Path | None, typer.Option(help="cluster.toml of servers to ask: no MODEL is given then.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Which model of the servers: the first 6 digits of its id, or more."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object `summary`.")] = False,
    memory: Annotated[
        str | None,
        typer.Option(help="Limit for an ARPA file, as 800M; half of what is free if not given."),
    ] = None,
    tmp: Annotated[
        Path | None, typer.Option(help="Folder for an ARPA file's n-grams; the system's if not.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads that score.")] = 2,
    deadline: Annotated[float, typer.Option(help="Seconds a batch of sentences may take.")] = 30.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the stages.")] = False,
) -> None:
    """Tell the perplexity of text, and which orders were found.

    The summary, with and without OOVs, is that of `dlm score`. An ARPA file is put into a shard set
    in a temporary folder first, of some 12 bytes an n-gram, which is removed afterwards. TLS and
    tokens of servers are those that cluster.toml names.

    Example: dlm perplexity model.arpa.zst heldout.txt
    """
    from dlm.errors import ConfigError

    if threads < 1:
        raise ConfigError(f"--threads {threads}: give 1 or more")
    began = time.monotonic()

    def tell(line: str) -> None:
        if not quiet:
            print(f"[{time.monotonic() - began:6.1f} s] {line}", file=sys.stderr)

    if cluster is not None:
        if memory is not None or tmp is not None:
            raise ConfigError("--memory and --tmp are for an ARPA file; --cluster asks servers")
        found = _of_servers(cluster, model, paths, deadline)
    else:
        if model is not None:
            raise ConfigError("--model chooses among what servers hold; give --cluster with it")
        with ExitStack() as stack:
            found = _of_local(_opened(paths[0], memory, tmp, stack, tell), paths[1:], threads)
    tell(f"{found.tokens:,} tokens scored")
    if as_json:
        print(json.dumps({"summary": found.facts()}))
    else:
        _print(found)


def _opened(
    place: Path, memory: str | None, tmp: Path | None, stack: ExitStack, tell: Callable[[str], None]
) -> LocalModel:
    """The model at `place`; what has to be written for it goes with the `stack`."""
    from dlm.errors import ConfigError
    from dlm.index.build import build_shard_set
    from dlm.index.local import LocalModel
    from dlm.index.stream.budget import parse_size
    from dlm.ngram.arpa import is_parts_folder

    if place.is_dir() and not is_parts_folder(place):
        if memory is not None or tmp is not None:
            raise ConfigError(f"--memory and --tmp are for an ARPA file; {place} is a folder")
        return LocalModel.open(place)
    if tmp is not None and not tmp.is_dir():
        raise ConfigError(f"--tmp {tmp}: no such folder")
    limit = None if memory is None else parse_size(memory)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dlm-perplexity-", dir=tmp))
    output = Path(folder) / "set"
    build_shard_set(place, output, 1, memory_bytes=limit, progress=tell)
    return LocalModel.open(output, verify=False)  # it was written a moment ago


def _of_local(model: LocalModel, texts: list[Path], threads: int) -> Hits:
    """The totals of texts, scored in blocks of lines."""
    total = Hits(by_order=[0] * model.order)
    _ = model.word_table  # made once, before threads ask for it
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Hits]] = deque()
        for block in chain.from_iterable(text_blocks(text) for text in texts or [Path("-")]):
            waiting.append(pool.submit(_score_block, model, block))
            if len(waiting) > 2 * threads:
                total.merge(waiting.popleft().result())
        while waiting:
            total.merge(waiting.popleft().result())
    return total


def _score_block(model: LocalModel, text: bytes) -> Hits:
    """The totals of some lines, without the last line end."""
    import numpy as np

    from dlm.index.text.score import score_sentences
    from dlm.ngram.vocab import UNK_ID

    ids, begin = model.word_table.ids_of_text(text)
    sentences = len(begin) - 1
    answers, totals = score_sentences(model, ids, begin, bos=True, eos=True)
    # The places of what is scored for <s>, which is no token, and of </s>.
    starts = begin[:-1] + 2 * np.arange(sentences)
    is_token = np.ones(len(answers.log10_prob), np.bool_)
    is_token[starts] = False
    is_word = is_token.copy()
    is_word[begin[1:] + 2 * np.arange(sentences) + 1] = False
    oov = ids == UNK_ID
    out = Hits(
        sentences=sentences,
        tokens=len(ids) + sentences,
        oovs=int(oov.sum()),
        log10_prob=float(totals.sum()),
        log10_oovs=float(answers.log10_prob[is_word][oov].sum(dtype=np.float64)),
    )
    out.count(answers.matched_order[is_token], model.order)
    return out


def _of_servers(cluster: Path, model: str | None, texts: list[Path], deadline_s: float) -> Hits:
    """The totals of texts, scored by servers."""
    from dlm.client import Client, ClientConfig
    from dlm.client.utterance import split_words

    total = Hits()
    with Client.connect(cluster, ClientConfig(deadline_s=deadline_s), model=model) as client:
        utterance = client.utterance()
        total.by_order = [0] * utterance.order
        lines = (
            line
            for text in texts or [Path("-")]
            for block in text_blocks(text)
            for line in block.split(b"\n")
        )
        while some := list(islice(lines, SENTENCES)):
            for score in utterance.score_sentences([split_words(line) for line in some]):
                total.add(score)
                total.count(score.token_matched_order, utterance.order)
    return total


def text_blocks(path: Path) -> Iterator[bytes]:
    """The lines of a text in blocks, each without its last line end."""
    from dlm.errors import FormatError
    from dlm.ngram._arpa_open import DamagedStream, TextSource

    standard = str(path) == "-"
    source = TextSource("/dev/stdin" if standard else str(path))
    try:
        rest: list[bytes] = []
        size = 0
        while piece := source.read(BLOCK_BYTES):
            end = piece.rfind(b"\n")
            size += len(piece)
            if end < 0 or size < BLOCK_BYTES:
                rest.append(piece)
                continue
            yield b"".join((*rest, piece[:end]))
            rest = [piece[end + 1 :]]
            size = len(rest[0])
        if size:
            yield b"".join(rest).removesuffix(b"\n")
    except DamagedStream as exc:
        raise FormatError(
            f"{path}: the {source.compression} stream is cut short or damaged ({exc}). Copy the "
            "file again from where it was made"
        ) from exc
    finally:
        source.close()


def _print(found: Hits) -> None:
    from dlm.cli.score import print_summary

    print_summary(found)
    for order, hits in enumerate(found.by_order, 1):
        share = 100 * hits / found.tokens if found.tokens else 0.0
        print(f"Hits of order {order}:\t{hits}\t{share:.2f} %")
