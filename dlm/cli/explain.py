"""`dlm explain`: looks up a setting, an event, a metric or an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import Json

if TYPE_CHECKING:
    from dlm.cli.reference import ReferenceEntry, Topic


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A topic, or the name of a setting, an event, a metric or an error.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look up a setting, an event, a metric or an error.

    Without a name, the topics are listed.

    Examples:
        dlm explain
        dlm explain server
        dlm explain max_queries
        dlm explain client.mode.changed
        dlm explain StaleShardSet
    """
    from dlm.cli.reference import TOPICS, entries
    from dlm.config import nearest
    from dlm.errors import ConfigError

    if name is None:
        _print_topics(as_json)
    elif name in TOPICS:
        _print_topic(TOPICS[name](), as_json)
    elif found := list(entries(name)):
        if as_json:
            print_json({"entries": [_facts(*one) for one in found]})
        for _, topic, heading, entry in [] if as_json else found:
            print("\n".join(_lines(topic, entry, place=f"{topic.title}, {heading}")))
    else:
        known = sorted({*TOPICS, *_names()})
        raise ConfigError(
            f"{name} is not a topic, setting, event, metric or error{nearest(name, known)}. "
            "dlm explain lists the topics"
        )


def _names() -> set[str]:
    from dlm.cli.reference import TOPICS

    found: set[str] = set()
    for make in TOPICS.values():
        try:
            tables = make().tables
        except ModuleNotFoundError:
            continue
        found |= {entry.name for table in tables.values() for entry in table}
    return found


def _print_topics(as_json: bool) -> None:
    from dlm.cli.reference import SETTINGS, TOPICS

    titles = {
        **{name: title for name, (title, _, _) in SETTINGS.items()},
        "cluster": "Settings of cluster.toml",
        "events": "What servers, gateways and clients log",
        "metrics": "What they count, for Prometheus",
        "errors": "What dlm raises",
    }
    assert titles.keys() == TOPICS.keys()
    if as_json:
        print_json({"topics": titles})
        return
    for name, title in titles.items():
        print(f"{name:10}{title}")


def _print_topic(topic: Topic, as_json: bool) -> None:
    if as_json:
        tables = {
            heading: [_facts("", topic, "", entry) for entry in found]
            for heading, found in topic.tables.items()
        }
        print_json({"title": topic.title, "about": topic.about, "tables": tables})
        return
    print("\n".join([topic.title, "", *_wrapped(topic.about, "")]))
    for heading, found in topic.tables.items():
        print(f"\n{heading}\n")
        for entry in found:
            print("\n".join(_lines(topic, entry)))


def _facts(name: str, topic: Topic, heading: str, entry: ReferenceEntry) -> dict[str, Any]:
    place = {"topic": name, "table": heading} if name else {}
    facts = dict(zip(topic.facts, entry.facts, strict=True))
    return {**place, topic.kind: entry.name, **facts, "meaning": entry.meaning}


def _lines(topic: Topic, entry: ReferenceEntry, place: str = "") -> list[str]:
    """An entry: its name, where it belongs, its facts and, indented, its meaning."""
    facts = [f"{n}: {fact}" for n, fact in zip(topic.facts, entry.facts, strict=True) if fact]
    head = entry.name + (f"  ({place})" if place else "")
    return [head, *_wrapped("; ".join(facts), "    "), *_wrapped(entry.meaning, "    ")]


def _wrapped(text: str, indent: str) -> list[str]:
    import shutil
    import textwrap

    width = min(shutil.get_terminal_size().columns, 100)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
