"""The plain estimator: its sums, and KenLM's lmplz beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm.errors import EstimationError
from estimate import oracle
from estimate.corpora import Case, case
from estimate.lmplz import LmplzError, Values, lmplz, needs_lmplz

CASES = 200


def plainly(one: Case) -> oracle.PlainEstimate | str:
    """The plain model, or the complaint."""
    try:
        return oracle.estimate(
            one.lines,
            one.order,
            prune=one.prune,
            vocabulary=one.vocabulary,
            fallback=one.fallback,
        )
    except EstimationError as exc:
        return str(exc)


def values_of(model: oracle.PlainEstimate) -> Values:
    """As an ARPA file has them."""
    return {
        tuple(model.words[i] for i in ngram): (oracle.log10(prob), oracle.log10(backoff))
        for values in model.values
        for ngram, (prob, backoff) in values.items()
    }


@pytest.mark.promise("as_lmplz")
@needs_lmplz
def test_the_plain_model_is_that_of_lmplz(tmp_path: Path) -> None:
    """200 random small texts: the same n-grams, values within 2e-5, the same refusals."""
    compared = refused = 0
    for seed in range(CASES):
        one = case(seed)
        options = []
        if one.fallback:
            options += ["--discount_fallback", *map(str, one.fallback)]
        if one.prune:
            options += ["--prune", *map(str, one.prune)]
        ours = plainly(one)
        try:
            theirs = lmplz(
                one.text,
                one.order,
                tmp_path,
                *options,
                vocabulary=b" ".join(sorted(one.vocabulary or ())),
            )
        except LmplzError as exc:
            assert isinstance(ours, str), f"seed {seed}: lmplz says {exc}"
            refused += 1
            continue
        assert not isinstance(ours, str), f"seed {seed}: {ours}"
        mine = values_of(ours)
        assert mine.keys() == theirs.keys(), f"seed {seed}"
        for ngram, values in theirs.items():
            for own, other in zip(mine[ngram], values, strict=True):
                assert own == pytest.approx(max(other, -99.0), abs=2e-5), (seed, ngram)
        compared += 1
    assert compared > 100
    assert refused > 10
