"""Word errors and delay while a shard is down: with the 2-grams, with a small model, without both.

    python tests/benchmarks/wer_faults.py --work DIR [--utterances 30] [--svg FILE] [--json FILE]

The study of `wer.py` (its DIR), one decoder, utterances of clean speech in an order drawn once. Two
servers hold the full model. After a third of the utterances `loadtest.run.chaos` kills the server
of shard 0; after another third it is started again. DLM Figure 10's two fallbacks:

    without   no fallback: an utterance whose calls fail is lost, all of its words count as deleted
    partial   `ClientConfig(bigram_fallback=True)`: what shard 0 would have answered comes from
              2-grams
    small     the same with `small`: new utterances go to the model pruned to a thirtieth

Utterances come at `PACE` times real time, whether the last one is done or not. Prints WER, how many
utterances were lost and how many were on which model, and the delay, each before, during and after
the outage. The delay is from an utterance's arrival, whole, to its words, in seconds per second of
audio; it is wall time and means something on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.wer import SHARDS, Study, say
from benchmarks.wer_models import Spoken
from benchmarks.wer_plot import lines
from dlm.asr.decoders.flashlight import DlmLM
from dlm.asr.speech.transcribe import CtcDecoder
from dlm.asr.speech.wer import WordErrors, total, word_errors
from dlm.client import Client, ClientConfig
from dlm.client.config.cluster_file import write_cluster_file
from dlm.cluster.processes import Server, running_servers
from dlm.errors import UnavailableError
from dlm.files import write_whole
from loadtest.run.chaos import Chaos, Command
from loadtest.run.proxy import Proxies

WEIGHTS = (2.0, 0.0)
SMALL = "small_30"
ARMS = ("without", "bigram_fallback", "small")
PHASES = ("before", "down", "after")
PACE = 4.0
AVERAGED = 6  # utterances, in the plot of word errors


@dataclass(frozen=True, slots=True)
class Row:
    """An utterance on its way.

    at_s     when it arrived, since the first
    delay_s  until its words were there
    mode     full, partial or small; or lost
    """

    phase: str
    at_s: float
    audio_s: float
    delay_s: float
    mode: str
    bigram_fallback: int
    errors: WordErrors


def decode(
    study: Study,
    client: Client,
    decoder: CtcDecoder,
    one: Spoken,
    posteriors: NDArray[np.float32],
) -> tuple[str, int, WordErrors]:
    """Mode, partial queries and errors of an utterance."""
    before = client.stats.bigram_fallback
    utterance = client.utterance()
    try:
        lm = DlmLM(utterance, study.lexicon.words)
        found = decoder.decode(posteriors, lm)
    except UnavailableError:
        return "lost", 0, WordErrors(len(one.words), deletions=len(one.words))
    partial = client.stats.bigram_fallback - before
    kind = utterance.model_info.kind
    text = found[0].text if found else ""
    mode = "bigram_fallback" if partial and kind == "full" else kind
    return mode, partial, word_errors(one.words, text.split())


def run(study: Study, arm: str, spoken: Sequence[Spoken]) -> list[Row]:
    """Every utterance in turn, through the outage."""
    directory = study.shards("full")
    posteriors = study.posteriors("clean")
    decoder = study.decoder(WEIGHTS)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch, running_servers([directory]) as servers:
        cluster = Path(scratch) / "cluster.toml"

        def write(servers: list[Server]) -> None:
            write_cluster_file(cluster, [s.endpoint for s in servers])

        write(servers)
        small = study.shards(SMALL) if arm == "small" else None
        config = ClientConfig(
            bigram_fallback=arm != "without", small=small, cache_dir=study.work / "client"
        )
        endpoints = [server.endpoint for server in servers]
        with (
            Proxies([endpoint.address for endpoint in endpoints]) as proxies,
            Client.connect(cluster, config) as client,
        ):
            chaos = Chaos(cluster, endpoints, proxies)
            decode(study, client, decoder, spoken[0], posteriors[spoken[0].name])  # compiles
            began = time.monotonic()
            at_s = 0.0
            for number, one in enumerate(spoken):
                phase = PHASES[3 * number // len(spoken)]
                if phase == "down" and rows[-1].phase == "before":
                    say(chaos.do(Command("kill", 0)))
                    servers[0].process.wait()
                if phase == "after" and rows[-1].phase == "down":
                    servers[0] = servers[0].again()
                    write(servers)
                time.sleep(max(began + at_s - time.monotonic(), 0.0))
                mode, partial, errors = decode(study, client, decoder, one, posteriors[one.name])
                delay_s = time.monotonic() - began - at_s
                rows.append(Row(phase, at_s, one.seconds, delay_s, mode, partial, errors))
                at_s += one.seconds / PACE
    return rows


def table(found: dict[str, list[Row]]) -> str:
    """A line for each arm and phase."""
    lines = [
        "| fallback | shard 0 | WER, % | lost | full / partial / small | delay: median | "
        "most | full again after |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, rows in found.items():
        for phase in PHASES:
            some = [row for row in rows if row.phase == phase]
            rate = total(row.errors for row in some).rate
            modes = Counter(row.mode for row in some)
            factors = [row.delay_s / row.audio_s for row in some]
            lines.append(
                f"| {arm} | {phase} | {100 * (rate or 0):.1f} | {modes['lost']} "
                f"| {modes['full']} / {modes['bigram_fallback']} / {modes['small']} "
                f"| {np.median(factors):.2f} | {max(factors):.2f} | {_recovery(some)} |"
            )
    return "\n".join(lines)


def _recovery(rows: Sequence[Row]) -> str:
    """Seconds from the start of the phase "after" to the first utterance by the full model."""
    full = [row.at_s for row in rows if row.phase == "after" and row.mode == "full"]
    return f"{full[0] - rows[0].at_s:.0f} s" if full else ""


def plot(found: dict[str, list[Row]]) -> str:
    """Word errors, averaged over some utterances, and delay, by the time of arrival."""
    errors: dict[str, list[tuple[float, float]]] = {}
    delays: dict[str, list[tuple[float, float]]] = {}
    for arm, rows in found.items():
        errors[arm] = [
            (
                row.at_s,
                100.0 * (total(r.errors for r in rows[max(i + 1 - AVERAGED, 0) : i + 1]).rate or 0),
            )
            for i, row in enumerate(rows)
        ]
        delays[arm] = [(row.at_s, row.delay_s / row.audio_s) for row in rows]
    some = next(iter(found.values()))
    down = [row.at_s for row in some if row.phase == "down"]
    up = [row.at_s for row in some if row.phase == "after"]
    title = f"WER of the last {AVERAGED} utterances, %; the shard is down where it is grey"
    return lines(
        {title: errors, "delay, seconds per second of audio": delays},
        (down[0], up[0]),
        "seconds",
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--utterances", type=int, default=30, help="in each third")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    study = Study(arguments.work)
    spoken = list(study.spoken)
    random.Random(1).shuffle(spoken)
    spoken = spoken[: 3 * arguments.utterances]
    found = {}
    for arm in arguments.arms:
        say(f"{arm}: {len(spoken)} utterances, {SHARDS} servers")
        found[arm] = run(study, arm, spoken)
    if arguments.svg is not None:
        write_whole(arguments.svg, plot(found).encode())
    if arguments.json is not None:
        rows = {arm: [asdict(row) for row in some] for arm, some in found.items()}
        write_whole(arguments.json, json.dumps(rows).encode())
    print(table(found))


if __name__ == "__main__":
    main()
