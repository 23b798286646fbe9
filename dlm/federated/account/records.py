"""Makes the record of an output with several inputs: the only place where guarantees are composed.

A stage that several records share counts once; different stages add up. To distinguish copies of a
run that continued separately, a stage that releases each round's result names its run
(`extras.run`, a random id) and the digest of what it released (`extras.released`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from dlm.record.provenance import (
    ADJACENCY,
    UNIT,
    UNVERIFIED,
    Guarantee,
    Provenance,
    PublicInput,
    UnverifiedInput,
    digest_of,
    is_record_line,
)

DELTA_OF_NOTHING = 1e-6  # a placeholder, used if no record has a delta above 0


class Composition(NamedTuple):
    """The record of an output with several inputs, and the result of accounting, if any."""

    provenance: Provenance
    numbers: Mapping[str, Any] | None
    notes: tuple[str, ...]


def compose_records(
    inputs: Mapping[str, Provenance | None],
    *,
    delta: float,
    stages: Sequence[Mapping[str, Any]] = (),
    ledgers: Sequence[str] = (),
    void: Sequence[str] = (),
    simulated: bool = False,
    config: Mapping[str, Any] | None = None,
    content: Mapping[str, str] | None = None,
    step: str = "",
) -> Composition:
    """Makes the record of an output with several inputs.

    If an input has no record, or its record has no guarantee, the output has no guarantee.

    Args
        inputs     description of an input, such as "the vocabulary words.txt" -> record or None
        stages     stages that use users' data, besides those of the inputs, as JSON
        void       further reasons why the output has no guarantee
        simulated  whether a random key behind `stages` came from a configured seed
        content    SHA-256 of the outputs, by name
        step       name of a processing step that uses no users' data; "" for other steps
    """
    brought = inherited(inputs)
    own = [{str(k): plain(v) for k, v in stage.items()} for stage in stages]
    simulated = simulated or any(s.get("simulated") is True for s in (*brought.stages, *own))
    reasons = [*void, *brought.reasons]
    together = [*map(dict, brought.stages), *own]
    numbers: dict[str, Any] | None = None
    found: Guarantee | None = None
    notes: tuple[str, ...] = ()
    if not reasons and not together:
        found = Guarantee(0.0, 0.0, 0.0)  # a person attests that everything is public
        if not brought.public_inputs:
            reasons.append("no stage and no public input is named, so the origin is unknown")
    elif not reasons:
        numbers, found, notes = _account(together, delta)
        if found is None:
            reasons.append("accounting finds no finite epsilon")
    if simulated:
        reasons.append(
            "keys were made from a configured seed: anyone who knows the seed can remove the noise"
        )
    provenance = Provenance(
        None if reasons else found,
        tuple(reasons),
        found if simulated else None,
        UNIT,
        ADJACENCY,
        tuple(together),
        (*brought.ledgers, *ledgers),
        None if config is None else digest_of(plain(config)),
        (*brought.derived, *([step] if step else [])),
        brought.public_inputs,
        brought.unverified,
        dict(content or {}),
    )
    return Composition(provenance, numbers, notes)


def merged_record(
    comments: Mapping[str, Sequence[str]], others: Sequence[str], public: str, step: str = "merge"
) -> list[str]:
    """Returns the privacy line of a model made from several models, or [] if none has a record.
    The inputs in `others` have no record; the person `public`, if named, attests that they contain
    no user's text. FormatError for an unreadable record, PrivacyError for a changed one."""
    found: dict[str, Provenance | None] = {}
    for what, lines in comments.items():
        texts = [line for line in lines if is_record_line(line)]
        found[what] = Provenance.from_json(texts[0], what) if texts else None
        for more, text in enumerate(texts[1:], 2):  # any of the records may be valid
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


def _account(
    records: Sequence[Mapping[str, Any]], delta: float
) -> tuple[dict[str, Any], Guarantee | None, tuple[str, ...]]:
    from dlm.federated.account.compose import StageRecord, compose

    result = compose([StageRecord.from_json(record) for record in records], delta)
    numbers = dataclasses.asdict(result)
    epsilon = float(numbers["epsilon"])
    if not math.isfinite(epsilon):
        return numbers, None, tuple(numbers.get("notes", ()))
    rho = numbers.get("rho")
    finite = rho is not None and math.isfinite(float(rho))
    guarantee = Guarantee(epsilon, delta, float(rho) if finite else None)  # type: ignore[arg-type]
    return numbers, guarantee, tuple(numbers.get("notes", ()))


def plain(value: Any) -> Any:
    """Converts `value` to JSON, with infinities as words, tuples as lists, and keys as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "infinite" if value > 0 else str(value)
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        return plain(value.item())
    return value


T = TypeVar("T")
Stage = Mapping[str, Any]


def stages_of(records: Iterable[Provenance]) -> tuple[Stage, ...]:
    """Returns the stages of several records, each once: two stages are the same only if they name
    a ledger and all their fields are equal."""
    stages: list[Stage] = []
    known: set[str] = set()  # digests of stages with a ledger
    for stage in (stage for record in records for stage in record.stages):
        name = digest_of(stage) if ledger_of(stage) else ""
        if name not in known:
            stages.append(stage)
            known |= {name} - {""}
    return tuple(stages)


def ledger_of(stage: Stage) -> str | None:
    """The digest of a stage's participation ledger; None without one."""
    return (stage.get("extras") or {}).get("ledger") or None


@dataclass(frozen=True)
class Inherited:
    """The facts that an output inherits from its inputs.

    `reasons` say why the output has no guarantee; if there are none, the stages can be composed.
    `stages` lists every stage that touched users, once. `unverified` lists the inputs whose record
    no trusted key has verified.
    """

    reasons: tuple[str, ...]
    stages: tuple[Stage, ...]
    ledgers: tuple[str, ...]
    derived: tuple[str, ...]
    public_inputs: tuple[PublicInput, ...]
    unverified: tuple[UnverifiedInput, ...]


def inherited(inputs: Mapping[str, Provenance | None]) -> Inherited:
    """Returns what an output inherits. The keys of `inputs` describe the inputs ("the vocabulary
    words.txt"); an input without a record or a guarantee adds to `reasons`."""
    reasons: list[str] = []
    records: dict[str, Provenance] = {}
    unverified: list[UnverifiedInput] = []
    for what, record in inputs.items():
        if record is None:
            reasons.append(f"nothing says whose text {what} is: it has no record")
            continue
        records[what] = record
        # `compose_records` itself reports a simulation that a stage names. If no stage does, the
        # record's reasons are kept, so that simulated noise does not pass for real.
        composed = record.simulated is not None and any(map(_is_simulated, record.stages))
        if record.guarantee is None and not composed:
            reasons += record.reasons
        elif not record.stages and not record.is_public:
            reasons.append(f"the record of {what} names no stage to compose")
        if record.guarantee is not None:
            unverified += record.still_unverified
            if record.standing == UNVERIFIED:
                unverified.append(UnverifiedInput(what, record.digest))
    return Inherited(
        tuple(dict.fromkeys(reasons)),
        stages_of(records.values()),
        _once(record.ledgers for record in records.values()),
        _once(record.derived for record in records.values()),
        _once(record.public_inputs for record in records.values()),
        tuple(dict.fromkeys(unverified)),
    )


def _once(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(item for part in parts for item in part))


def _is_simulated(stage: Stage) -> bool:
    return stage.get("simulated") is True
