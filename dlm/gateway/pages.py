"""What GET returns: the contract for tools. Nothing is read from a path that a caller names."""

from __future__ import annotations

from importlib import resources

from dlm.gateway.http import Answer


def pages() -> dict[str, Answer]:
    """Path -> the answer, read once."""
    contract = resources.files("dlm.wire._pb").joinpath("lm.openapi.json").read_bytes()
    return {"/openapi.json": Answer(200, contract)}
