"""A model's provenance: a comment in its ARPA file, which shard sets also keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlm.estimate.settings import EstimationSettings, EstimationSummary
from dlm.ngram.arpa import provenance_line
from dlm.record.provenance import file_digest
from dlm.record.sidecar import PIECES_DIGEST


def provenance(
    settings: EstimationSettings, summary: EstimationSummary, sources: Sequence[str]
) -> list[str]:
    about: dict[str, Any] = {
        "method": "interpolated modified Kneser-Ney",
        "order": settings.order,
        "prune": settings.thresholds,
        "vocabulary": None if settings.vocabulary is None else len(settings.vocabulary),
        # The same digest as in the record of wordpieces from `dlm pieces`.
        "pieces": settings.pieces and {PIECES_DIGEST: file_digest(settings.pieces)},
        "discounts": [[round(d, 7) for d in own] for own in summary.discounts],
        "fallback_orders": summary.fallback_orders,
        "sources": ["-" if s == "-" else Path(s).name for s in sources],
        "text": {
            "bytes": summary.totals.bytes,
            "lines": summary.totals.lines,
            "words": summary.totals.words,
            "empty_lines": summary.totals.empty,
            "empty_lines_counted": not settings.skip,
            "skipped": {str(k): v for k, v in summary.totals.skipped.items()},
        },
    }
    return [provenance_line("estimate", **about)]
