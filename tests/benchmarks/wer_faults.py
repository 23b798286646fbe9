"""Word errors and delay while a shard is down: with the 2-grams, with a small model, without both.

    python tests/benchmarks/wer_faults.py --work DIR [--utterances 30] [--svg FILE] [--json FILE]

The study of `wer.py` (its DIR), one decoder, utterances of clean speech in an order drawn once. Two
servers hold the full model. After a third of the utterances `dlm.cluster.chaos` kills the server of
shard 0; after another third it is started again. DLM Figure 10's two fallbacks:

    without   no fallback: an utterance whose calls fail is lost, all of its words count as deleted
    partial   `ClientConfig(partial=True)`: what shard 0 would have answered comes from 2-grams
    small     the same with `small`: new utterances go to the model pruned to a thirtieth

Prints WER, utterances lost, how many were on which model, and how long a second of audio took, each
before, during and after the outage. Times are wall time and mean something on an idle machine only.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.wer import SHARDS, Study, say
from benchmarks.wer_models import Spoken
from dlm.asr.flashlight import DlmLM
from dlm.asr.wer import WordErrors, total, word_errors
from dlm.client import Client, ClientConfig
from dlm.client.topology import write_cluster_file
from dlm.cluster.chaos import Chaos, Command
from dlm.cluster.processes import Server, running_servers
from dlm.cluster.proxy import Proxies
from dlm.errors import UnavailableError
from dlm.files import write_whole
from dlm.index.layout import read_manifest

WEIGHTS = (2.0, 0.0)
SMALL = "small_30"
ARMS = ("without", "partial", "small")
PHASES = ("before", "down", "after")


@dataclass(frozen=True, slots=True)
class Row:
    """An utterance on its way.

    at_s  when it began, since the first
    mode  full, partial or small; or lost
    """

    phase: str
    at_s: float
    audio_s: float
    wall_s: float
    mode: str
    partial: int
    errors: WordErrors


def decode(
    study: Study, client: Client, one: Spoken, posteriors: NDArray[np.float32]
) -> tuple[str, int, WordErrors]:
    """Mode, partial queries and errors of an utterance."""
    before = client.stats.partial
    utterance = client.utterance()
    try:
        lm = DlmLM(utterance, study.lexicon.words)
        found = study.decoder(WEIGHTS).decode(posteriors, lm)
    except UnavailableError:
        return "lost", 0, WordErrors(len(one.words), deletions=len(one.words))
    partial = client.stats.partial - before
    kind = utterance.family.kind
    text = found[0].text if found else ""
    mode = "partial" if partial and kind == "full" else kind
    return mode, partial, word_errors(one.words, text.split())


def run(study: Study, arm: str, spoken: Sequence[Spoken]) -> list[Row]:
    """Every utterance in turn, through the outage."""
    directory = study.shards("full")
    posteriors = study.posteriors("clean")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch, running_servers([directory]) as servers:
        cluster = Path(scratch) / "cluster.toml"
        shard_set = read_manifest(directory).shard_set

        def write(servers: list[Server]) -> None:
            write_cluster_file(cluster, [s.endpoint for s in servers], shard_set=shard_set)

        write(servers)
        small = study.shards(SMALL) if arm == "small" else None
        config = ClientConfig(
            partial=arm != "without", small=small, cache_dir=study.work / "client"
        )
        endpoints = [server.endpoint for server in servers]
        with (
            Proxies([endpoint.address for endpoint in endpoints]) as proxies,
            Client.connect(cluster, config) as client,
        ):
            chaos = Chaos(cluster, endpoints, proxies)
            decode(study, client, spoken[0], posteriors[spoken[0].name])  # compiles
            began = time.monotonic()
            for number, one in enumerate(spoken):
                phase = PHASES[3 * number // len(spoken)]
                if phase == "down" and rows[-1].phase == "before":
                    say(chaos.do(Command("kill", 0)))
                    servers[0].process.wait()
                if phase == "after" and rows[-1].phase == "down":
                    servers[0] = servers[0].again()
                    write(servers)
                at_s = time.monotonic() - began
                mode, partial, errors = decode(study, client, one, posteriors[one.name])
                wall_s = time.monotonic() - began - at_s
                rows.append(Row(phase, at_s, one.seconds, wall_s, mode, partial, errors))
    return rows


def table(found: dict[str, list[Row]]) -> str:
    """A line for each arm and phase."""
    lines = [
        "| fallback | shard 0 | WER, % | lost | full / partial / small | seconds per second of "
        "audio: median | most |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, rows in found.items():
        for phase in PHASES:
            some = [row for row in rows if row.phase == phase]
            rate = total(row.errors for row in some).rate
            modes = Counter(row.mode for row in some)
            factors = [row.wall_s / row.audio_s for row in some]
            lines.append(
                f"| {arm} | {phase} | {100 * (rate or 0):.1f} | {modes['lost']} "
                f"| {modes['full']} / {modes['partial']} / {modes['small']} "
                f"| {np.median(factors):.2f} | {max(factors):.2f} |"
            )
    return "\n".join(lines)


COLOURS = {"without": "#b03030", "partial": "#3060b0", "small": "#308040"}


def svg(found: dict[str, list[Row]]) -> str:
    """Word errors and delay against time, a line for each arm; shaded while the shard is down."""
    width, height, left = 640, 150, 60
    panels: list[tuple[str, Any]] = [
        ("word errors, %", lambda row: 100.0 * (row.errors.rate or 0.0)),
        ("s per s of audio", lambda row: row.wall_s / row.audio_s),
    ]
    parts = []
    for place, (title, value) in enumerate(panels):
        top = 30 + place * (height + 40)
        most = max(value(row) for rows in found.values() for row in rows) or 1.0
        count = max(len(rows) for rows in found.values())
        x = [left + width * i / max(count - 1, 1) for i in range(count)]
        third = width / 3
        parts += [
            f'<rect x="{left + third:.0f}" y="{top}" width="{third:.0f}" height="{height}" '
            'fill="#eee"/>',
            f'<text x="{left}" y="{top - 8}">{title}; the shard is down where it is grey</text>',
            f'<text x="{left - 8}" y="{top + 10}" text-anchor="end">{most:.1f}</text>',
            f'<text x="{left - 8}" y="{top + height}" text-anchor="end">0</text>',
        ]
        for arm, rows in found.items():
            points = " ".join(
                f"{x[i]:.1f},{top + height * (1 - value(row) / most):.1f}"
                for i, row in enumerate(rows)
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{COLOURS[arm]}" '
                'stroke-width="1.5"/>'
            )
    base = 30 + len(panels) * (height + 40)
    for i, arm in enumerate(found):
        parts.append(f'<text x="{left + 120 * i}" y="{base}" fill="{COLOURS[arm]}">{arm}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" '
        f'height="{base + 20}" font-family="sans-serif" font-size="12">' + "".join(parts) + "</svg>"
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
        write_whole(arguments.svg, svg(found).encode())
    if arguments.json is not None:
        rows = {arm: [asdict(row) for row in some] for arm, some in found.items()}
        write_whole(arguments.json, json.dumps(rows).encode())
    print(table(found))


if __name__ == "__main__":
    main()
