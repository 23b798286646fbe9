"""Rules and dashboard name metrics and labels that exist, and fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.documents import DEPLOY, load, texts
from deploy.families import series
from deploy.promql import Selector, groupings, kept_labels, selectors
from dlm.client.health import Liveness, Mode
from dlm.server.health import ServingState
from dlm.wire.status import Reason

RULES = [rule for group in load("prometheus/rules.yml")["groups"] for rule in group["rules"]]
RECORDED = {r["record"]: r["expr"] for r in RULES if "record" in r}
ALERTS = {r["alert"]: r for r in RULES if "alert" in r}
DASHBOARD = json.loads(texts()["grafana/dlm.json"])
SERIES = series() | {name: frozenset(kept_labels(expr)) for name, expr in RECORDED.items()}

# Of the labels whose values are a closed set.
VALUES = {
    "cause": {"open_files"},
    "state": {state.name.lower() for state in ServingState},
    "stage": {"queue", "decode", "search", "encode", "write", "plan", "wire"},
    "answered_by": {"local", "shard", "duplicate", "bigram_fallback", "local_fallback"},
    "mode": {mode.value for mode in Mode},
    "health": {health.value for health in Liveness},
    "job": {"dlm-server", "dlm-client"},
}


def panels() -> list[dict[str, Any]]:
    """Those of the dashboard that show something."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[tuple[str, str]]:
    """(where it stands, expression) of every query in rules, dashboard and runbook."""
    out = [(r.get("alert") or r["record"], r["expr"]) for r in RULES]
    for block in re.findall(r"```promql\n(.*?)```", texts()["runbook.md"], re.S):
        out += [("runbook.md", line) for line in block.splitlines()]
    for panel in panels():
        out += [(f"panel {panel['title']}", target["expr"]) for target in panel["targets"]]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            inside = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert inside, variable["definition"]
            metric, label = inside.groups()
            out.append((f"variable {variable['name']}", f"sum by ({label}) ({metric})"))
    return out


def faults(place: str, expression: str) -> list[str]:
    """Names in an expression that no server, client or recording rule has."""
    out = []
    labels: set[str] = set()
    for selector in selectors(expression):
        if selector.metric not in SERIES:
            out.append(f"{place}: there is no series {selector.metric}")
            continue
        labels |= SERIES[selector.metric]
        for label, value in selector.matchers:
            if label not in SERIES[selector.metric]:
                out.append(f"{place}: {selector.metric} has no label {label}")
            out += _faults_of_value(place, selector, label, value)
    return out + [
        f"{place}: nothing it names has the label {x}" for x in groupings(expression) - labels
    ]


def _faults_of_value(place: str, selector: Selector, label: str, value: str) -> list[str]:
    known = VALUES.get(label)
    if label == "result" and selector.metric.startswith(("dlm_server", "dlm:server")):
        known = {"ok", "abandoned"} | {reason.value for reason in Reason}
    if known is None or value.startswith("$"):
        return []
    return [f"{place}: {label} is never {v}" for v in value.split("|") if v not in known]


@pytest.mark.parametrize(("place", "expression"), expressions())
def test_every_metric_and_label_exists(place: str, expression: str) -> None:
    """Or a panel stays empty and an alert silent for ever."""
    assert selectors(expression), f"{place} names no metric"
    assert faults(place, expression) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum(rate(dlm_server_request_total[5m]))", "no series dlm_server_request_total"),
        ("rate(dlm_server_stage_seconds[5m])", "no series dlm_server_stage_seconds"),
        ('dlm_server_in_flight{stage="queue"}', "no label stage"),
        ('dlm_server_state{state="READY"}', "state is never READY"),
        ('dlm_server_requests_total{result=~"ok|OVERLOAD"}', "result is never OVERLOAD"),
        ("sum by (order) (dlm_server_in_flight)", "the label order"),
        ("sum by (client) (dlm:server_queries:rate5m)", "the label client"),
    ],
)
def test_a_planted_fault_is_found(expression: str, fault: str) -> None:
    """So that the test above is known to look."""
    found = faults("here", expression)
    assert len(found) == 1
    assert fault in found[0]


def test_every_family_is_shown() -> None:
    """What is counted stands in a panel or a recorded series that one shows."""
    names = {s.metric for panel in panels() for t in panel["targets"] for s in selectors(t["expr"])}
    names |= {s.metric for name in names & RECORDED.keys() for s in selectors(RECORDED[name])}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series()} - {"up"}
    families = {name for name in families if not name.startswith("dlm_gateway_")}
    assert families <= shown, families - shown


def test_every_recorded_series_is_used() -> None:
    """By an alert or a panel."""
    used = {s.metric for place, e in expressions() if place not in RECORDED for s in selectors(e)}
    assert RECORDED.keys() <= used, RECORDED.keys() - used


@pytest.mark.promise("runbook")
def test_every_alert_says_what_it_means_and_where_to_read_on() -> None:
    """A summary, a description, how bad, and a section of the runbook."""
    headings = {h.lower() for h in re.findall(r"^## (\w+)$", texts()["runbook.md"], re.M)}
    for name, rule in ALERTS.items():
        notes = rule["annotations"]
        assert notes.keys() == {"summary", "description", "runbook_url"}, name
        assert notes["runbook_url"] == f"runbook.md#{name.lower()}", name
        assert name.lower() in headings, f"runbook.md has no section {name}"
        assert rule["labels"]["severity"] in ("critical", "warning"), name


def test_every_section_on_an_alert_is_of_one() -> None:
    """A renamed alert leaves no section behind."""
    sections = set(re.findall(r"^## (Dlm\w+)$", texts()["runbook.md"], re.M))
    assert sections == ALERTS.keys()


def test_templates_of_annotations_name_labels_that_the_alert_has() -> None:
    """Else a person reads an empty word at night."""
    for name, rule in ALERTS.items():
        has = kept_labels(rule["expr"]) or SERIES[selectors(rule["expr"])[0].metric]
        text = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= has, name


def test_every_alert_is_shown_to_fire() -> None:
    """In rules_test.yml, with what it says."""
    shown = {
        case["alertname"]
        for test in load("prometheus/rules_test.yml")["tests"]
        for case in test.get("alert_rule_test", ())
        if case["exp_alerts"]
    }
    assert shown == ALERTS.keys()


def test_the_dashboard_hangs_together() -> None:
    """Panels have numbers of their own, a description, and do not lie on each other."""
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        cells = {
            (grid["x"] + dx, grid["y"] + dy) for dx in range(grid["w"]) for dy in range(grid["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert {"model", "shard_set", "shard"} <= variables
    for place, expression in expressions():
        used = set(re.findall(r"\$\{?(\w+)", expression)) - {"__rate_interval"}
        assert used <= variables, place


def test_the_jobs_of_the_rules_are_those_of_the_scraper() -> None:
    """prometheus.yml, where the rules are loaded too."""
    config = load("prometheus/prometheus.yml")
    assert {job["job_name"] for job in config["scrape_configs"]} == VALUES["job"]
    assert config["rule_files"] == ["rules.yml"]


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What promtool says, in deploy/prometheus."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not on PATH (Debian: apt-get install prometheus)")
    return subprocess.run(
        [program, *map(str, arguments)],
        cwd=DEPLOY / "prometheus",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "rules.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    """Prometheus's own parser, and its clock: each alert fires when rules_test.yml says."""
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_parses_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """As rules, with values in the place of variables."""
    queries = [re.sub(r"\$__rate_interval", "5m", e) for place, e in expressions() if " " in place]
    rules = [{"record": f"query:{at}", "expr": query} for at, query in enumerate(queries)]
    file = tmp_path / "dashboard.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
