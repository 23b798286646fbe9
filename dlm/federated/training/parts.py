"""Names the parts that compute and add up a run's updates, for the run's report."""

from __future__ import annotations

from dlm.federated.devices.encoding import SecureAggregator
from dlm.federated.devices.engine import DevicesEngine
from dlm.federated.training.engine import Engine, LocalEngine


def parts_of(engine: Engine) -> dict[str, str]:
    inner = getattr(engine, "aggregator", None)
    adding = "integers in the clear" if inner is None else type(inner).__name__
    protocol = getattr(engine, "protocol", "")
    return {
        "engine": type(engine).__name__,
        "aggregator": f"{adding}, {protocol}" if protocol else adding,
    }


def unknown_parts(engine: Engine) -> list[str]:
    """Returns the parts whose types are not dlm's own; their bounds are unknown."""
    if type(engine) not in (LocalEngine, DevicesEngine):
        return [f"unknown engine {type(engine).__name__}"]
    inner = getattr(engine, "aggregator", None)
    if inner is None or type(inner) is SecureAggregator:
        return []
    return [f"unknown aggregator {type(inner).__name__}"]
