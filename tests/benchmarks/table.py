"""Measures everything and prints it in Markdown: `python tests/benchmarks/table.py`.

Peers and dlm take turns in every round, so that what else the machine does hits both; a ratio is
of one round's times, and its median is told with the least and the most.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rows, settings
from benchmarks.commands import Cost, cost
from benchmarks.settings import MissingError

PARTS = ("building", "speed", "size")


def main() -> None:
    """Prints the parts asked for, for each model."""
    parser = argparse.ArgumentParser(description="dlm beside KenLM; see README.md beside this.")
    parser.add_argument("--rounds", type=int, default=9, help="of the speed tables (default 9)")
    parser.add_argument("--builds", type=int, default=3, help="of the building table (default 3)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", nargs="+", help="only speed rows whose name holds one of these")
    options = parser.parse_args()
    print(f"{_processor()}; load {', '.join(f'{load:.2f}' for load in os.getloadavg())}")
    for arpa in settings.arpa_files():
        manifest = rows.local_model(arpa, "exact").manifest
        counts = " + ".join(f"{count:,}" for count in manifest.counts)
        print(f"\n# {settings.title(arpa)}: {counts} = {sum(manifest.counts):,} n-grams")
        if "building" in options.parts:
            building(arpa, options.builds)
        if "speed" in options.parts:
            speed(arpa, options.rounds, options.rows)
        if "size" in options.parts:
            size(arpa, sum(manifest.counts))
        rows.close()


def speed(arpa: Path, rounds: int, wanted: Sequence[str] | None) -> None:
    """Nanoseconds a query, batches and sentences."""
    shares, unknown = rows.matched_shares(arpa)
    work = settings.workload()
    orders = ", ".join(f"{order}: {share:.1%}" for order, share in enumerate(shares, 1))
    print(
        f"\n## Batches: {work.mix.batches:,} of {work.mix.contexts} contexts x {work.mix.words} "
        f"words\n\nFrom {settings.TEXT.name}. Longest n-gram found, by order: {orders}; "
        f"words unknown: {unknown:.1%}.\n"
    )
    compare(rows.batch_rows(arpa), rounds, wanted)
    print(
        f"\n## Sentences: {len(work.lengths):,} of {settings.TEXT.name}, {work.scored_tokens:,} "
        f"tokens\n\nStrings in, a sum for each sentence out; dlm takes {rows.SENTENCES_A_CALL} a "
        "call, the Python package one. Rows of ids are for comparison.\n"
    )
    compare(rows.sentence_rows(arpa), rounds, wanted)


def compare(
    makers: dict[str, Callable[[], rows.Row]], rounds: int, wanted: Sequence[str] | None
) -> None:
    """Asks rows in turn, `rounds` times, after once unmeasured, and prints them."""
    made: list[rows.Row] = []
    missing: dict[str, str] = {}
    for name, make in makers.items():
        if wanted and not any(part in name for part in wanted):
            continue
        try:
            made.append(make())
        except MissingError as exc:
            missing[name] = str(exc)
    sums = {row.name: row.ask() for row in made}
    rows.agree(sums, {row.name for row in made if row.exact})
    times: dict[str, list[float]] = {row.name: [] for row in made}
    gc.collect()
    gc.disable()
    for number in range(rounds):
        turn = number % len(made) if made else 0
        for row in made[turn:] + made[:turn]:
            began = rows.cpu_clock()
            row.ask()
            times[row.name].append((rows.cpu_clock() - began) * 1e9 / row.queries)
    gc.enable()
    ours = [name for name in times if name.startswith("dlm ")]
    print(line("", "ns a query", *(f"time of {name} = 1" for name in ours), "sum of log10 P"))
    print(rule(2 + len(ours)))
    for name, took in times.items():
        ratios = [spread(ratio(took, times[mine]), 2) for mine in ours]
        print(line(name, spread(took, 1), *ratios, f"{sums[name]:.2f}"))
    print_missing(missing)


def size(arpa: Path, ngrams: int) -> None:
    """Bytes an n-gram, and perplexities."""
    found: dict[str, tuple[int, rows.Perplexity]] = {}
    missing: dict[str, str] = {}
    for encoding in settings.ENCODINGS:
        try:
            folder = settings.shard_set(arpa, encoding)
            size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            found[f"dlm {encoding}"] = size_bytes, rows.dlm_perplexity(arpa, encoding)
        except MissingError as exc:
            missing[f"dlm {encoding}"] = str(exc)
    for kind in settings.KENLM_KINDS:
        try:
            size_bytes = settings.kenlm_binary(arpa, kind).stat().st_size
            found[f"KenLM {kind}"] = size_bytes, rows.kenlm_perplexity(arpa, kind)
        except MissingError as exc:
            missing[f"KenLM {kind}"] = str(exc)
    ours = [name for name in found if name.startswith("dlm ")]
    reference = found["dlm exact"][1]
    print(
        "\n## Size: one shard, every file of the folder; KenLM's binary with its words\n\n"
        f"Perplexity of {settings.HELD_OUT.name}, {len(settings.held_out()):,} sentences, "
        f"{reference.tokens:,} tokens, {reference.oovs:,} of them unknown.\n"
    )
    print(
        line(
            *("", "bytes", "bytes an n-gram", *(f"{name} = 1" for name in ours)),
            *("perplexity, known words", "with unknown words"),
        )
    )
    print(rule(4 + len(ours)))
    for name, (size_bytes, perplexity) in found.items():
        print(
            line(
                *(name, f"{size_bytes:,}", f"{size_bytes / ngrams:.2f}"),
                *(f"{size_bytes / found[mine][0]:.2f}" for mine in ours),
                *(f"{perplexity.without_oovs:.3f}", f"{perplexity.with_oovs:.3f}"),
            )
        )
    print_missing(missing)


def building(arpa: Path, builds: int) -> None:
    """What it costs to make an index of the plain ARPA file."""
    scratch = Path(tempfile.mkdtemp(prefix="build-", dir=settings.cache_folder()))
    commands: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    for name, make in (
        *((f"dlm shard, {e}", (settings.shard_command, e)) for e in settings.ENCODINGS),
        *((f"build_binary {k}", (settings.kenlm_command, k)) for k in settings.KENLM_KINDS),
    ):
        command, which = make
        try:
            commands[name] = command(arpa, which, scratch / "out")
        except MissingError as exc:
            missing[name] = str(exc)
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    try:
        for _ in range(builds):
            for name, command in commands.items():
                costs[name].append(cost(command))
                for path in scratch.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        shutil.rmtree(scratch)
    base = "dlm shard, exact"
    print(f"\n## Building, from {settings.plain_arpa(arpa).stat().st_size:,} bytes of plain ARPA\n")
    print(line("", "wall, s", f"{base} = 1", "CPU, s", f"{base} = 1", "peak memory, MiB"))
    print(rule(5))
    for name, runs in costs.items():
        wall, cpu = [run.wall_s for run in runs], [run.cpu_s for run in runs]
        print(
            line(
                *(name, spread(wall, 2), spread(ratio(wall, [c.wall_s for c in costs[base]]), 2)),
                *(spread(cpu, 2), spread(ratio(cpu, [c.cpu_s for c in costs[base]]), 2)),
                spread([run.peak_bytes / 2**20 for run in runs], 0),
            )
        )
    print_missing(missing)


def ratio(theirs: Iterable[float], ours: Iterable[float]) -> list[float]:
    """Round by round, how many times as long they take."""
    return [their / our for their, our in zip(theirs, ours, strict=True)]


def spread(values: Sequence[float], digits: int) -> str:
    """The median, the least and the most."""
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} ({least:.{digits}f}..{most:.{digits}f})"


def line(*cells: str) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def rule(numbers: int) -> str:
    """The rule under a head: one column of text, then numbers."""
    return "|---|" + "---:|" * numbers


def print_missing(missing: dict[str, str]) -> None:
    """Says what was not measured and why, rows of one reason together."""
    for reason in dict.fromkeys(missing.values()):
        names = [name for name in missing if missing[name] == reason]
        print(f"\nNot measured: {'; '.join(names)}: {reason}.")


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    names = [n for n in path.read_text().splitlines() if "model name" in n] if path.exists() else []
    name = names[0].split(":")[1].strip() if names else platform.processor()
    return f"{name}, {os.cpu_count()} CPUs; Python {platform.python_version()}"


if __name__ == "__main__":
    try:
        main()
    except MissingError as problem:
        sys.exit(str(problem))
