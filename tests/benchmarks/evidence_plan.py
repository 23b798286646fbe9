"""What is trained as evidence: each run is one arm of some figures, with one seed.

- **mixed**: networks of 1,000 words, trained on all English users for 192 rounds (half as many in
  DPF's figures). As in BLT Table 3, a user comes at most 6 times, and never within a sixth of the
  rounds; DPF's figures sample users with a probability.
- **en, pt, ru**: FNG's networks, and n-gram models of them (`fng_models.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fng_data import LanguageFiles
from benchmarks.fng_train import (
    KEPT_AT,
    NETWORKS,
    ROUNDS,
    USERS,
    Tables,
    fng_tables,
    merged,
    noise_for,
)
from dlm.files import locked, write_whole

SEEDS = 3
LENGTH, GAP, MOST = 192, 32, 6
SHORT, LOOKS = 96, 8  # rounds of DPF's figures, and how often a network is judged
TRAINING_USERS = 5_300  # about as many; of whom C come to a round in expectation
PARAMETERS = 82_000  # about as many
MANY = 562  # DPF Figure 7: 1,250 where there were 100
# Guarantees of BLT Table 3, as rho-zCDP: epsilon 8 and 2 at delta 1e-6.
RHOS = {"eps 8": 1.173, "eps 2": 0.1005}
# DPF Figure 1: norm of the noise of a round over the clip norm, sigma sqrt(d) / S, where the
# network has d = 1.35 million parameters.
NOISES = {"sigma 0.003": 0.232, "sigma 0.006": 0.697, "sigma 0.012": 0.930}
CLIPS = (1.0, 0.1, 0.3, 0.7, 1.4)  # updates have a norm of about 1; with 3, networks can diverge
MECHANISMS: dict[str, dict[str, Any]] = {
    "BandMF": {"mechanism": "bandmf"},
    "TreeAgg-Full": {"mechanism": "tree-full"},
    "TreeAgg": {"mechanism": "tree"},
    "BLT, 2 buffers, for 1 participation": {"mechanism": "blt", "buffers": 2},
    **{f"BLT*, {n} buffers": {"mechanism": "blt", "buffers": n} for n in (1, 2, 3, 4)},
}
FEW = (*list(MECHANISMS)[:4], "BLT*, 2 buffers")
# The trees of GDP's adaptive clipping begin anew in rounds 24, 72, 120 and 168, which costs noise.
RESTARTS = tuple(range(LENGTH // 8, LENGTH, LENGTH // 4))
ADAPTIVE = {
    "mechanism": "tree-restart",
    "adaptive": True,
    "first_restart": RESTARTS[0] - 1,
    "restart_every": LENGTH // 4,
}
BOOKS = {"steps": 2_000, "batch_size": 32}


class Arm(NamedTuple):
    """What differs from the common settings; a BLT is optimised for `participations`, or for those
    that are allowed."""

    settings: Tables
    users: int = USERS
    rounds: int = LENGTH
    participations: int = 0


@dataclass(frozen=True)
class Item:
    """A run to be done: `experiment` is its data set."""

    experiment: str
    name: str
    seed: int
    arm: Arm

    @property
    def key(self) -> tuple[str, ...]:
        """What a row must have to be this item's, which is not done again then."""
        settings, _, rounds, _ = self.arm
        return self.experiment, self.name, str(self.seed), json.dumps(settings), str(rounds)


def _private(epsilon: str, name: str, **more: Any) -> Arm:
    """With a mechanism, at a guarantee; the noise is rounded up."""
    privacy = MECHANISMS.get(name, ADAPTIVE) | more
    few = int("for 1" in name)
    asked = {k: privacy[k] for k in ("mechanism", "buffers") if k in privacy}
    if name not in MECHANISMS:
        asked["restarts"] = RESTARTS
    noise = noise_for(RHOS[epsilon], rounds=LENGTH, gap=GAP, most=MOST, participations=few, **asked)
    noise = math.ceil(1_000 * noise) / 1_000
    return Arm({"privacy": privacy | {"noise_multiplier": noise}}, participations=few)


def _sampled(users: int = USERS, clip_norm: float = 1.0, noise: float = 0.0) -> Arm:
    """As in DPF's figures; the noise is given over the clip norm, as its own norm."""
    privacy: dict[str, Any] = {"clip_norm": clip_norm, "gap": 1, "max_participations": 0}
    if noise:
        multiplier = round(noise * users / math.sqrt(PARAMETERS), 6)
        privacy |= {"mechanism": "gaussian", "noise_multiplier": multiplier}
    sampling = {"kind": "poisson", "q": round(users / TRAINING_USERS, 6)}
    return Arm({"privacy": privacy, "sampling": sampling}, users, SHORT)


def groups() -> Iterator[tuple[str, dict[str, Arm]]]:
    """(experiment, its arms) figure by figure."""
    high = NOISES["sigma 0.012"]
    yield "mixed", {f"C {c}, sigma 0.012": _sampled(c, noise=high) for c in (USERS, MANY)}
    low = {f"C {USERS}, {name}": _sampled(noise=one) for name, one in NOISES.items() if one != high}
    clipped = {f"C {USERS}, S {clip:g}": _sampled(clip_norm=clip) for clip in CLIPS}
    yield "mixed", low | clipped | {f"C {c}, S 1": _sampled(c) for c in (15, 135)}
    every = {f"{name}, eps 2": _private("eps 2", name) for name in MECHANISMS}
    yield "mixed", {"no noise": Arm({})} | every
    yield "en", dict.fromkeys(NETWORKS, Arm({}, rounds=ROUNDS))
    yield "pt", dict.fromkeys(NETWORKS, Arm({}, rounds=ROUNDS))
    yield "mixed", {f"{name}, eps 8": _private("eps 8", name) for name in FEW}
    tree = _private("eps 8", "TreeAgg")
    small = {"clip_norm": 0.1}
    clip_norms = {
        "TreeAgg, eps 8, S 0.1": Arm(merged(tree.settings, {"privacy": small})),
        "TreeAgg, eps 8, S adapts from 0.1": _private("eps 8", "adaptive", **small),
        "TreeAgg, eps 8, books first": Arm(merged(tree.settings, {"pretrain": BOOKS})),
    }
    yield "mixed", clip_norms
    yield "ru", dict.fromkeys(NETWORKS[::2], Arm({"sampling": {"report_goal": 40}}, 40, ROUNDS))


def plan() -> Iterator[Item]:
    """All items, group by group, each seed by seed."""
    for language in ("en", "pt", "ru"):
        yield Item(language, "text", 0, Arm({}, 0, 0))
    for experiment, arms in groups():
        for seed, (name, arm) in product(range(SEEDS), arms.items()):
            yield Item(experiment, name, seed, arm)


def prepared(work: Path, data_set: str) -> LanguageFiles:
    """The data of an experiment, made once; another process that needs them waits."""
    files = LanguageFiles((work / data_set).absolute())
    work.mkdir(parents=True, exist_ok=True)
    with locked(work / f"{data_set}.lock"):
        if not files.facts.exists():
            from benchmarks import fng_data

            facts = fng_data.write_texts(files) | fng_data.write_words(files)
            if data_set != "mixed":
                from benchmarks import fng_judge, fng_models

                fng_models.centralised(files)
                sums = fng_judge.sums_of(files.arpa("users"), files)
                write_whole(files.baseline, json.dumps(sums.tolist()).encode())
            write_whole(files.facts, json.dumps(facts).encode())
    return files


def result(item: Item, files: LanguageFiles, tick: Callable[[], None]) -> dict[str, Any]:
    """Does an item, or goes on with it; `tick` is called now and then."""
    return (_learning if item.experiment == "mixed" else _fng)(item, files, tick)


def _learning(item: Item, files: LanguageFiles, tick: Callable[[], None]) -> dict[str, Any]:
    """How a network of `mixed` predicts held-out users by round; and DPF Table 3, at the end."""
    from benchmarks.fng_judge import seen
    from benchmarks.fng_train import train
    from dlm.federated.users import UserDataset

    settings, _, rounds, participations = item.arm
    step = rounds // LOOKS
    common: Tables = {
        "run": {"rounds": rounds, "seed": item.seed, "checkpoint_every": step, "evaluate_every": 0},
        "data": {"vocabulary": str(files.words), "vocabulary_size": 1_000, "max_tokens": 290},
        "model": {"embedding_size": 48, "hidden_size": 96},
        "local": {"learning_rate": 1.0, "packing": "stream", "batch_size": 16, "unroll": 10},
        "server": {"optimizer": "momentum", "learning_rate": 2.0, "momentum": 0.9},
        "privacy": {"clip_norm": 1.0, "gap": GAP, "max_participations": MOST},
        "sampling": {"report_goal": USERS},
    }
    run, tables = files.run(item.name, item.seed), merged(common, settings)
    if "pretrain" in tables:
        tables["pretrain"]["text"] = str(files.public)
    held_out, found = UserDataset.open(files.held_out), []
    stops = range(step, rounds + 1, step)
    for stop in train(run, tables, files.train, stops, participations=participations):
        judgement = run.with_name(f"{run.name}@{stop}.json")
        found.append({"round": stop, **_kept(judgement, partial(seen, run, held_out, 160))})
        tick()
    return {
        "by_round": [{k: v for k, v in one.items() if k != "heads"} for one in found[:-1]],
        **found[-1],
    }


def _fng(item: Item, files: LanguageFiles, tick: Callable[[], None]) -> dict[str, Any]:
    """The network, its models on each topology, and SLL^e by round; or the models of text."""
    from benchmarks.fng_judge import judged
    from benchmarks.fng_models import distilled
    from benchmarks.fng_train import train

    if item.name == "text":
        return {name: judged(files.arpa(name), files) for name in ("users", "public")}
    run, found = files.run(item.name, item.seed), {}
    tables = merged(fng_tables(item.name, files, item.seed), item.arm.settings)
    for stop in train(run, tables, files.train, KEPT_AT):
        judgement = run.with_name(f"{run.name}@{stop}.json")
        found[str(stop)] = _kept(judgement, partial(judged, run, files))
        tick()
    for kind in "eimr":
        model = distilled(run, kind, files, pieces=item.name == "wordpieces")
        found[kind] = _kept(model.with_suffix(".json"), partial(judged, model, files))
        tick()
    return found


def _kept(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file says, which is made once."""
    if not file.exists():
        write_whole(file, json.dumps(make()).encode())
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
