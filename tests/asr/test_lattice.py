"""The lattice itself: its form, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asr.plain import all_paths, random_lattice
from dlm.asr.rescoring.lattice import LatticeDraft, Scales
from dlm.errors import LatticeError


@pytest.mark.parametrize("seed", range(6))
def test_a_lattice_has_one_form_whatever_the_file_numbers(seed: int) -> None:
    """Nodes in topological order, all on a path; no word on the last arc; arcs by their source."""
    lattice = random_lattice(seed)
    assert (lattice.sources < lattice.targets).all()
    assert (np.diff(lattice.sources) >= 0).all()
    assert not lattice.is_word[lattice.targets == lattice.end].any()
    on_paths = {int(lattice.targets[arc]) for path in all_paths(lattice) for arc in path}
    assert on_paths == set(range(1, lattice.nodes))
    assert "w0" not in repr(lattice)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_way_to_the_end_is_that_of_all_paths(seed: int) -> None:
    """From the start, with scales."""
    lattice, scales = random_lattice(seed), Scales(0.5, 3.0, -1.0)
    each = lattice.totals(scales)
    best = max(sum(each[arc] for arc in path) for path in all_paths(lattice))
    assert math.isclose(lattice.best_to_end(each)[0], best)


def draft(*arcs: tuple[int, int, str]) -> LatticeDraft:
    """A lattice of these arcs, each on the line of its place."""
    out = LatticeDraft("u1", "a.slf")
    for line, arc in enumerate(arcs, 1):
        out.arc(*arc, line=line)
    return out


@pytest.mark.parametrize(
    ("arcs", "named", "told"),
    [
        ([], {}, "no arcs"),
        ([(0, 1, "x"), (1, 2, "x"), (2, 1, "x"), (2, 3, "x")], {}, "a.slf, line 2: .* cycle"),
        ([(0, 2, "x"), (1, 2, "x")], {}, "2 nodes .* start"),
        ([(0, 1, "x"), (0, 2, "x")], {}, "2 nodes .* end"),
        ([(0, 1, "x"), (2, 3, "x")], {"start": 0, "end": 3}, "node 0 .* node 3"),
        ([(0, 1, "x")], {"start": 7}, "node 7 .* start"),
        ([(0, 1, "x")], {"end": 7}, "node 7 .* end"),
    ],
)
def test_what_is_not_a_lattice_is_refused(
    arcs: list[tuple[int, int, str]], named: dict[str, int], told: str
) -> None:
    """With the file, the line where there is one, and the utterance."""
    with pytest.raises(LatticeError, match=told) as caught:
        draft(*arcs).finish(**named)
    assert "a.slf" in str(caught.value)
    assert "'u1'" in str(caught.value)


def test_an_arc_to_itself_and_scores_that_are_not_numbers_are_refused_on_their_line() -> None:
    """NaN and infinities."""
    out = draft()
    with pytest.raises(LatticeError, match=r"a.slf, line 9: .* to itself"):
        out.arc(3, 3, "x", line=9)
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(LatticeError, match=r"line 8: .* finite"):
            out.arc(0, 1, "x", value, line=8)


def test_nodes_on_no_path_are_left_out() -> None:
    """A dead end, and a node that nothing leads to."""
    found = draft((0, 1, "x"), (0, 2, "y"), (3, 1, "z"), (1, 4, "")).finish(0, 4)
    assert (found.nodes, found.labels) == (3, ("x", ""))
