"""`dlm explain`: what is declared is found, by topic and by name."""

from __future__ import annotations

import json

import pytest

from cli.conftest import Run
from dlm.cli.reference import TOPICS
from dlm.client.config import ClientConfig
from dlm.client.metrics import FAMILIES
from dlm.config import settings_of


def test_without_a_name_the_topics_are_listed(run: Run) -> None:
    """Each with what it has."""
    lines = run("explain").stdout.decode().splitlines()
    assert [line.split()[0] for line in lines] == list(TOPICS)


def test_a_topic_has_every_setting_with_bounds_default_and_meaning(run: Run) -> None:
    """As the fields of its dataclasses declare them."""
    tables = json.loads(run("explain", "client", "--json").stdout)["tables"]
    found = {entry["setting"]: entry for entry in tables["ClientConfig"]}
    assert found.keys() == {one.name for one in settings_of(ClientConfig)}
    assert found["window"]["values"] == "1 or more"
    assert found["max_queries"]["default"] == "16,384"
    assert all(entry["meaning"] for table in tables.values() for entry in table)


@pytest.mark.promise("metrics_listed")
@pytest.mark.parametrize(
    "topic", ["server", "gateway", "rollout", "cluster", "events", "metrics", "errors"]
)
def test_every_entry_of_a_topic_says_what_it_means(topic: str) -> None:
    """None is empty, and none stands twice."""
    for found in TOPICS[topic]().tables.values():
        names = [entry.name for entry in found]
        assert len(set(names)) == len(names)
        assert all(entry.meaning.endswith((".", ")")) for entry in found), topic


@pytest.mark.parametrize(
    ("name", "place", "facts"),
    [
        ("max_queries", "client", {"table": "ClientConfig", "default": "16,384"}),
        ("client.loop.failed", "events", {"event": "client.*.failed", "fields": "shard, error"}),
        ("dlm_client_servers", "metrics", {"labels": "health"}),
        ("StaleShardSet", "errors", {"a kind of": "UnavailableError"}),
    ],
)
def test_a_name_is_found_wherever_it_stands(
    run: Run, name: str, place: str, facts: dict[str, str]
) -> None:
    """With the topic and its table."""
    entries = json.loads(run("explain", name, "--json").stdout)["entries"]
    (entry,) = [one for one in entries if one["topic"] == place]
    assert facts.items() <= entry.items()
    assert entry["meaning"]


def test_it_prints_for_people(run: Run) -> None:
    """The name, its place, its facts, and what it means below."""
    head, *below = run("explain", "dlm_client_servers").stdout.decode().splitlines()
    assert head == "dlm_client_servers  (Metrics, Client)"
    assert below[0] == "    labels: health; stability: may grow"
    assert " ".join(line.strip() for line in below[1:]) == FAMILIES["dlm_client_servers"].meaning


def test_an_unknown_name_is_refused_with_the_nearest(run: Run) -> None:
    """A letter is wrong."""
    done = run("explain", "max_querys", status=1)
    assert b"did you mean max_queries?" in done.stderr
