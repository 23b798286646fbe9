"""Section 4.1.2: the ladder of model sizes, by pruning."""

from __future__ import annotations

from pathlib import Path

from dlm.errors import ConfigError
from dlm.estimate.prune import Goal, prune_file
from dlm.estimate.text import Reader
from dlm.files import scratch_folder, write_whole
from dlm.index.sizes import estimate_sizes, measure
from dlm.ngram.arpa import ArpaReader
from loadtest.paper.result import MEASURED, Result, Row
from loadtest.paper.setup import Setup
from loadtest.paper.storage import plain_arpa
from loadtest.traces.rescoring import spoken

PAPER_GB = (500, 400, 200, 100, 50)
LINES = 20_000  # of the held-out text
QUICK_LINES = 200


def run(setup: Setup) -> Result:
    """The model pruned to the paper's shares of its size."""
    arpa = plain_arpa(setup)
    size = arpa.stat().st_size
    shares = [gb / PAPER_GB[0] for gb in PAPER_GB]
    rows: list[Row] = []
    notes = [
        "Pruned by relative entropy (Stolcke 2000) to a share of the ARPA file's bytes, as the "
        "paper did.",
        "dlm's size is computed, as by `dlm shard --estimate` (within 10 %).",
        "Word error rates over such a ladder: tests/benchmarks/wer.py (hours of decoding).",
    ]
    with scratch_folder(setup.work, "ladder") as scratch:
        text = _held_out(setup, scratch)
        if text is None:
            notes.append("No perplexities, since no held-out text was given (--held-out).")
        else:
            notes.append(f"Perplexity excludes OOVs; at most {LINES:,} lines of {_name(setup)}.")
        before = None
        for share in shares:
            setup.progress.tell(f"ladder: {share:.0%} of the model")
            if share == 1.0:
                rows.append(_row(share, arpa, None))
                continue
            pruned = scratch / "pruned.arpa"
            blocks = None if text is None else _blocks(text)
            goal = Goal(text_bytes=int(size * share))
            try:
                done = prune_file(arpa, pruned, goal, text=blocks)
            except ConfigError as exc:
                notes.append(f"{share:.0%} of the size: {exc}")
                continue
            after = None
            if done.measured is not None:
                before, after = done.measured.without_oovs
            rows.append(_row(share, pruned, after))
        if before is not None:
            rows[0]["perplexity"] = before
    paper = [{"where": "4.1.2", "share": 100 * s, "paper_gb": gb} for s, gb in
             zip(shares, PAPER_GB, strict=True)]  # fmt: skip
    return Result(
        "ladder",
        "Section 4.1.2: the ladder of model sizes",
        paper,
        [
            ("share", "of the full model", "%"),
            ("paper_gb", "the paper's", "GB"),
            ("ngrams", "n-grams", ""),
            ("arpa", "ARPA", "MB"),
            ("dlm", "dlm exact (computed)", "MB"),
            ("perplexity", "perplexity", ""),
        ],
        rows,
        {
            "kind": "lines",
            "x": "arpa",
            "y": "perplexity",
            "series": None,
            "labels": {"x": "MB of ARPA", "y": "perplexity"},
        }
        if text is not None
        else None,
        notes,
    )


def _row(share: float, arpa: Path, perplexity: float | None) -> Row:
    with ArpaReader(arpa) as reader:
        counts = reader.counts
    return {
        "share": 100 * share,
        "ngrams": sum(counts),
        "arpa": arpa.stat().st_size / 1e6,
        "dlm": estimate_sizes(measure(arpa), 1, "exact").disk / 1e6,
        "perplexity": perplexity,
        "basis": MEASURED,
    }


def _name(setup: Setup) -> str:
    return "" if setup.held_out is None else setup.held_out.name


def _held_out(setup: Setup, scratch: Path) -> Path | None:
    """Lines of the held-out text, normalised as the model's own words are."""
    if setup.held_out is None:
        return None
    lines: list[bytes] = []
    most = QUICK_LINES if setup.quick else LINES
    for block in Reader([str(setup.held_out)], skip=True, scored=True).read():
        text = block.lines[: block.size].decode(errors="replace")
        lines += (" ".join(spoken(line)).encode() for line in text.split("\n") if spoken(line))
        if len(lines) >= most:
            break
    path = scratch / "held-out.txt"
    write_whole(path, b"\n".join(lines[:most]) + b"\n")
    return path


def _blocks(text: Path) -> list[bytes]:
    reader = Reader([str(text)], scored=True)
    return [block.lines for block in reader.read() if block.size]
