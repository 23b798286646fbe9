"""`dlm demo`: the whole path, on a small real model that comes with the package."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import numpy as np
import typer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dlm.client import Client, State, Utterance
    from dlm.client.runtime import Stats
    from dlm.ngram.backoff import DictModel

# Hypotheses by state: total log10 P and the words behind it.
Beam: TypeAlias = "dict[State, tuple[float, tuple[int, ...]]]"

HYPOTHESES = 10
CANDIDATES = 20
DEADLINE_S = 20.0  # a first start on a busy machine compiles while it answers


@dataclass
class Checked:
    """Scores compared with the oracle, and how long the calls took."""

    queries: int = 0
    differences: int = 0
    calls_ms: list[float] = field(default_factory=list)


def demo(
    shards: Annotated[int, typer.Option(min=1, max=16, help="Servers to start.")] = 3,
    text: Annotated[
        Path | None, typer.Option(help="Score this text instead, a sentence a line.")
    ] = None,
) -> None:
    """Shard a small real model, serve it, and check every score.

    Example: dlm demo
    """
    from rich.console import Console

    from dlm.cli.compiling import compile_kernels
    from dlm.cli.processes import running_servers
    from dlm.client import Client, ClientConfig
    from dlm.client.warm import KERNELS as asking
    from dlm.files import scratch_folder
    from dlm.index.build import build_shard_set
    from dlm.index.build.shard_set import KERNELS as building
    from dlm.ngram.backoff import DictModel
    from dlm.server.compiling import KERNELS as serving

    console = Console(highlight=False)
    began = time.monotonic()

    def tell(line: str) -> None:
        console.print(f"[{time.monotonic() - began:5.1f} s] {line}", markup=False, soft_wrap=True)

    data = files("dlm") / "data"
    with (
        scratch_folder(None, "dlm-demo") as scratch,
        as_file(data / "books20k.arpa.zst") as arpa,
    ):
        folder = scratch / "shards"
        compile_kernels((*serving, *asking, *building))
        tell(f"sharding {arpa.name} in {shards}")
        manifest = build_shard_set(arpa, folder, shards)
        counts = " + ".join(f"{c:,}" for c in manifest.counts)
        tell(f"{counts} n-grams; starting {shards} servers")
        with running_servers([folder]) as servers:
            addresses = [server.endpoint.address for server in servers]
            tell("serving at " + ", ".join(addresses))
            config = ClientConfig(deadline_s=DEADLINE_S, cache_dir=Path(scratch) / "cache")
            with Client.connect(addresses, config) as client:
                tell("client connected, low orders fetched; reading the same model as the oracle")
                oracle = DictModel.from_arpa(arpa)
                raw = (data / "demo.txt").read_bytes() if text is None else text.read_bytes()
                lines = [line for line in raw.splitlines() if line.strip()]
                tell(f"scoring {len(lines)} sentences, then rescoring as a decoder does")
                sentences, sentence_stats = _sentences(client, oracle, lines)
                rescoring, rescoring_stats = _rescore(client, oracle, lines[:22])
                served = _served(client, addresses)
                tell("checked every score; stopping the servers")
    tell("stopped")
    _table(console, sentences, sentence_stats, rescoring, rescoring_stats, served)
    if sentences.differences + rescoring.differences:
        raise typer.Exit(1)


def _sentences(
    client: Client, oracle: DictModel, lines: list[bytes]
) -> tuple[Checked, tuple[Stats, Stats]]:
    """Scores whole sentences, one call each, and compares every token."""
    from dataclasses import replace

    from dlm.client.utterance import split_words

    utterance = client.utterance()
    utterance.score_sentences([b"warm up"])
    before = replace(client.stats)
    checked = Checked()
    for line in lines:
        began = time.perf_counter()
        (result,) = utterance.score_sentences([line])
        checked.calls_ms.append((time.perf_counter() - began) * 1e3)
        expected = oracle.score_sentence(split_words(line))
        checked.queries += len(expected)
        for want, prob, order in zip(
            expected, result.token_log10_prob, result.token_matched_order, strict=True
        ):
            same = want.log10_prob.tobytes() == prob.tobytes() and want.matched_order == order
            checked.differences += not same
    return checked, (before, replace(client.stats))


def _rescore(
    client: Client, oracle: DictModel, lines: list[bytes]
) -> tuple[Checked, tuple[Stats, Stats]]:
    """Walks each sentence with a beam: the true word and others it could be confused with.

    At each position every hypothesis is extended by every candidate in one call, and the best
    hypotheses of distinct state go on (DLM 3.3).
    """
    from dataclasses import replace

    from dlm.client.utterance import split_words

    before = replace(client.stats)
    checked = Checked()
    rng = random.Random(1)
    utterance = client.utterance()
    size = utterance.vocabulary_size
    for line in lines:
        beam: Beam = {utterance.begin(): (0.0, (utterance.vocabulary.begin_id,))}
        for word in split_words(line):
            common = [rng.randrange(min(size, 400)) for _ in range(CANDIDATES // 2)]
            rare = [rng.randrange(size) for _ in range(CANDIDATES - 1 - len(common))]
            candidates = np.array([utterance.vocabulary.id_of(word), *common, *rare], np.uint32)
            beam = _position(utterance, oracle, beam, candidates, checked)
    return checked, (before, replace(client.stats))


def _position(
    utterance: Utterance,
    oracle: DictModel,
    beam: Beam,
    candidates: NDArray[np.uint32],
    checked: Checked,
) -> Beam:
    """One position of the beam: extends, compares with the oracle, recombines, prunes.

    The oracle gets every word of the history, so what a state leaves out is checked too.
    """
    began = time.perf_counter()
    extension = utterance.extend(list(beam), candidates)
    checked.calls_ms.append((time.perf_counter() - began) * 1e3)
    best: Beam = {}
    for row, (total, history) in enumerate(beam.values()):
        for column, word in enumerate(candidates.tolist()):
            prob = extension.log10_prob[row, column]
            want = oracle.score(history, word)
            checked.queries += 1
            checked.differences += want.log10_prob.tobytes() != prob.tobytes()
            state = extension.states[row, column]
            reached = total + float(prob)
            if state not in best or reached > best[state][0]:
                best[state] = (reached, (*history, word))
    ranked = sorted(best.items(), key=lambda item: -item[1][0])
    return dict(ranked[:HYPOTHESES])


def _served(client: Client, addresses: list[str]) -> tuple[int, int]:
    """Messages and queries that the servers counted, all of them together."""
    from dlm.wire._pb import shard_pb2 as pb

    beats = [
        client._core.connection(a).heartbeat(pb.HeartbeatRequest(sequence=1), DEADLINE_S)
        for a in addresses
    ]
    return sum(b.messages for b in beats), sum(b.queries for b in beats)


def _table(
    console: object,
    sentences: Checked,
    sentence_stats: tuple[Stats, Stats],
    rescoring: Checked,
    rescoring_stats: tuple[Stats, Stats],
    served: tuple[int, int],
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="n-gram queries over gRPC")
    table.add_column("")
    table.add_column("sentences", justify="right")
    table.add_column("rescoring", justify="right")

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    def delta(stats: tuple[Stats, Stats], name: str) -> int:
        return int(getattr(stats[1], name)) - int(getattr(stats[0], name))

    both = ((sentences, sentence_stats), (rescoring, rescoring_stats))
    row("n-grams asked", *(f"{c.queries:,}" for c, _ in both))
    row("calls", *(f"{len(c.calls_ms):,}" for c, _ in both))
    row("messages", *(f"{delta(s, 'messages'):,}" for _, s in both))
    row(
        "n-grams a message",
        *(f"{c.queries / max(delta(s, 'messages'), 1):.1f}" for c, s in both),
    )
    row(
        "answered with no message",
        *(f"{delta(s, 'zero_message') / max(c.queries, 1):.1%}" for c, s in both),
    )
    for name, quantile in (("call, median", 0.5), ("call, 99th percentile", 0.99)):
        row(
            name,
            *(f"{float(np.quantile(c.calls_ms or [0.0], quantile)):.2f} ms" for c, _ in both),
        )
    row("scores unlike the oracle", *(f"{c.differences:,}" for c, _ in both))
    assert isinstance(console, Console)
    console.print(table)
    console.print(
        f"The servers counted {served[0]:,} messages with {served[1]:,} distinct queries.",
        markup=False,
    )
    if sentences.differences + rescoring.differences == 0:
        total = sentences.queries + rescoring.queries
        console.print(f"All {total:,} scores equal the ARPA model's, bit for bit.", markup=False)
    else:
        console.print("Some scores differ from the ARPA model's: this is a bug.", markup=False)
