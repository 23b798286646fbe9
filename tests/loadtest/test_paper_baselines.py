"""The experiments on placement, caching, batching and the local index, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster import ModelFiles
from loadtest.paper import figure7, figure8, figure9, rescoring, table3, table5
from loadtest.paper.result import COMPUTED, MEASURED, Result, result_of
from loadtest.paper.setup import Setup
from loadtest.paper.workload import histories, model_of, recorded


@pytest.fixture(scope="module")
def setup(files: ModelFiles, trace_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """As quick as can be."""
    whole = files.again(1)
    return Setup(
        whole.directory,
        files.directory.with_name("model.arpa"),
        trace_file,
        tmp_path_factory.mktemp("work"),
        servers=(1, 2),
        quick=True,
    )


def rows_of(found: Result, **wanted: Any) -> list[dict[str, Any]]:
    """Rows with these values; the result also goes through JSON's form."""
    assert result_of(found.facts()).rows == found.rows
    rows = [r for r in found.rows if all(r.get(k) == v for k, v in wanted.items())]
    assert rows, wanted
    return rows


def test_table_3_shares_add_up(setup: Setup, files: ModelFiles) -> None:
    """Orders sum to all; hits are those of the oracle; the bit saves at least what 2-grams do."""
    found = table3.run(setup)
    for asked in (recorded(setup), histories(setup)):
        rows = rows_of(found, queries=asked.name)
        whole = rows[-1]
        assert whole["order"] == "all" and whole["share"] == pytest.approx(100)
        for key in ("share", "hit", "free", "free_paper"):
            assert sum(row[key] for row in rows[:-1]) == pytest.approx(whole[key])
        assert whole["free"] >= whole["free_paper"]
        hits = asked_hits = 0
        for call, times in asked.queries():
            width = call.contexts.shape[1]
            for row, word, count in zip(call.row, call.words, times, strict=True):
                length = int(call.lengths[row])
                context = call.contexts[row, width - length :].tolist()
                score = files.oracle.score(context, int(word))
                hits += int(count) * (score.matched_order == length + 1)
                asked_hits += int(count)
        assert whole["hit"] == pytest.approx(100 * hits / asked_hits)


def test_table_5_finds_the_same_with_more_searches(setup: Setup) -> None:
    """A search per query in the tree, several in hash tables, fewer where contexts are shared."""
    found = table5.run(setup)
    for row in rows_of(found, index=table5.TREE):
        assert row["searches"] == row["ngrams"]
    for row in rows_of(found, index=table5.HASH):
        assert row["searches"] > row["ngrams"]
    for row in rows_of(found, index=table5.TREE_WHOLE):
        assert row["searches"] < row["ngrams"]
    assert all(row["basis"] == MEASURED and row["total_ms"] > 0 for row in found.rows)


@pytest.mark.slow
def test_figure_7_measures_what_it_computes(setup: Setup) -> None:
    """Messages of real clusters are those computed, dlm below A below B, each with its time."""
    pytest.importorskip("hdrh")
    found = figure7.run(setup)
    asked = recorded(setup).name
    for name in (*figure7.TIMED, figure7.PLACED):
        for servers in setup.servers:
            (real,) = rows_of(found, system=name, servers=servers, basis=MEASURED)
            (computed,) = rows_of(
                found, system=name, servers=servers, basis=COMPUTED, queries=asked
            )
            # Slots of a real shard set are balanced by bytes of its files, these by records.
            tolerance = 0.25 if name == figure7.OWN else 1e-9
            assert real["messages"] == pytest.approx(computed["messages"], rel=tolerance)
            assert real["query_s"] > 0 and computed["query_s"] > 0
    for servers in (2, 4):
        messages = [
            rows_of(found, system=name, servers=servers, basis=COMPUTED)[0]["messages"]
            for name in ("dlm", "A", "B")
        ]
        assert messages == sorted(messages) and messages[0] < messages[2]


def test_figure_8_slots_balance_best(setup: Setup) -> None:
    """In bytes; and a real shard set has a row of its own."""
    found = figure8.run(setup)
    for servers in (2, 4):
        by = {row["placement"]: row for row in rows_of(found, servers=servers, basis=COMPUTED)}
        slots = by[figure8.NAMES["dlm"]]["bytes"]
        assert slots <= by[figure8.NAMES["dlm-hash"]]["bytes"]
        assert slots <= by[figure8.NAMES["dlm-one-word"]]["bytes"]
    assert rows_of(found, servers=2, basis=MEASURED)[0]["bytes"] >= 0


@pytest.mark.slow
def test_figure_9_batching_saves_messages(setup: Setup) -> None:
    """More by server than by context alone; without any, a message per query that is sent."""
    found = figure9.run(setup)
    for row in rows_of(found, batching=figure9.BY_SERVER):
        (none, *_) = rows_of(
            found, batching=figure9.NONE, queries=row["queries"], servers=row["servers"]
        )
        assert row["messages"] < none["messages"]
        assert row["saved"] == pytest.approx(100 * (1 - row["messages"] / none["messages"]))
    for queries in {row["queries"] for row in found.rows}:
        none = rows_of(found, batching=figure9.NONE, queries=queries)
        assert {row["basis"] for row in none} == {MEASURED, COMPUTED}
        assert len({row["messages"] for row in none}) == 1


@pytest.mark.slow
def test_rescoring_compares_totals(setup: Setup) -> None:
    """On the fly asks at each word, multi-pass once per utterance; the best total is somebody's."""
    found = rescoring.run(setup)
    fly, multi = found.rows
    assert fly["calls"] > multi["calls"] > 0
    assert fly["messages"] > 0 and fly["query_s"] > 0
    assert multi["wait_s"] == pytest.approx(multi["query_s"])
    assert fly["wait_s"] < fly["query_s"]
    assert max(fly["as_good"], multi["as_good"]) > 0


def test_first_pass_is_the_best_of_all_sentences(setup: Setup, files: ModelFiles) -> None:
    """By 2-grams, where the beam holds every sentence; what was lost is counted apart."""
    from loadtest.traces.rescoring import Confusions, Transcript

    model = model_of(setup)
    said = Transcript("u", "s", 1.0, tuple(model.vocabulary.words[7:9]))
    confusions = Confusions(model.vocabulary.words)
    found = rescoring.first_pass(model, said, confusions, 1000)
    choices = [confusions.of(word, rescoring.WORDS) for word in said.words]
    assert len(found) == len(choices[0]) * len(choices[1])

    def total(ids: list[int]) -> float:
        sum_, before = 0.0, files.oracle.vocabulary.begin_id
        for word in ids:
            sum_ += float(files.oracle.score([before], word).log10_prob)
            before = word
        return sum_

    for ids, lost in found:
        words = [model.vocabulary.words[at] for at in ids]
        missed = sum(word != one for word, one in zip(words, said.words, strict=True))
        assert lost == pytest.approx(rescoring.NOT_SAID * missed)
    order = [total(ids) - lost for ids, lost in found]
    assert order == sorted(order, reverse=True)
