"""The paper's evaluation: small, on the test's own model, with real servers where it takes any."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("hdrh")

from cluster import ModelFiles
from dlm.errors import ConfigError
from dlm.ngram.arpa import ArpaReader
from loadtest.cli.main import app
from loadtest.paper import placement, timing
from loadtest.paper.clusters import fitted
from loadtest.paper.evaluation import EXPERIMENTS, FORMAT, VERSION, Evaluation, chosen
from loadtest.paper.page import cells_of, page_of
from loadtest.paper.result import COMPUTED, MEASURED, SIMULATED, Result, Setup, result_of
from loadtest.paper.scaling import fit
from loadtest.paper.storage import bytes_by_order, transducer_of
from loadtest.paper.workload import histories, recorded
from loadtest.report.provenance import read_document

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "loadtest/paper/results.schema.json").read_text())
RESULTS = ROOT / "loadtest/results/results.json"
STORED = ("table-4", "table-6", "ladder")


@pytest.fixture(scope="module")
def evaluated(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of results of what needs no servers."""
    folder = tmp_path_factory.mktemp("evaluation")
    evaluation = Evaluation(setup, folder, lambda line: None)
    evaluation.run(STORED)
    assert evaluation.failed == {}
    return folder


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of an experiment."""
    entries = read_document(folder / "results.json", FORMAT, VERSION)["experiments"]
    (found,) = [one["result"]["rows"] for one in entries if one["result"]["name"] == name]
    return list(found)


def test_results_are_what_their_schema_says(evaluated: Path) -> None:
    """Those of the test, and those that are committed."""
    jsonschema.validate(json.loads((evaluated / "results.json").read_text()), SCHEMA)
    jsonschema.validate(json.loads(RESULTS.read_text()), SCHEMA)


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    """And is small."""
    facts = read_document(RESULTS, FORMAT, VERSION)
    assert not facts["of"]["quick"]
    assert RESULTS.with_suffix(".html").read_text(encoding="utf-8") == page_of(facts)
    assert RESULTS.stat().st_size + RESULTS.with_suffix(".html").stat().st_size < 1_000_000


@pytest.mark.promise("paper_figures")
def test_the_page_quotes_the_committed_results() -> None:
    """Messages and time of dlm, A and B on four servers; batching, balance, 64 servers."""
    found = {
        one["result"]["name"]: one["result"]["rows"]
        for one in read_document(RESULTS, FORMAT, VERSION)["experiments"]
    }
    quoted = " ".join((ROOT / "loadtest/README.md").read_text(encoding="utf-8").split())
    four = {
        row["system"]: row
        for row in found["figure-7"]
        if row["servers"] == 4 and row["basis"] == "measured" and "trace" in row["queries"]
    }
    cells = [f"{four[system]['messages']:.1f}" for system in ("dlm", "A", "B")]
    assert f"| messages per second of audio | {' | '.join(cells)} |" in quoted
    cells = [f"{four[system]['query_s']:.4f}" for system in ("dlm", "A", "B")]
    assert f"| query time per second of audio, s | {' | '.join(cells)} |" in quoted
    (saved,) = [
        row["saved"]
        for row in found["figure-9"]
        if row["basis"] == "measured" and row["saved"] and "trace" in row["queries"]
    ]
    assert f"Batching clients send {saved:.1f} % fewer messages" in quoted
    (balance,) = [
        row["bytes"]
        for row in found["figure-8"]
        if row["basis"] == "measured" and row["servers"] == 4
    ]
    assert f"differ by {balance:.2%}".replace("%", " %") in quoted
    most = max(row["per_minute"] for row in found["figure-6"])
    assert f"64 servers would answer {most:.0f} M messages per minute" in quoted


def test_sizes_add_up(evaluated: Path, setup: Setup) -> None:
    """By order: the n-grams of the header, the bytes of the file from its first section on."""
    *orders, total, low, shards = rows_of(evaluated, "table-4")
    with ArpaReader(setup.arpa) as reader:
        assert tuple(row["ngrams"] for row in orders) == reader.counts
    text = setup.arpa.read_bytes()
    assert bytes_by_order(setup.arpa)[0] == text.index(b"\\2-grams:") - text.index(b"\\1-grams:")
    assert total["arpa"] * 1e6 == pytest.approx(len(text) - text.index(b"\\1-grams:"))
    formats = {row["format"]: row["size"] * 1e6 for row in rows_of(evaluated, "table-6")}
    assert formats["ARPA"] == pytest.approx(total["arpa"] * 1e6)
    assert 0 < low["dlm"] + shards["dlm"] <= formats["dlm exact"] / 1e6
    assert formats["WFST"] == pytest.approx(total["wfst"] * 1e6)


def test_a_transducer_is_counted_as_it_is_defined(setup: Setup, files: ModelFiles) -> None:
    """From the oracle's n-grams: contexts of longer ones or with weights, and an arc for each
    n-gram but sentence ends, and for each of these contexts."""
    known, end = files.oracle.ngrams, files.oracle.vocabulary.id_of("</s>")
    kept = {gram[:-1] for gram in known if len(gram) > 1}
    kept |= {gram for gram, (_, weight) in known.items() if weight and len(gram) < 4}
    states, arcs = transducer_of(setup)
    assert states == [sum(len(one) == n for one in kept) + (n == 1) for n in range(1, 5)]
    ngrams = [sum(len(gram) == n and gram[-1] != end for gram in known) for n in range(1, 5)]
    assert [all_ - n for all_, n in zip(arcs, ngrams, strict=True)] == [states[0] - 1, *states[1:]]


def test_the_ladder_falls_in_size(evaluated: Path) -> None:
    """Each rung has fewer n-grams than the one above; what could not be pruned so far is said."""
    rungs = [row["ngrams"] for row in rows_of(evaluated, "ladder")]
    assert len(rungs) > 1
    assert rungs == sorted(rungs, reverse=True)


def test_whole_results_are_not_found_again(evaluated: Path, setup: Setup) -> None:
    """A second run reads them; --again runs; another model is refused."""
    before = (evaluated / "results.json").read_bytes()
    said: list[str] = []
    Evaluation(setup, evaluated, said.append).run(STORED)
    assert said == []
    assert (evaluated / "results.json").read_bytes() == before
    Evaluation(setup, evaluated, said.append, again=True).run(["table-6"])
    assert any("table-6" in line for line in said)
    facts = json.loads(before)
    facts["of"]["model"] = "other"
    (evaluated / "other").mkdir()
    (evaluated / "other/results.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="the results for"):
        Evaluation(setup, evaluated / "other", said.append)


def test_a_failed_experiment_leaves_the_others(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named with why; what came before and after is kept."""

    def fail(setup: Setup) -> Result:
        raise ConfigError("planted")

    monkeypatch.setitem(EXPERIMENTS, "table-4", fail)
    evaluation = Evaluation(setup, tmp_path, lambda line: None)
    names = [result.name for result in evaluation.run(STORED[:2])]
    assert names == ["table-6"]
    assert evaluation.failed == {"table-4": "planted"}


def test_results_go_through_json_and_refuse_rows_without_a_basis() -> None:
    """And a plot of keys that no column has."""
    whole = Result("x", "X", [{"where": "4"}], [("a", "A", "s")], [{"a": 1, "basis": MEASURED}])
    assert result_of(json.loads(json.dumps(whole.facts()))).facts() == whole.facts()
    assert cells_of(whole) == (["", "A, s"], [["measured", "1"], ["the paper, 4", "-"]])
    with pytest.raises(ValueError, match="basis"):
        Result("x", "X", [], [("a", "A", "")], [{"a": 1}])
    with pytest.raises(ValueError, match="where"):
        Result("x", "X", [{"a": 1}], [("a", "A", "")], [])
    with pytest.raises(ValueError, match="plot"):
        Result("x", "X", [], [("a", "A", "")], [], {"kind": "bars", "x": "a", "y": "b",
                                                   "series": None, "labels": {}})  # fmt: skip


def test_an_unknown_experiment_is_refused_by_name() -> None:
    """With those that there are."""
    done = CliRunner().invoke(app, ["paper", "--only", "figure-11"])
    assert isinstance(done.exception, ConfigError)
    assert "figure-11" in str(done.exception)
    assert "table-2" in str(done.exception)
    assert chosen(["table-6", "table-2"]) == ["table-2", "table-6"]
    assert chosen([]) == list(EXPERIMENTS)


def test_costs_are_found_again_and_are_never_negative() -> None:
    """From loads that were made up of known ones, without and with one that is 0."""
    rng = np.random.default_rng(1)
    for known in (np.array([1e-4, 2e-6, 5e-4]), np.array([1e-4, 0.0, 5e-4])):
        rows = []
        for at, counts in enumerate(rng.integers(100, 9000, (6, 4)).tolist()):
            requests, asked, messages, queries = counts
            client_s = float(known @ [requests, asked, messages])
            server_s = 3e-4 * messages + 1e-6 * queries
            rows.append({
                "decoders": 1 if at == 0 else 4, "requests": requests, "asked": asked,
                "messages": messages, "queries": queries,
                "client_s": client_s, "server_s": server_s,
                "call_s": client_s + server_s + 2e-4 * messages,
            })  # fmt: skip
        costs = fit(rows)
        found = (costs.request_s, costs.query_s, costs.message_s)
        assert found == pytest.approx(tuple(known), rel=1e-3, abs=1e-9)
        assert (costs.server_message_s, costs.server_query_s) == pytest.approx((3e-4, 1e-6))
        assert costs.wait_s == pytest.approx(2e-4)
    assert (fitted(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([1.0, 0.0])) >= 0).all()


@pytest.mark.slow
def test_real_servers_and_the_simulation_stand_side_by_side(
    setup: Setup, tmp_path: Path, drawn: Callable[[Path], str]
) -> None:
    """Table 2, Figure 6 and the check, on one server; the page is drawn."""
    evaluation = Evaluation(setup, tmp_path, lambda line: None)
    evaluation.run(["table-2", "figure-6", "simulation"])
    assert evaluation.failed == {}
    stages = {row["stage"]: row["us"] for row in rows_of(tmp_path, "table-2")}
    assert all(us > 0 for us in stages.values())
    assert stages["client: encode"] < stages["Decoding & encoding"]
    own = [row for row in rows_of(tmp_path, "figure-6") if row["machines"] == "own"]
    assert {row["basis"] for row in own} == {SIMULATED}
    for row in own:
        assert 55 < row["cpu"] < 95
    pairs = rows_of(tmp_path, "simulation")
    for measured, simulated in zip(pairs[::2], pairs[1::2], strict=True):
        assert (measured["basis"], simulated["basis"]) == (MEASURED, SIMULATED)
        off = 100 * (simulated["value"] / measured["value"] - 1)
        assert simulated["off"] == pytest.approx(off)
    page = drawn(tmp_path / "results.html")
    assert "<svg" in page and 'class="bar"' in page
    assert "simulated" in page


def chosen_rows(found: Result, **wanted: Any) -> list[dict[str, Any]]:
    """Rows with these values; the result also goes through JSON's form."""
    assert result_of(found.facts()).rows == found.rows
    rows = [r for r in found.rows if all(r.get(k) == v for k, v in wanted.items())]
    assert rows, wanted
    return rows


def test_table_3_shares_add_up(setup: Setup, files: ModelFiles) -> None:
    """Orders sum to all; hits are those of the oracle; the bit saves at least what 2-grams do."""
    found = placement.table_3(setup)
    for asked in (recorded(setup), histories(setup)):
        rows = chosen_rows(found, queries=asked.name)
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
    found = timing.table_5(setup)
    for row in chosen_rows(found, index=timing.TREE):
        assert row["searches"] == row["ngrams"]
    for row in chosen_rows(found, index=timing.HASH):
        assert row["searches"] > row["ngrams"]
    for row in chosen_rows(found, index=timing.TREE_WHOLE):
        assert row["searches"] < row["ngrams"]
    assert all(row["basis"] == MEASURED and row["total_ms"] > 0 for row in found.rows)


@pytest.mark.slow
def test_figure_7_measures_what_it_computes(setup: Setup) -> None:
    """Messages of real clusters are those computed, dlm below A below B, each with its time."""
    pytest.importorskip("hdrh")
    setup = replace(setup, servers=(2,))
    found = placement.figure_7(setup)
    asked = recorded(setup).name
    for name in (*placement.TIMED, placement.PLACED):
        (real,) = chosen_rows(found, system=name, servers=2, basis=MEASURED)
        (computed,) = chosen_rows(found, system=name, servers=2, basis=COMPUTED, queries=asked)
        # Slots of a real shard set are balanced by bytes of its files, these by records.
        tolerance = 0.25 if name == placement.OWN else 1e-9
        assert real["messages"] == pytest.approx(computed["messages"], rel=tolerance)
        assert real["query_s"] > 0 and computed["query_s"] > 0
    for servers in (2, 4):
        messages = [
            chosen_rows(found, system=name, servers=servers, basis=COMPUTED)[0]["messages"]
            for name in ("dlm", "A", "B")
        ]
        assert messages == sorted(messages) and messages[0] < messages[2]


def test_figure_8_slots_balance_best(setup: Setup) -> None:
    """In bytes; and a real shard set has a row of its own."""
    found = placement.figure_8(setup)
    for servers in (2, 4):
        by = {row["placement"]: row for row in chosen_rows(found, servers=servers, basis=COMPUTED)}
        slots = by[placement.NAMES["dlm"]]["bytes"]
        assert slots <= by[placement.NAMES["dlm-hash"]]["bytes"]
        assert slots <= by[placement.NAMES["dlm-one-word"]]["bytes"]
    assert chosen_rows(found, servers=2, basis=MEASURED)[0]["bytes"] >= 0


@pytest.mark.slow
def test_figure_9_batching_saves_messages(setup: Setup) -> None:
    """More by server than by context alone; without any, a message per query that is sent."""
    found = placement.figure_9(setup)
    for row in chosen_rows(found, batching=placement.BY_SERVER):
        (none, *_) = chosen_rows(
            found, batching=placement.NONE, queries=row["queries"], servers=row["servers"]
        )
        assert row["messages"] < none["messages"]
        assert row["saved"] == pytest.approx(100 * (1 - row["messages"] / none["messages"]))
    for queries in {row["queries"] for row in found.rows}:
        none = chosen_rows(found, batching=placement.NONE, queries=queries)
        assert {row["basis"] for row in none} == {MEASURED, COMPUTED}
        assert len({row["messages"] for row in none}) == 1
