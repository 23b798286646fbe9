"""Table 3: queries by order, those whose n-gram the model has, and those without a message."""

from __future__ import annotations

import numpy as np

from loadtest.baselines.systems import SYSTEMS, Placed
from loadtest.paper.result import BARS, COMPUTED, Result, Row
from loadtest.paper.setup import Setup
from loadtest.paper.workload import Asked, Model, histories, model_of, recorded

PAPER: list[Row] = [
    {"where": "4.2.2, Table 3", "order": order, "share": share, "hit": hit}
    for order, share, hit in (
        ("2", 16.09, 16.09),
        ("3", 13.51, 10.6),
        ("4", 13.49, 4.2),
        ("5", 56.89, 2.5),
        ("all", 100.0, 33.39),
    )
]


def run(setup: Setup) -> Result:
    """For the trace and for whole histories."""
    setup.progress.tell("table-3: reading the model")
    model = model_of(setup)
    rows: list[Row] = []
    for asked in (recorded(setup), histories(setup)):
        setup.progress.tell(f"table-3: {asked.name}")
        rows += rows_of(model, asked)
    return Result(
        name="table-3",
        title="Table 3: distribution of queries",
        paper=PAPER,
        columns=[
            ("queries", "queries of", ""),
            ("order", "n-gram", ""),
            ("share", "of all queries", "%"),
            ("hit", "with hit gram", "%"),
            ("free", "without a message", "%"),
            ("free_paper", "of these, by 1- and 2-grams", "%"),
        ],
        rows=rows,
        plot={
            "kind": BARS,
            "x": "order",
            "y": "share",
            "series": "queries",
            "labels": {"x": "order of the query's n-gram", "y": "% of queries"},
        },
        notes=[
            "A query's order is its context's length plus one; shares are of all queries, as in "
            "the paper. A hit gram is the query's own n-gram, found in the model.",
            "The trace's contexts are states, without the words that can no longer matter, so its "
            "queries are shorter and hit more often. The histories are whole, as in the paper: "
            "10 hypotheses by 10 candidates at each word of the same audio. Candidates are the "
            "frequent words with the most similar spelling.",
            "A query needs no message if the client's 1- and 2-grams are enough. In the paper that "
            "is true only of two-word queries; dlm's clients also know the pairs after which "
            "nothing longer is stored.",
        ],
    )


def rows_of(model: Model, asked: Asked) -> list[Row]:
    counts = np.zeros((4, model.order + 1), np.int64)  # asked, hit, free, free in the paper
    callers = [
        Placed(SYSTEMS[name], model.ngrams, 1).caller(model.cache, model.order)
        for name in ("dlm", "dlm-paper")
    ]
    for call, times in asked.queries():
        lengths = call.lengths[call.row]
        _, orders, _ = model.whole.score(call.contexts[call.row], lengths, call.words)
        order = lengths.astype(np.int64) + 1
        wanted = [np.ones(len(order), bool), orders == order]
        wanted += [~caller.remote(call)[call.row] for caller in callers]
        for row, which in enumerate(wanted):
            counts[row] += np.bincount(
                order[which], weights=times[which], minlength=model.order + 1
            ).astype(np.int64)
    share = 100.0 * counts / counts[0].sum()
    names = [(str(n), share[:, n]) for n in range(1, model.order + 1)]
    return [
        {
            "basis": COMPUTED,
            "queries": asked.name,
            "order": name,
            **dict(zip(("share", "hit", "free", "free_paper"), values.tolist(), strict=True)),
        }
        for name, values in [*names, ("all", share.sum(axis=1))]
        if values[0] > 0
    ]
