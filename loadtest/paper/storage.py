"""Tables 4 and 6, and the ladder of section 4.1.2: a model's size by order, in several formats, and
pruned."""

from __future__ import annotations

import subprocess
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from dlm.errors import ConfigError, DlmError
from dlm.estimate.prune import Goal, prune_file
from dlm.estimate.text import Reader
from dlm.files import replacing, scratch_folder, write_whole
from dlm.index.describe import describe
from dlm.index.layout import read_manifest
from dlm.index.sizes import estimate_sizes, measure
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.arpa.source import TextSource
from loadtest.paper.clusters import kept, shard_set
from loadtest.paper.result import BARS, COMPUTED, LINES, MEASURED, Result, Row, Setup
from loadtest.paper.workload import model_of
from loadtest.traces.rescoring import spoken

BLOCK_BYTES = 1 << 22
# Bytes in OpenFst's `const` type: a state has a weight, an arc offset and three counts; an arc has
# two labels, a weight and a next state. Each of these takes four bytes.
STATE_BYTES, ARC_BYTES = 20, 16
# The arguments of build_binary for each of KenLM's structures.
KENLM = {
    "KenLM probing": ("probing",),
    "KenLM trie": ("trie",),
    "KenLM trie, 8 bits": ("-q", "8", "-b", "8", "trie"),
    "KenLM trie, 8 bits, arrays": ("-q", "8", "-b", "8", "-a", "22", "trie"),
}
PAPER_ORDERS = ((0.13, 0), (600, 18), (3600, 108), (2000, 66), (400, 15))  # millions, GB
PAPER_FORMATS = (("ARPA", 200.0), ("dlm exact", 100.0), ("WFST", 200.0))  # GB
PAPER_LADDER_GB = (500, 400, 200, 100, 50)
HELD_OUT_LINES, QUICK_LINES = 20_000, 200


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, in bytes, and counts; lists are by order, from 1 up.

    states, arcs  counts of the model as a weighted finite-state transducer (Mohri et al. 2002); see
                  `transducer_of`
    formats       measured sizes, by name
    dlm_parts     size of the clients' words, 1- and 2-grams, and size of the shards; exact encoding
    """

    ngrams: list[int]
    arpa: list[int]
    states: list[int]
    arcs: list[int]
    dlm_parts: list[int]
    formats: dict[str, int]

    @property
    def wfst(self) -> list[int]:
        """Bytes in OpenFst's `const` type, without its header."""
        return [
            STATE_BYTES * states + ARC_BYTES * arcs
            for states, arcs in zip(self.states, self.arcs, strict=True)
        ]


def measured_sizes(setup: Setup) -> Sizes:
    """Measures the sizes once, and keeps them."""
    name = "sizes-kenlm" if setup.kenlm_bin else "sizes"
    return Sizes(**kept(setup, name, lambda: asdict(_measure(setup))))


def _measure(setup: Setup) -> Sizes:
    manifest = read_manifest(setup.model)
    setup.progress.tell("sizes: by order")
    arpa = plain_arpa(setup)
    by_order = bytes_by_order(arpa)
    formats = {"ARPA": sum(by_order)}
    for encoding in ("exact", "compact"):
        set_of = read_manifest(shard_set(setup, 1, encoding))
        formats[f"dlm {encoding}"] = describe(set_of)["bytes"]
    parts = [0, 0]
    for file in manifest.files:
        parts[file.kind == "shard"] += file.bytes
    with scratch_folder(setup.work, "sizes") as scratch:
        for name, flags in KENLM.items() if setup.kenlm_bin else ():
            setup.progress.tell(f"sizes: {name}")
            formats[name] = _kenlm(setup, flags, arpa, scratch / "kenlm")
    states, arcs = transducer_of(setup)
    return Sizes(list(manifest.counts), by_order, states, arcs, parts, formats)


def _kenlm(setup: Setup, flags: tuple[str, ...], arpa: Path, output: Path) -> int:
    command = [f"{setup.kenlm_bin}/build_binary", *flags, str(arpa), str(output)]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace")[-500:]
        raise DlmError(f"{' '.join(command)} exited with {done.returncode}: {said}")
    return output.stat().st_size


def plain_arpa(setup: Setup) -> Path:
    """The uncompressed ARPA file, which other toolkits read."""
    if setup.arpa.suffix == ".arpa":
        return setup.arpa
    path = setup.work / f"{setup.arpa.name.split('.arpa')[0]}.arpa"
    if not path.exists():
        with closing(TextSource(str(setup.arpa))) as source, replacing(path) as file:
            while block := source.read(BLOCK_BYTES):
                file.write(block)
    return path


def bytes_by_order(arpa: Path) -> list[int]:
    """Bytes of each section of an ARPA file, including its head line."""
    places, at = list[int](), 0
    with arpa.open("rb") as file:
        for line in file:
            if line.startswith(b"\\") and b"-grams:" in line:
                places.append(at)
            at += len(line)
    return [end - begin for begin, end in pairwise([*places, at])]


def transducer_of(setup: Setup) -> tuple[list[int], list[int]]:
    """States and arcs of the model's transducer, by order.

    It has a state for the empty context, and for each context that begins a longer n-gram or has a
    weight; a state of n words counts for order n, and has an epsilon arc to a shorter one. Each
    n-gram is an arc, unless it ends a sentence and so is a final weight.
    """
    model = model_of(setup)
    end, orders = model.vocabulary.id_of("</s>"), model.ngrams.orders
    states, arcs = [], []
    for order, (rows, _, weights) in enumerate(orders, 1):
        contexts = rows[:0]
        if order < len(orders):
            contexts = np.concatenate([orders[order][0][:, :-1], rows[weights != 0]])
        distinct = np.unique(np.ascontiguousarray(contexts).view(f"V{4 * order}"))
        states.append(len(distinct))
        arcs.append(int(np.count_nonzero(rows[:, -1] != end)) + len(distinct))
    states[0] += 1
    return states, arcs


def table_4(setup: Setup) -> Result:
    sizes = measured_sizes(setup)
    rows: list[Row] = [
        _order_row(str(order), ngrams, arpa, wfst, sizes)
        for order, (ngrams, arpa, wfst) in enumerate(
            zip(sizes.ngrams, sizes.arpa, sizes.wfst, strict=True), 1
        )
    ]
    rows.append(_order_row("all", sum(sizes.ngrams), sum(sizes.arpa), sum(sizes.wfst), sizes))
    names = ("1 and 2 (low orders)", "3 and more (shards)")
    for name, size in zip(names, sizes.dlm_parts, strict=True):
        rows.append({"order": name, "dlm": size / 1e6, "basis": MEASURED})
    millions = sum(count for count, _ in PAPER_ORDERS)
    paper = [
        {
            "where": "4.2.2, Table 4",
            "order": str(order),
            "ngrams": count * 1e6,
            "share": 100 * count / millions,
            "arpa": size * 1e3,
        }
        for order, (count, size) in enumerate(PAPER_ORDERS, 1)
    ]
    return Result(
        "table-4",
        "Table 4: distribution of n-grams",
        paper,
        [
            ("order", "order", ""),
            ("ngrams", "n-grams", ""),
            ("share", "share", "%"),
            ("arpa", "ARPA", "MB"),
            ("wfst", "WFST", "MB"),
            ("dlm", "dlm exact", "MB"),
        ],
        rows,
        {
            "kind": BARS,
            "x": "order",
            "y": "ngrams",
            "series": None,
            "labels": {"x": "order", "y": "n-grams"},
        },
        [
            f"The WFST column is {COMPUTED} from the states and arcs of each order.",
            "The paper's model, from 3.2 TB of Chinese text, is pruned, so order 3 is its largest.",
        ],
    )


def _order_row(order: str, ngrams: int, arpa: int, wfst: int, sizes: Sizes) -> Row:
    return {
        "order": order,
        "ngrams": ngrams,
        "share": 100 * ngrams / sum(sizes.ngrams),
        "arpa": arpa / 1e6,
        "wfst": wfst / 1e6,
        "basis": MEASURED,
    }


def table_6(setup: Setup) -> Result:
    sizes = measured_sizes(setup)
    bases = dict.fromkeys(sizes.formats, MEASURED) | {"WFST": COMPUTED}
    rows: list[Row] = [
        {
            "format": name,
            "size": size / 1e6,
            "of_arpa": 100 * size / sum(sizes.arpa),
            "per_ngram": size / sum(sizes.ngrams),
            "basis": bases[name],
        }
        for name, size in {**sizes.formats, "WFST": sum(sizes.wfst)}.items()
    ]
    states = sum(sizes.states)
    notes = [
        f"WFST: {STATE_BYTES} bytes per state and {ARC_BYTES} per arc, as in OpenFst's const type. "
        f"{states:,} states, {sum(sizes.arcs):,} arcs.",
        "dlm: all files of a shard set with one shard, words included, as in KenLM's binary. The "
        "WFST has numbers instead of words.",
    ]
    if setup.kenlm_bin is None:
        notes.append("KenLM's rows are missing: DLM_KENLM_BIN is not a folder with build_binary.")
    paper = [
        {
            "where": "4.2.3, Table 6",
            "format": name,
            "size": 1e3 * size,
            "of_arpa": 100 * size / PAPER_FORMATS[0][1],
        }
        for name, size in PAPER_FORMATS
    ]
    return Result(
        "table-6",
        "Table 6: storage cost",
        paper,
        [
            ("format", "format", ""),
            ("size", "size", "MB"),
            ("of_arpa", "of ARPA", "%"),
            ("per_ngram", "per n-gram", "bytes"),
        ],
        rows,
        {
            "kind": BARS,
            "x": "format",
            "y": "size",
            "series": None,
            "labels": {"x": "format", "y": "MB"},
        },
        notes,
    )


def ladder(setup: Setup) -> Result:
    """Prunes the model to the paper's shares of its size."""
    arpa = plain_arpa(setup)
    size = arpa.stat().st_size
    notes = [
        "Pruned by relative entropy (Stolcke 2000) to a share of the ARPA file's bytes, as the "
        "paper did.",
        "dlm's size is computed, as by `dlm shard --estimate` (within 10 %).",
        "Word error rates over such a ladder: tests/benchmarks/wer.py (hours of decoding).",
    ]
    if setup.held_out is None:
        notes.append("No perplexities, since no held-out text was given (--held-out).")
    else:
        notes.append(
            f"Perplexity excludes OOVs; at most {HELD_OUT_LINES:,} lines of {setup.held_out.name}."
        )
    shares = {gb: gb / PAPER_LADDER_GB[0] for gb in PAPER_LADDER_GB}
    rows = [_rung(1.0, arpa)]
    with scratch_folder(setup.work, "ladder") as scratch:
        text = None if setup.held_out is None else _held_out(setup, setup.held_out, scratch)
        for share in [share for share in shares.values() if share < 1]:
            setup.progress.tell(f"ladder: {share:.0%} of the model")
            pruned = scratch / "pruned.arpa"
            blocks = None if text is None else _blocks(text)
            try:
                done = prune_file(arpa, pruned, Goal(text_bytes=int(size * share)), text=blocks)
            except ConfigError as exc:
                notes.append(f"{share:.0%} of the size: {exc}")
                continue
            rows.append(_rung(share, pruned))
            if done.measured is not None:
                rows[0]["perplexity"], rows[-1]["perplexity"] = done.measured.without_oovs
    return Result(
        "ladder",
        "Section 4.1.2: the ladder of model sizes",
        [{"where": "4.1.2", "share": 100 * share, "paper_gb": gb} for gb, share in shares.items()],
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
            "kind": LINES,
            "x": "arpa",
            "y": "perplexity",
            "series": None,
            "labels": {"x": "MB of ARPA", "y": "perplexity"},
        }
        if setup.held_out is not None
        else None,
        notes,
    )


def _rung(share: float, arpa: Path) -> Row:
    with ArpaReader(arpa) as reader:
        counts = reader.counts
    return {
        "share": 100 * share,
        "ngrams": sum(counts),
        "arpa": arpa.stat().st_size / 1e6,
        "dlm": estimate_sizes(measure(arpa), 1, "exact").disk / 1e6,
        "basis": MEASURED,
    }


def _held_out(setup: Setup, held_out: Path, scratch: Path) -> Path:
    """Writes lines of the held-out text to a file, normalised like the model's own words."""
    lines: list[bytes] = []
    most = QUICK_LINES if setup.quick else HELD_OUT_LINES
    for block in Reader([str(held_out)], skip=True, scored=True).read():
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
