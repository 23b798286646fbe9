"""The privacy record that a model's header carries, where the model is made from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlm.federated.provenance import Provenance, is_record_line
from dlm.federated.report import compose_records

DELTA_OF_NOTHING = 1e-6  # where no record has a guarantee, and delta says nothing


def merged_record(
    comments: Mapping[str, Sequence[str]], others: Sequence[str], public: str, step: str = "merge"
) -> list[str]:
    """The privacy line of a model that is made from several; none where none of them has one.

    Args
        comments  of each model, by what it is
        others    what went in besides, without a record
        public    who says that what has no record is of no user's text; "" if nobody does
        step      what makes it of them
    Raises
        FormatError, PrivacyError  a record that cannot be read, or was changed
    """
    found: dict[str, Provenance | None] = {}
    for what, lines in comments.items():
        texts = [line for line in lines if is_record_line(line)]
        found[what] = Provenance.from_json(texts[0], what) if texts else None
        for more, text in enumerate(texts[1:], 2):  # which of them is true nobody can know
            found[f"{what}, record {more}"] = Provenance.from_json(text, what)
    if not any(found.values()):
        return []
    found |= dict.fromkeys(others)
    inputs = {
        what: Provenance.public(public, what) if record is None and public else record
        for what, record in found.items()
    }
    deltas = [r.guarantee.delta for r in inputs.values() if r is not None and r.guarantee]
    delta = max(deltas, default=0.0) or DELTA_OF_NOTHING
    return [compose_records(inputs, delta=delta, step=step).provenance.line]
