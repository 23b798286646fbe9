"""Table 4: n-grams and storage by order."""

from __future__ import annotations

from loadtest.paper.result import COMPUTED, MEASURED, Result
from loadtest.paper.setup import Setup
from loadtest.paper.sizes import measured_sizes

PAPER = ((0.13, 0), (600, 18), (3600, 108), (2000, 66), (400, 15))  # millions, GB


def run(setup: Setup) -> Result:
    sizes = measured_sizes(setup)
    rows = []
    for order, (ngrams, size) in enumerate(zip(sizes.ngrams, sizes.arpa_by_order, strict=True), 1):
        rows.append(
            {
                "order": str(order),
                "ngrams": ngrams,
                "share": 100 * ngrams / sum(sizes.ngrams),
                "arpa": size / 1e6,
                "wfst": sizes.wfst_by_order[order - 1] / 1e6,
                "basis": MEASURED,
            }
        )
    rows.append(
        {
            "order": "all",
            "ngrams": sum(sizes.ngrams),
            "share": 100.0,
            "arpa": sum(sizes.arpa_by_order) / 1e6,
            "wfst": sum(sizes.wfst_by_order) / 1e6,
            "basis": MEASURED,
        }
    )
    first, rest = sizes.dlm_parts
    for name, size in (("1 and 2 (low orders)", first), ("3 and more (shards)", rest)):
        rows.append({"order": name, "dlm": size / 1e6, "basis": MEASURED})
    millions = sum(count for count, _ in PAPER)
    paper = [
        {
            "where": "4.2.2, Table 4",
            "order": str(order),
            "ngrams": count * 1e6,
            "share": 100 * count / millions,
            "arpa": size * 1e3,
        }
        for order, (count, size) in enumerate(PAPER, 1)
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
            "kind": "bars",
            "x": "order",
            "y": "ngrams",
            "series": None,
            "labels": {"x": "order", "y": "n-grams"},
        },
        [
            f"The WFST column is {COMPUTED} from the states and arcs of each order (Table 6 checks "
            "the sum with an OpenFst file).",
            "The paper's model is of 3.2 TB of Chinese text and pruned, so order 3 is its largest.",
        ],
    )
