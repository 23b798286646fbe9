"""Table 6: storage of the same model in several formats."""

from __future__ import annotations

from loadtest.paper.result import COMPUTED, MEASURED, Result
from loadtest.paper.setup import Setup
from loadtest.paper.sizes import measured_sizes

PAPER = (("ARPA", 200.0), ("dlm exact", 100.0), ("WFST", 200.0))  # GB


def run(setup: Setup) -> Result:
    sizes = measured_sizes(setup)
    ngrams, arpa = sum(sizes.ngrams), sum(sizes.arpa_by_order)
    rows = [
        {
            "format": name,
            "size": size / 1e6,
            "of_arpa": 100 * size / arpa,
            "per_ngram": size / ngrams,
            "basis": MEASURED,
        }
        for name, size in sizes.formats.items()
    ]
    computed = sum(sizes.wfst_by_order)
    if sizes.wfst_is_built:
        off = 100 * (sizes.formats["WFST"] / computed - 1)
        note = (
            f"WFST: a file of OpenFst's const type, written by pynini, {off:+.2f} % off the sum of "
            f"states and arcs. {sizes.wfst_states:,} states, {sizes.wfst_arcs:,} arcs."
        )
    else:
        rows.append(
            {
                "format": "WFST",
                "size": computed / 1e6,
                "of_arpa": 100 * computed / arpa,
                "per_ngram": computed / ngrams,
                "basis": COMPUTED,
            }
        )
        note = (
            "WFST: 20 bytes per state and 16 per arc, as in OpenFst's const type; pynini (extra "
            "peers) is not installed, or the model is too large to build one here. "
            f"{sizes.wfst_states:,} states, {sizes.wfst_arcs:,} arcs."
        )
    notes = [
        note,
        "dlm: all files of a shard set with one shard, words included, as in KenLM's binary. The "
        "WFST has numbers instead of words.",
    ]
    if not any("KenLM" in name for name in sizes.formats):
        notes.append("KenLM's rows are missing: DLM_KENLM_BIN is not a folder with build_binary.")
    return Result(
        "table-6",
        "Table 6: storage cost",
        [
            {
                "where": "4.2.3, Table 6",
                "format": name,
                "size": 1e3 * size,
                "of_arpa": 100 * size / PAPER[0][1],
            }
            for name, size in PAPER
        ],
        [
            ("format", "format", ""),
            ("size", "size", "MB"),
            ("of_arpa", "of ARPA", "%"),
            ("per_ngram", "per n-gram", "bytes"),
        ],
        rows,
        {
            "kind": "bars",
            "x": "format",
            "y": "size",
            "series": None,
            "labels": {"x": "format", "y": "MB"},
        },
        notes,
    )
