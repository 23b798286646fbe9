"""Pruning beside OpenGrm and IRSTLM: time, memory, what stays and what it costs in perplexity.

    DLM_OPENGRM_BIN=.../bin python tests/benchmarks/prune.py model.arpa --text held-out.txt

DLM_OPENGRM_BIN  folder of ngramread, ngramshrink and ngramprint; the row is left out without it
DLM_PRUNE_LM     IRSTLM's prune-lm; the row is left out without it

Programs take turns in every round. OpenGrm keeps the suffixes of what stays, so that its n-grams
are compared with those of --keep-suffixes. The model is a plain ARPA file, for their sake.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.commands import Cost, cost
from dlm.estimate.columns import MISSING, ModelColumns
from dlm.estimate.prune import ln_histories, own_scores
from dlm.ngram.vocab import as_bytes

DLM = [
    sys.executable,
    "-c",
    "from dlm.cli.main import program; program(['prune'])()",
    "prune",
]


def main() -> None:
    """Prints Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, help="held-out sentences, one a line")
    parser.add_argument("--thresholds", nargs="+", default=["1e-8", "1e-7"])
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _report(chosen, Path(folder))


def _report(chosen: argparse.Namespace, folder: Path) -> None:
    model = ModelColumns.read(chosen.model)
    ngrams = sum(model.counts)
    print(f"{chosen.model.name}: {'/'.join(f'{c:,}' for c in model.counts)} n-grams\n")
    _criterion(model, chosen.rounds)
    whole = _perplexity(model, chosen.text)
    print("| threshold | program | kept | perplexity | wall s | CPU s | peak MB | n-grams/s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for threshold in chosen.thresholds:
        programs = _programs(chosen.model, threshold, folder)
        costs: dict[str, list[Cost]] = {name: [] for name in programs}
        for _ in range(chosen.rounds):
            for name, run in programs.items():
                costs[name].append(run())
        kept = {}
        for name in programs:
            kept[name] = ModelColumns.read(_output(folder, name))
            wall, cpu = (
                statistics.median(getattr(c, part) for c in costs[name])
                for part in ("wall_s", "cpu_s")
            )
            peak = max(c.peak_bytes for c in costs[name])
            perplexity = _perplexity(kept[name], chosen.text)
            print(
                f"| {threshold} | {name} | {sum(kept[name].counts) / ngrams:.2%} | "
                f"{whole:.2f} -> {perplexity:.2f} | {wall:.1f} | {cpu:.1f} | {peak / 1e6:.0f} | "
                f"{ngrams / wall:,.0f} |"
            )
        for name in kept:
            ours = "dlm --keep-suffixes" if name == "OpenGrm" else "dlm"
            if not name.startswith("dlm"):
                _compare(threshold, ours, kept[ours], name, kept[name])


def _criterion(model: ModelColumns, rounds: int) -> None:
    """The scores alone, in this process."""
    ngrams = sum(model.counts[1:])
    times = []
    for _ in range(rounds + 1):
        began, used = time.perf_counter(), time.process_time()
        histories = ln_histories(model)
        for k in range(2, model.order + 1):
            own_scores(model, k, next(histories))
        times.append((time.perf_counter() - began, time.process_time() - used))
    wall, cpu = (min(column) for column in zip(*times[1:], strict=True))
    print(
        f"criterion alone, two threads: {wall:.2f} s, {ngrams / wall / 1e6:.1f} M n-grams/s; "
        f"{cpu:.2f} s of CPU time, {ngrams / cpu / 1e6:.1f} M n-grams a CPU second\n"
    )


def _output(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '_')}.arpa"


def _programs(model: Path, threshold: str, folder: Path) -> dict[str, Callable[[], Cost]]:
    def ours(name: str, *options: str) -> Callable[[], Cost]:
        line = [*DLM, str(model), "--threshold", threshold, "-o", str(_output(folder, name)), "-q"]
        return lambda: cost([*line, *options])

    programs = {
        "dlm": ours("dlm"),
        "dlm --keep-suffixes": ours("dlm --keep-suffixes", "--keep-suffixes"),
    }
    if "DLM_OPENGRM_BIN" in os.environ:
        tools = Path(os.environ["DLM_OPENGRM_BIN"])
        fst, small = folder / "model.fst", folder / "small.fst"
        shrink = ["--method=relative_entropy", f"--theta={threshold}"]
        lines = [
            [tools / "ngramread", "--ARPA", model, fst],
            [tools / "ngramshrink", *shrink, fst, small],
            [tools / "ngramprint", "--ARPA", small, _output(folder, "OpenGrm")],
        ]

        def opengrm() -> Cost:
            steps = [cost([str(part) for part in line]) for line in lines]
            return Cost(
                sum(s.wall_s for s in steps),
                sum(s.cpu_s for s in steps),
                max(s.peak_bytes for s in steps),
            )

        programs["OpenGrm"] = opengrm
    if "DLM_PRUNE_LM" in os.environ:
        line = [os.environ["DLM_PRUNE_LM"], f"--threshold={threshold},{threshold}", str(model)]
        programs["IRSTLM"] = lambda: cost([*line, str(_output(folder, "IRSTLM"))])
    return programs


def _compare(
    threshold: str, our_name: str, ours: ModelColumns, their_name: str, theirs: ModelColumns
) -> None:
    """How many n-grams above order 1 both keep."""
    here = ours.vocabulary.ids_of(theirs.vocabulary.words)
    both = sum(
        int(np.count_nonzero(ours.rows_of(here[columns.ids]) != MISSING))
        for columns in theirs.orders[1 : ours.order]
    )
    one, two = sum(ours.counts[1:]), sum(theirs.counts[1:])
    print(
        f"\n{threshold}: {our_name} keeps {one:,} above order 1, {their_name} {two:,}, both "
        f"{both:,}: {both / max(one + two - both, 1):.4%} of either\n"
    )


def _perplexity(model: ModelColumns, text: Path | None) -> float:
    """Of the words that the model knows, and of sentence ends."""
    if text is None:
        return float("nan")
    order = model.order
    begin, end = model.vocabulary.begin_id, model.vocabulary.end_id
    rows: list[np.ndarray] = []
    known = []
    for line in text.read_bytes().splitlines()[:100_000]:
        ids = model.vocabulary.ids_of(map(as_bytes, line.split()))
        padded = np.concatenate([np.full(order - 1, begin, np.uint32), ids, [np.uint32(end)]])
        rows.append(np.lib.stride_tricks.sliding_window_view(padded, order))
        known.append(np.append(ids, end) != 0)
    windows, counted = np.concatenate(rows), np.concatenate(known)
    log10 = model.log10_probs(np.ascontiguousarray(windows[counted]))
    return float(10 ** -(log10.sum() / len(log10)))


if __name__ == "__main__":
    main()
