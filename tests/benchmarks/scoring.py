"""`dlm score --local` and `dlm perplexity` beside KenLM's `query`: whole commands, turn by turn.

    python -m benchmarks.scoring [--tokens 5250000] [--rounds 5] [--threads 2]

Needs DLM_KENLM_BIN, the folder of KenLM's programs. Text, model and folder are those of
`settings.py`. Both read one plain file and write to nowhere; the models were built before. Start-up
counts, as it does for who runs the command. A first run of each, which may have to compile or to
read from the disk, is not counted; the last rows are of an empty text, which is start-up alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.commands import Cost, cost
from benchmarks.settings import (
    DLM,
    TEXT,
    MissingError,
    arpa_files,
    cache_folder,
    kenlm_binary,
    kenlm_tool,
    shard_set,
)
from benchmarks.workload import lines_of, spoken


def text_of(tokens: int) -> Path:
    """The first lines of the text that have so many words and sentence ends, as ASR has words."""
    path = cache_folder() / f"{TEXT.name.split('.')[0]}-{tokens}.txt"
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as out:
        for line in lines_of(TEXT):
            words = spoken(line)
            if words:
                print(*words, file=out)
                tokens -= len(words) + 1
            if tokens <= 0:
                break
    return part.rename(path)


def commands(arpa: Path, text: Path, threads: int) -> dict[str, list[str]]:
    """What is run, by name."""
    shards, binary = str(shard_set(arpa, "exact")), str(kenlm_binary(arpa, "probing"))
    number = ["--threads", str(threads)]
    # `query` reads standard input alone.
    query = ["sh", "-c", 'exec "$0" -v "$1" "$2" < "$3"', str(kenlm_tool("query"))]
    return {
        "dlm score": [*DLM, "score", "--local", shards, *number, str(text)],
        "query -v sentence": [*query, "sentence", binary, str(text)],
        "dlm perplexity": [*DLM, "perplexity", "--quiet", *number, shards, str(text)],
        "query -v summary": [*query, "summary", binary, str(text)],
    }


def main() -> None:
    """Prints medians of each, and the ratios of those that answer the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=5_250_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    try:
        for arpa in arpa_files():
            empty = cache_folder() / "empty.txt"
            empty.write_bytes(b"")
            for text in (text_of(given.tokens), empty):
                print(f"{arpa.name}, {text.name}, {text.stat().st_size:,} bytes")
                compare(commands(arpa, text, given.threads), given.rounds)
    except MissingError as exc:
        sys.exit(str(exc))


def compare(named: dict[str, list[str]], rounds: int) -> None:
    """Runs each in turn, `rounds` times after once uncounted."""
    runs: dict[str, list[Cost]] = {name: [] for name in named}
    for number in range(rounds + 1):
        for name, command in named.items():
            used = cost(command)
            if number:
                runs[name].append(used)
    for name, costs in runs.items():
        wall, cpu = (statistics.median(getattr(c, k) for c in costs) for k in ("wall_s", "cpu_s"))
        print(f"{name:18} {wall:8.2f} s wall {cpu:8.2f} s CPU")
    names = list(named)
    for ours, theirs in zip(names[::2], names[1::2], strict=True):
        pairs = list(zip(runs[ours], runs[theirs], strict=True))
        wall = statistics.median(a.wall_s / b.wall_s for a, b in pairs)
        cpu = statistics.median(a.cpu_s / b.cpu_s for a, b in pairs)
        print(f"{ours} / {theirs}, median: wall {wall:.2f}, CPU {cpu:.2f}", flush=True)


if __name__ == "__main__":
    main()
