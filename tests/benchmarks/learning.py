"""How well private models learn: mechanisms at equal privacy, clipping, public text first.

    python tests/benchmarks/learning.py --work runs/learning --minutes 20  # goes on if called again
    python tests/benchmarks/learning.py --work runs/learning --table       # what is done so far

English users of the shared data (`DLM_SHARED_DATA`), 256 rounds of 45 users, each at most 4 times
and never within 64 rounds. A run is a folder of its own, some five minutes of CPU time; it is kept
every 16 rounds. The runs of a table come seed by seed, so that a comparison has about as many seeds
on each side, and one table after another. Two processes may work in one folder. With
`JAX_COMPILATION_CACHE_DIR` set, what is compiled is compiled once.

**The privacy figures are of a simulation.** 45 users stand for 1,000: the noise of a round is that
of 1,000 users divided by 1,000, as it would be with 22 times the users (GDP 2.2: utility stays
where noise and users grow alike). With 45 users the same noise gives far less privacy, and a seed
gives none.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
ENGLISH = (
    "scotus_oyez",
    "ubuntu_irc",
    "swda",
    "earnings21",
    "earnings22",
    "shakespeare_characters",
)
MIN_WORDS = 400
VOCABULARY = 2_000
ROUNDS, USERS, GAP, MOST = 256, 45, 64, 4
STANDS_FOR = 1_000
TOKENS = 400
RHOS = (1.0, 0.2)
MECHANISMS = ("tree", "bandmf", "blt")
KEPT_EVERY = 16
# Two-sided 95 % quantile of Student's t by degrees of freedom: three to six seeds.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}


def lines_of(path: Path) -> Iterator[str]:
    """Lines of a file compressed with zstandard."""
    with pa.input_stream(str(path), compression="zstd") as stream:
        yield from io.TextIOWrapper(stream, "utf-8")


def words_of(text: str) -> list[str]:
    """Lower case, letters and apostrophes alone."""
    plain = text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    return re.findall(r"[a-z]+(?:'[a-z]+)*", plain)


def prepare(work: Path) -> None:
    """Users of all English sets with enough text, public text, and its most frequent words."""
    if (work / "users.tsv").exists():
        return
    work.mkdir(parents=True, exist_ok=True)
    with (work / "users.tsv.part").open("w", encoding="utf-8") as out:
        out.write("user_id\tutterance\n")
        for name in ENGLISH:
            rows = (
                line.rstrip("\n").split("\t") for line in lines_of(DATA / f"users/{name}.tsv.zst")
            )
            header = next(rows)
            user_at, text_at = header.index("user_id"), header.index("utterance")
            texts: dict[str, list[list[str]]] = {}
            for row in rows:
                found = words_of(row[text_at])
                if found:
                    texts.setdefault(row[user_at], []).append(found)
            for user, utterances in texts.items():
                if sum(map(len, utterances)) >= MIN_WORDS:
                    out.writelines(f"{name}:{user}\t{' '.join(u)}\n" for u in utterances)
    counts: Counter[str] = Counter()
    with (work / "public.txt").open("w", encoding="utf-8") as out:
        for line in itertools.islice(lines_of(DATA / "text/gutenberg.txt.zst"), 300_000):
            found = words_of(line)
            counts.update(found)
            if len(found) > 1:
                out.write(" ".join(found) + "\n")
    words = [word for word, _ in counts.most_common(VOCABULARY)]
    (work / "words.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (work / "users.tsv.part").replace(work / "users.tsv")


@cache
def noise_for(rho: float, mechanism: str, restarts: tuple[int, ...] = ()) -> float:
    """Noise multiplier that gives rho-zCDP if as many users came as these stand for, scaled."""
    from dlm.federated.noise import make_mechanism

    built = make_mechanism(
        mechanism, rounds=ROUNDS, gap=GAP, max_participations=MOST, restarts=restarts
    )
    return (
        built.sensitivity(gap=GAP, max_participations=MOST)
        / math.sqrt(2 * rho)
        * USERS
        / STANDS_FOR
    )


Tables = dict[str, dict[str, Any]]


def plan() -> dict[str, dict[str, Tables]]:
    """Tables by name, each with its runs: the settings that differ from the common ones.

    The first run of a table is what the others are compared with.
    """
    plain: dict[str, Tables] = {"no noise": {"privacy": {"clip_norm": 1.0}}}
    equal: dict[float, dict[str, Tables]] = {}
    for rho in RHOS:
        equal[rho] = {
            f"{mechanism}, rho {rho:g}": {
                "privacy": {
                    "clip_norm": 1.0,
                    "mechanism": mechanism,
                    "noise_multiplier": noise_for(rho, mechanism),
                }
            }
            for mechanism in MECHANISMS
        }
    rho = RHOS[0]
    tree = equal[rho][f"tree, rho {rho:g}"]
    # The noise begins anew at the start of rounds 32, 96, 160 and 224, which costs privacy too.
    first, every = ROUNDS // 8, ROUNDS // 4
    adaptive = {
        "clip_norm": 0.1,
        "mechanism": "tree-restart",
        "noise_multiplier": noise_for(rho, "tree-restart", tuple(range(first, ROUNDS, every))),
        "adaptive": True,
        "first_restart": first - 1,
        "restart_every": every,
    }
    books = {"pretrain": {"text": "public.txt", "steps": 3_000, "batch_size": 32}}
    blt = f"blt, rho {rho:g}"
    return {
        f"mechanisms at rho {RHOS[0]:g}": {**plain, **equal[RHOS[0]]},
        "clipping": {
            f"tree, rho {rho:g}": tree,
            f"tree, rho {rho:g}, clip norm 0.1": {"privacy": {**tree["privacy"], "clip_norm": 0.1}},
            f"tree, rho {rho:g}, clip norm adapts from 0.1": {"privacy": adaptive},
        },
        "public text first": {
            blt: equal[rho][blt],
            f"{blt}, books first": {**equal[rho][blt], **books},
            "no noise, books first": {**plain["no noise"], **books},
        },
        f"mechanisms at rho {RHOS[1]:g}": {**plain, **equal[RHOS[1]]},
    }


def settings_text(tables: Tables, seed: int) -> str:
    """The run as TOML."""
    common: dict[str, dict[str, Any]] = {
        "run": {
            "rounds": ROUNDS,
            "seed": seed,
            "checkpoint_every": KEPT_EVERY,
            "evaluate_every": ROUNDS // 4,
        },
        "data": {"vocabulary": "words.txt", "max_tokens": TOKENS, "held_out_tokens": 60_000},
        "model": {"embedding_size": 48, "hidden_size": 96},
        "local": {"learning_rate": 2.0, "packing": "stream", "batch_size": 8, "unroll": 20},
        "server": {"optimizer": "momentum", "learning_rate": 2.0, "momentum": 0.9},
        "privacy": {"gap": GAP, "max_participations": MOST},
        "sampling": {"report_goal": USERS},
    }
    lines = []
    for name in {**common, **tables}:
        lines.append(f"[{name}]")
        merged = {**common.get(name, {}), **tables.get(name, {})}
        lines += [f"{key} = {json.dumps(value)}" for key, value in merged.items()]
    return "\n".join(lines) + "\n"


def result(folder: Path) -> dict[str, Any] | None:
    """The last evaluation of a finished run."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return None
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    if len(lines) < ROUNDS or "held_out" not in lines[-1]:
        return None
    found: dict[str, Any] = lines[-1]["held_out"]
    return found


def folder_of(work: Path, name: str, seed: int) -> Path:
    """Where a run lives."""
    return work / re.sub(r"[^a-z0-9.]+", "-", name) / str(seed)


def bounds(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval over seeds; inf for one."""
    if len(values) < 2:
        return values[0], math.inf
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), STUDENT.get(len(values) - 1, 2.0) * error


def interval(values: list[float]) -> str:
    """Both, in words."""
    mean, half = bounds(values)
    return f"{mean:.2f} ± {half:.2f}" if math.isfinite(half) else f"{mean:.2f}"


def resolved(found: dict[str, dict[int, dict[str, Any]]]) -> Iterator[str]:
    """Pairs of runs that the seeds tell apart, each pair by itself: for so many pairs, one in
    twenty would be told apart by chance."""
    for one, other in itertools.combinations(found, 2):
        for metric, scale, unit in (("top1_in_vocabulary", 100, " %"), ("perplexity", 1, "")):
            paired = [
                scale * (found[one][seed][metric] - found[other][seed][metric])
                for seed in found[one]
                if seed in found[other]
            ]
            if paired and abs(bounds(paired)[0]) > bounds(paired)[1]:
                name = metric.replace("_in_vocabulary", "")
                yield f"*{one}* less *{other}*: {name} {interval(paired)}{unit}"


def table(work: Path, seeds: int) -> str:
    """Accuracy of what is finished, and differences seed by seed, in Markdown.

    Runs with one seed have the same cohorts and, unless public text comes first, the same first
    model, so that their difference varies less than either.
    """
    parts = []
    for title, runs in plan().items():
        found = {
            name: {
                seed: one
                for seed in range(seeds)
                if (one := result(folder_of(work, name, seed))) is not None
            }
            for name in runs
        }
        if not any(found.values()):
            continue
        first = next(iter(runs))
        rows = [
            f"**{title[0].upper()}{title[1:]}**",
            "",
            f"| run | seeds | top-1 accuracy, % | less *{first}* | perplexity | less *{first}* |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, of_seed in found.items():
            if not of_seed:
                continue
            cells = [name, str(len(of_seed))]
            for metric, scale in (("top1_in_vocabulary", 100), ("perplexity", 1)):
                paired = [
                    scale * (one[metric] - found[first][seed][metric])
                    for seed, one in of_seed.items()
                    if name != first and seed in found[first]
                ]
                cells.append(interval([scale * one[metric] for one in of_seed.values()]))
                cells.append(interval(paired) if paired else "")
            rows.append(f"| {' | '.join(cells)} |")
        rows += ["", "Told apart, seed by seed: " + ("; ".join(resolved(found)) or "none") + "."]
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def train(work: Path, users: Any, name: str, tables: Tables, seed: int, until: float) -> bool:
    """Goes on with a run until it is finished, or time is up; whether it is finished."""
    from dlm.federated.training.settings import TrainingSettings
    from dlm.federated.training.train import Training

    folder = folder_of(work, name, seed)
    file = work / f"{folder.parent.name}-{seed}.toml"
    file.write_text(settings_text(tables, seed))
    began = time.process_time()
    with Training(TrainingSettings.read(file, environ={}), users, folder) as training:
        for report in training.run():
            line = report.line()
            if "held_out" in line:
                accuracy = 100 * line["held_out"]["top1_in_vocabulary"]
                spent = time.process_time() - began
                print(
                    f"{name}, seed {seed}, round {line['round'] + 1}: {accuracy:.2f} %, "
                    f"{spent:.0f} CPU seconds",
                    flush=True,
                )
            if (line["round"] + 1) % KEPT_EVERY == 0 and time.monotonic() > until:
                break
        return training.rounds_done == ROUNDS


def main() -> None:
    """Does what is left, table by table and seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="runs whose name holds this")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so long")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer, in another --work")
    parser.add_argument("--table", action="store_true", help="print what is done and end")
    given = parser.parse_args()
    globals().update(ROUNDS=given.rounds, GAP=given.rounds // 4)
    if given.table:
        print(table(given.work, given.seeds))
        return
    from dlm.errors import ConfigError
    from dlm.federated.users import UserDataset

    until = time.monotonic() + 60 * given.minutes
    prepare(given.work)
    users = UserDataset.open(given.work / "users.tsv", store=given.work / "store")
    print(f"{len(users):,} users", flush=True)
    for runs in plan().values():
        for seed, (name, tables) in itertools.product(range(given.seeds), runs.items()):
            if given.only not in name or result(folder_of(given.work, name, seed)) is not None:
                continue
            if time.monotonic() > until:
                return
            try:
                train(given.work, users, name, tables, seed, until)
            except ConfigError as exc:  # another process has this one
                print(f"{name}, seed {seed}: {exc}", flush=True)


if __name__ == "__main__":
    main()
