"""Tables of federated unigrams on real users: OOV rate by lambda, convergence, the price of noise.

    python tests/benchmarks/unigram_tables.py [table1] [figure3] [noise]

Data: DLM_SHARED_DATA, by default ../shared/data beside the checkout. Arguments of the Supreme
Court, by speaker; a fifth of the speakers is kept out. The list of words is of public text (books
and Wikipedia), its 200,000 most frequent; the baseline is the distribution of that public text, as
FNG's was of other logs than its users' own.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from dlm.federated.counting.collect import Collection
from dlm.federated.counting.settings import UnigramConfig
from dlm.federated.counting.unigrams import oov_counts
from dlm.federated.keys import Key
from dlm.federated.run.sampling import AvailabilitySampler, FixedGoalSampler
from dlm.federated.users import UserDataset, spoken_words

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.workload import lines_of
from federated.corpus import top_words

DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
WORDLIST = 200_000
CAPACITIES = (5_000, 10_000, 20_000)
LAMBDAS = (1.0, 100.0, 1_000.0, 5_000.0, math.inf)
SEED = 1


def public_words() -> tuple[list[str], np.ndarray]:
    """Words of public text and their counts, the most frequent first."""
    counts: Counter[str] = Counter()
    for name in ("gutenberg", "wikipedia_en"):
        for line in lines_of(DATA / "text" / f"{name}.txt.zst"):
            counts.update(spoken_words(line))
    top = counts.most_common(WORDLIST)
    return [word for word, _ in top], np.array([float(n) for _, n in top])


def collected(train: UserDataset, words: list[str], config: UnigramConfig, goal: int) -> Collection:
    """A whole collection; each user once where that is enough users."""
    key = Key.from_seed(SEED)
    once = goal * config.rounds <= len(train)
    sampler = (
        AvailabilitySampler(len(train), goal, key.fold("s"), max_participations=1)
        if once
        else FixedGoalSampler(len(train), goal, key.fold("s"))
    )
    found = Collection(
        train,
        words,
        config,
        sampler,
        key,
        max_participations=1 if once else None,
        split=spoken_words,
    )
    list(found.run())
    return found


def oov_percent(test: UserDataset, vocabulary: list[str]) -> np.ndarray:
    """Of each user."""
    out, total = oov_counts(test, vocabulary, split=spoken_words)
    return 100 * out / np.maximum(total, 1)


def name_of(clip: float) -> str:
    """A lambda, as printed."""
    return "∞" if math.isinf(clip) else f"{clip:,.0f}"


def interval(values: np.ndarray) -> str:
    """Mean and 95 % interval over users."""
    return f"{values.mean():+.3f} ± {1.96 * values.std(ddof=1) / math.sqrt(len(values)):.3f}"


def table1(train: UserDataset, test: UserDataset, words: list[str], public: np.ndarray) -> None:
    """FNG Table 1: OOV rate of users by lambda, against a distribution from elsewhere."""
    found = {
        clip: collected(train, words, UnigramConfig(clip, 20), 500).state.totals for clip in LAMBDAS
    }
    print(f"| model | {' | '.join(f'OOV % of a user, {c:,} words' for c in CAPACITIES)} |")
    print("| --- |" + " --- |" * len(CAPACITIES))
    base = {}
    for c in CAPACITIES:
        base[c] = oov_percent(test, top_words(words, public, c))
    print(
        "| baseline (public text) | "
        + " | ".join(f"{base[c].mean():.2f}" for c in CAPACITIES)
        + " |"
    )
    rates = {
        clip: {c: oov_percent(test, top_words(words, totals, c)) for c in CAPACITIES}
        for clip, totals in found.items()
    }
    for clip, mine in rates.items():
        cells = [interval(mine[c] - base[c]) for c in CAPACITIES]
        print(f"| λ = {name_of(clip)} | {' | '.join(cells)} |")
    # The same users, so that differences between lambdas are finer than either's interval.
    first, last = LAMBDAS[0], LAMBDAS[-1]
    cells = [interval(rates[first][c] - rates[last][c]) for c in CAPACITIES]
    print(f"| λ = {name_of(first)} less λ = {name_of(last)} | {' | '.join(cells)} |", flush=True)


def figure3(train: UserDataset, words: list[str]) -> None:
    """FNG Figure 3: words seen, how rarely there is a new one, and Z, by round."""
    rounds, goal = 96, 19
    for clip in (1.0, 1_000.0, math.inf):
        config = UnigramConfig(clip, rounds, window=20)
        history = collected(train, words, config, goal).state.history
        print(f"\nλ = {name_of(clip)}, {goal} users a round, each user once\n")
        print(
            "| round | words seen | new words | rounds between new | Z | Z (Poisson) | Z (nested) |"
        )
        print("| --- |" + " --- |" * 6)
        for m in history:
            if m.z is not None or m.round == rounds:
                z, poisson, nested = (
                    "" if v is None else f"{v:+.3g}" for v in (m.z, m.z_poisson, m.z_nested)
                )
                print(
                    f"| {m.round} | {m.words_seen:,} | {m.new_words:,} | "
                    f"{m.rounds_between_new:.2f} | {z} | {poisson} | {nested} |",
                    flush=True,
                )


def noise(train: UserDataset, test: UserDataset, words: list[str], public: np.ndarray) -> None:
    """What noise leaves of it: every user once, in one round."""
    goal = len(train)
    print("| λ | noise multiplier | rho | words over the noise | OOV % of a user, 5,000 words |")
    print("| --- | --- | --- | --- | --- |")
    del public
    for clip in (1.0, 100.0, 1_000.0):
        for z in (None, 0.5, 1.0, 2.0):
            run = collected(train, words, UnigramConfig(clip, 1, noise_multiplier=z), goal)
            counts = run.counts()
            # The list is public and its order tells nothing of users: it fills what is left.
            known = list(dict.fromkeys([*counts.words, *words]))[:5_000]
            rate = oov_percent(test, known).mean()
            rho = "none" if z is None else f"{1 / (2 * z * z):.3g}"
            print(
                f"| {clip:,.0f} | {z or 'none'} | {rho} | {len(counts.words):,} | {rate:.2f} |",
                flush=True,
            )


def main(wanted: list[str]) -> None:
    """Prints the tables that are named, or all."""
    users = UserDataset.open(DATA / "users" / "scotus_oyez.tsv.zst")
    train, test = users.split(0.2, name="oov")
    words, public = public_words()
    listed = set(words)
    held = [sum(w in listed for w in test.words(u, split=spoken_words)) for u in range(len(test))]
    total = sum(len(test.words(u, split=spoken_words)) for u in range(len(test)))
    print(
        f"{len(train):,} users counted, {len(test):,} kept out; the list covers "
        f"{100 * sum(held) / total:.2f} % of what these say\n",
        flush=True,
    )
    for name in wanted or ["table1", "figure3", "noise"]:
        print(f"## {name}\n")
        if name == "table1":
            table1(train, test, words, public)
        elif name == "figure3":
            figure3(train, words)
        else:
            noise(train, test, words, public)
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
