"""`dlm.asr.kenlm` beside the package `kenlm`, call for call, on the same model and text.

    python tests/benchmarks/kenlm_api.py [--sentences 4000] [--rounds 7]

Model and text are those of `settings.py`. dlm opens the model as one shard, as four (both unpacked)
and as a KenLM probing file, which both open; else KenLM has the ARPA file. Needs the package
(`pip install -e '.[peers]'`). Each round takes sentences that no round before it had, and asks
first one, then the other, in turn: what dlm remembers of states comes from the same round. Both
must answer the same. Times are of the processor; a ratio is the other's time over dlm's in one
round, so above 1 dlm is the faster. The other is KenLM; of a batch also dlm's own loop over the
same states and words.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.settings import (
    DLM,
    TEXT,
    MissingError,
    arpa_files,
    cache_folder,
    plain_arpa,
    run,
    title,
)
from benchmarks.workload import lines_of, spoken

BEAM, WORDS, LABELS = 50, 20, 5000  # of a decoder's step; of one over a whole set of labels
SHARDS = 4
CALL = 100  # sentences of a call of `score_many`


class Asked(NamedTuple):
    """What one way of asking took and said."""

    seconds: float
    queries: int
    log10_sum: float


Ask = Callable[[Any, Any, list[list[str]]], Asked]


def _tokens(sentences: list[list[str]]) -> int:
    return sum(len(words) + 1 for words in sentences)


def base_score(module: Any, model: Any, sentences: list[list[str]]) -> Asked:
    """A loop of `BaseScore` over the words of sentences."""
    state, after, ask, total = module.State(), module.State(), model.BaseScore, 0.0
    begin = time.thread_time()
    for words in sentences:
        model.BeginSentenceWrite(state)
        for word in words:
            total += ask(state, word, after)
            state, after = after, state
        total += ask(state, "</s>", after)
    return Asked(time.thread_time() - begin, _tokens(sentences), total)


def score(module: Any, model: Any, sentences: list[list[str]]) -> Asked:
    """`score`, a sentence a call."""
    texts = [" ".join(words) for words in sentences]
    ask, total = model.score, 0.0
    begin = time.thread_time()
    for text in texts:
        total += ask(text)
    return Asked(time.thread_time() - begin, _tokens(sentences), total)


def score_many(module: Any, model: Any, sentences: list[list[str]]) -> Asked:
    """`score_many`, of `CALL` sentences."""
    texts = [" ".join(words) for words in sentences]
    begin = time.thread_time()
    total = sum(
        float(model.score_many(texts[at : at + CALL]).sum()) for at in range(0, len(texts), CALL)
    )
    return Asked(time.thread_time() - begin, _tokens(sentences), total)


def _states(module: Any, model: Any, sentences: list[list[str]]) -> list[Any]:
    """The state before each word."""
    found = []
    for words in sentences:
        state = module.State()
        model.BeginSentenceWrite(state)
        for word in words:
            found.append(state)
            after = module.State()
            model.BaseScore(state, word, after)
            state = after
    return found


def _steps(sentences: list[list[str]], states: list[Any], words: int) -> list[tuple[Any, Any]]:
    """Some states each, and words of the same text asked of them."""
    spoken_words = list(dict.fromkeys(word for words in sentences for word in words))
    rng = np.random.default_rng(1)
    steps = []
    for at in range(0, min(len(states), 20_000 * WORDS // words) - BEAM, BEAM):
        picked = rng.choice(len(spoken_words), min(words, len(spoken_words)), replace=False)
        steps.append((states[at : at + BEAM], [spoken_words[i] for i in picked.tolist()]))
    return steps


def _loop(words: int) -> Ask:
    def ask(module: Any, model: Any, sentences: list[list[str]]) -> Asked:
        steps = _steps(sentences, _states(module, model, sentences), words)
        after, step, total = module.State(), model.BaseScore, 0.0
        begin = time.thread_time()
        for states, asked in steps:
            for state in states:
                for word in asked:
                    total += step(state, word, after)
        return Asked(time.thread_time() - begin, sum(len(s) * len(w) for s, w in steps), total)

    return ask


def _batch(words: int) -> Ask:
    def ask(module: Any, model: Any, sentences: list[list[str]]) -> Asked:
        steps = _steps(sentences, _states(module, model, sentences), words)
        total = 0.0
        begin = time.thread_time()
        for states, asked in steps:
            total += float(model.base_score_batch(states, asked)[0].sum(dtype=np.float64))
        return Asked(time.thread_time() - begin, sum(len(s) * len(w) for s, w in steps), total)

    return ask


# What dlm is asked; who is asked for the same, and how.
ROWS: list[tuple[str, Ask, str, Ask]] = [
    ("BaseScore", base_score, "KenLM", base_score),
    ("score", score, "KenLM", score),
    *(
        (f"score_many of {CALL} / loop of score", score_many, who, score)
        for who in ("KenLM", "dlm")
    ),
    *(
        (
            f"base_score_batch, {BEAM} x {words} / loop of BaseScore",
            _batch(words),
            who,
            _loop(words),
        )
        for words in (WORDS, LABELS)
        for who in ("KenLM", "dlm")
    ),
]


def texts_of(rounds: int, sentences: int) -> list[list[list[str]]]:
    """Other sentences for each round, spread over the text."""
    lines = [words for line in lines_of(TEXT) if (words := spoken(line))]
    chosen = np.random.default_rng(0).permutation(len(lines))[: rounds * sentences].tolist()
    if len(chosen) < rounds * sentences:
        raise MissingError(f"{TEXT} has {len(lines)} sentences; ask fewer")
    return [
        [lines[i] for i in chosen[at : at + sentences]] for at in range(0, len(chosen), sentences)
    ]


def places_of(arpa: Path) -> dict[str, tuple[Path, Path]]:
    """What dlm opens, and what KenLM does: a title, and the two paths."""
    plain, folder = plain_arpa(arpa), cache_folder()
    several, probing = folder / f"{title(arpa)}-{SHARDS}", folder / f"{title(arpa)}.probing"
    if not several.exists():
        run([*DLM, "shard", str(plain), "--shards", str(SHARDS), "--output", str(several)])
    if not probing.exists():
        command = [*DLM, "export", str(several), "--format", "probing"]
        run([*command, "--output", str(probing)])
    return {
        "one shard": (plain, plain),
        f"{SHARDS} shards": (several, plain),
        "a KenLM probing file": (probing, probing),
    }


def measure(heading: str, paths: tuple[Path, Path], rounds: int, sentences: int) -> None:
    """Prints the table of one model."""
    import kenlm

    import dlm.asr.kenlm as ours

    quiet = kenlm.Config()
    quiet.show_progress, quiet.arpa_complain = False, kenlm.ARPALoadComplain.NONE
    models = ours.Model(str(paths[0])), kenlm.Model(str(paths[1]), quiet)
    texts = texts_of(rounds + 1, sentences)
    print(f"\n{heading}: {rounds} rounds of {sentences} sentences; medians (least..most)\n")
    print("| asked | dlm, ns | beside | its ns | its / dlm |\n| --- | ---: | --- | ---: | ---: |")
    for name, ask, who, ask_other in ROWS:
        module, model = (kenlm, models[1]) if who == "KenLM" else (ours, models[0])
        times: list[tuple[float, float]] = []
        for at, text in enumerate(texts):
            found, other = ask(ours, models[0], text), ask_other(module, model, text)
            if not np.isclose(found.log10_sum, other.log10_sum, rtol=1e-5, atol=0.0):
                raise AssertionError(f"{name}: {found.log10_sum} and {other.log10_sum}")
            if at:  # the first may compile, and touches pages first
                times.append((found.seconds / found.queries, other.seconds / other.queries))
        ratios = [b / a for a, b in times]
        print(
            f"| {name} | {_ns([a for a, _ in times])} | {who} | {_ns([b for _, b in times])} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}) |",
            flush=True,
        )


def _ns(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e9:,.0f}"


def main() -> None:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sentences", type=int, default=4000)
    asked = parser.parse_args()
    try:
        for arpa in arpa_files():
            for place, paths in places_of(arpa).items():
                heading = f"{arpa.name}, dlm from {place}"
                measure(heading, paths, asked.rounds, asked.sentences)
    except (MissingError, ImportError) as exc:
        print(f"skipped: {exc}", file=sys.stderr)


if __name__ == "__main__":
    main()
