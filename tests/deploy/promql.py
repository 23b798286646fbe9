"""What a PromQL expression names: metrics with the labels they are chosen by, and groupings."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = r"(?:dlm|up)[a-zA-Z0-9_:]*"
_SELECTOR = re.compile(rf"(?<![\w:\"])({_NAME})\b(?:\{{([^}}]*)\}})?")
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Selector:
    """One series selector: a metric and its matchers, label -> value or pattern."""

    metric: str
    matchers: tuple[tuple[str, str], ...]


def selectors(expression: str) -> list[Selector]:
    """Every selector of an expression."""
    return [
        Selector(name, tuple(_MATCHER.findall(inside or "")))
        for name, inside in _SELECTOR.findall(_without_groupings(expression))
    ]


def groupings(expression: str) -> set[str]:
    """Every label that the expression groups or matches by."""
    found = _GROUPING.findall(expression)
    return {label.strip() for inside in found for label in inside.split(",") if label.strip()}


def kept_labels(expression: str) -> set[str]:
    """Labels of the result of a recording rule, which groups first of all; `le` is used up."""
    match = _GROUPING.search(expression)
    inside = match[1].split(",") if match else []
    return {label.strip() for label in inside} - {"le", ""}


def _without_groupings(expression: str) -> str:
    return _GROUPING.sub(" ", expression)
