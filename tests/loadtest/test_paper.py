"""The paper's evaluation: small, on the test's own model, with real servers where it takes any."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from loadtest.paper.calibration import fit
from loadtest.paper.evaluation import EXPERIMENTS, FORMAT, VERSION, Evaluation, chosen
from loadtest.paper.page import cells_of, page_of
from loadtest.paper.result import MEASURED, SIMULATED, Result, result_of
from loadtest.paper.setup import Setup
from loadtest.paper.storage import ARC_BYTES, STATE_BYTES, bytes_by_order, transducer
from loadtest.paper.timed import fitted
from loadtest.report.provenance import read_document

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "loadtest/paper/results.schema.json").read_text())
RESULTS = ROOT / "loadtest/results/results.json"
STORED = ("table-4", "table-6", "ladder")


@pytest.fixture(scope="module")
def setup(files: ModelFiles, trace_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """The test's model in one shard, and one server."""
    work = tmp_path_factory.mktemp("work")
    held_out = work / "held-out.txt"
    words = [word for word in files.words() if word.isalpha()][:20]
    held_out.write_text("\n".join(" ".join(words[at : at + 4]) for at in range(12)))
    return Setup(
        files.again(1).directory,
        files.directory.with_name("model.arpa"),
        trace_file,
        work,
        (1,),
        quick=True,
        held_out=held_out,
    )


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
    """Those of the test, and those that are committed; every field is described."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(json.loads((evaluated / "results.json").read_text()), SCHEMA)
    jsonschema.validate(json.loads(RESULTS.read_text()), SCHEMA)

    def described(schema: Any) -> bool:
        fields = [*schema.get("properties", {}).values()]
        fields += [schema["items"]] if "properties" in schema.get("items", {}) else []
        return all("description" in field and described(field) for field in fields)

    assert described(SCHEMA)


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
    assert f"Batching saves {saved:.1f} %" in quoted
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
    assert formats["WFST"] == pytest.approx(total["wfst"] * 1e6, rel=0.01)


def test_a_transducer_scores_as_the_model(setup: Setup, files: ModelFiles) -> None:
    """Walked by hand, for every context of two words: arcs, epsilons and final weights give the
    oracle's scores."""
    found = transducer(setup.arpa)
    arcs: dict[tuple[int, int], tuple[float, int]] = {}
    columns = (found.source, found.label, found.weight, found.target)
    for source, label, weight, target in zip(*(c.tolist() for c in columns), strict=True):
        assert (source, label) not in arcs
        arcs[source, label] = weight, target
    assert found.bytes == STATE_BYTES * len(found.final) + ARC_BYTES * len(arcs)
    vocabulary = files.oracle.vocabulary
    end = vocabulary.id_of("</s>")

    def step(state: int, word: int) -> tuple[float, int]:
        cost = 0.0
        while True:
            if word == end and np.isfinite(found.final[state]):
                return cost + float(found.final[state]), state
            if (state, word + 1) in arcs:
                weight, target = arcs[state, word + 1]
                return cost + weight, target
            weight, state = arcs[state, 0]
            cost += weight

    words = [vocabulary.id_of(word) for word in files.words()[3:30:3]]
    for first in words:
        for second in words:
            state = step(step(0, first)[1], second)[1]
            for word in (*words, end):
                expected = files.oracle.score((first, second), word).log10_prob
                assert step(state, word)[0] == pytest.approx(-expected * np.log(10), rel=1e-4)


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
    with pytest.raises(ConfigError, match="results of"):
        Evaluation(setup, evaluated / "other", said.append)


def test_a_failed_experiment_leaves_the_others(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named with why; what came before and after is kept."""
    from loadtest.paper import table4

    def fail(setup: Setup) -> Result:
        raise ConfigError("planted")

    monkeypatch.setattr(table4, "run", fail)
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
    assert page.count("<svg") >= 2
    assert "simulated" in page
