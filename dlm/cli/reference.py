"""`dlm explain`: looks up settings, events, metrics and errors where each is declared."""

from __future__ import annotations

import contextlib
import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase  # `client.*.failed` matches `client.loop.failed`
from typing import Annotated, Any, NamedTuple

import typer

from dlm.cli.options import Json
from dlm.cli.output import print_answer
from dlm.config import Setting, kind_name, nearest, number, settings_of
from dlm.errors import ConfigError

# Each kind of public name has a class, which says what later versions keep (dlm/COMPATIBILITY.md).
# Names that begin like one in `EXPERIMENTAL` are experimental.
STABILITY = {
    "command": "stable",
    "error": "stable",
    "event": "may grow",
    "metric": "may grow",
    "python": "stable",
    "setting": "stable",
}
EXPERIMENTAL = {
    "command": ("dlm devices", "dlm estimate --engine", "dlm shard --engine", "python -m loadtest"),
    "setting": ("federate.[aggregation]",),
    "python": (
        "dlm.asr.ctc.BeamSearchDecoderCTC.push_all",
        "dlm.asr.ctc.BeamSearchDecoderCTC.stream",
        "dlm.asr.ctc.PartialText",
        "dlm.asr.ctc.Stream",
        "dlm.client.AsyncMixture",
        "dlm.client.AsyncUtterance.later",
        "dlm.client.Mixture",
        "dlm.LocalModel.slots",
        "dlm.LocalModel.trees",
        "dlm.LocalModel.word_table",
    ),
}


def stability(kind: str, name: str) -> str:
    """The stability class of a public name, such as `dlm shard --engine` or `server.port`."""
    return "experimental" if name.startswith(EXPERIMENTAL.get(kind, ())) else STABILITY[kind]


class ReferenceEntry(NamedTuple):
    """A setting, an event, a metric or an error; `Topic.facts` names the values in its `facts`."""

    name: str
    facts: tuple[str, ...]
    meaning: str


class Topic(NamedTuple):
    """Entries by heading, a text about all of them, and the names of the facts of each entry."""

    title: str
    about: str
    kind: str
    facts: tuple[str, ...]
    tables: dict[str, list[ReferenceEntry]]


# Topic -> title, a text about all of its settings, and heading -> dataclass. The dataclasses are
# imported on use, since some need the packages of an extra.
SETTINGS: dict[str, tuple[str, str, dict[str, str]]] = {
    "server": (
        "Settings of a server",
        "A setting comes from an option of `dlm serve` (`--port`), else from an environment "
        "variable (`DLM_SERVER_PORT`), else from the table `[server]` of the file that `--config` "
        "names; otherwise it has its default. `dlm serve --help` lists the options.",
        {"[server]": "dlm.server.config:ServerConfig"},
    ),
    "gateway": (
        "Settings of a gateway",
        "A setting comes from an option of `dlm gateway` (`--http-port`), else from an environment "
        "variable (`DLM_GATEWAY_HTTP_PORT`), else from the table `[gateway]` of the file that "
        "`--config` names; otherwise it has its default. `dlm gateway --help` lists the options.",
        {"[gateway]": "dlm.gateway.config:GatewayConfig"},
    ),
    "client": (
        "Settings of a client",
        "These are arguments of `ClientConfig`. Credentials that are not given come from "
        "`cluster.toml`.",
        {
            "ClientConfig": "dlm.client.config:ClientConfig",
            "HeartbeatConfig": "dlm.client.config:HeartbeatConfig",
            "FailoverConfig": "dlm.client.config:FailoverConfig",
        },
    ),
    "cluster": (
        "Settings of cluster.toml",
        "Clients read this file to find the servers. `dlm cluster` writes it; write it yourself "
        "for servers on several machines. Running clients follow changes to its servers, model and "
        "roll-out.",
        {
            "cluster.toml": "dlm.client.cluster_file:ClusterSettings",
            "[tls]": "dlm.client.cluster_file:TlsSettings",
            "[rollout]": "dlm.client.cluster_file:Rollout",
            "[[server]]": "dlm.client.cluster_file:Endpoint",
        },
    ),
    "rollout": (
        "Settings of a roll-out",
        "A setting comes from an option of `dlm rollout` (`--share`), else from an environment "
        "variable (`DLM_ROLLOUT_SHARE`); otherwise it has its default. `dlm rollout --help` lists "
        "the options.",
        {"[rollout]": "dlm.cluster.rollout:Rules"},
    ),
    "federate": (
        "Settings of federated training",
        "These are the tables of the file that `dlm federate --config` reads; paths are relative "
        "to it. An environment variable (such as `DLM_FEDERATE_PRIVACY_GAP`) overrides a setting "
        "of the file. In a pipeline's file these tables are below `[federate]`, and no variable "
        "overrides them.",
        {
            "[run]": "dlm.federated.training.settings:RunSettings",
            "[data]": "dlm.federated.training.settings:DataSettings",
            "[model]": "dlm.federated.training.settings:ModelSettings",
            "[local]": "dlm.federated.training.local:LocalConfig",
            "[server]": "dlm.federated.training.rounds:OptimizerConfig",
            "[privacy]": "dlm.federated.training.settings:PrivacySettings",
            "[sampling]": "dlm.federated.training.settings:SamplingSettings",
            "[aggregation]": "dlm.federated.training.settings:AggregationSettings",
            "[pretrain]": "dlm.federated.training.settings:PretrainSettings",
        },
    ),
    "pipeline": (
        "Settings of a pipeline",
        "These are the tables of the file that `dlm pipeline` reads. No environment variable "
        "overrides them, and paths are relative to the file. The tables below `[federate]` are "
        "those of `dlm federate`. In `[unigrams]`, `max_participations` is 1 unless `poisson` is "
        "given, and with noise, `delta` is 1e-6.",
        {
            "[run]": "dlm.pipeline.tables:FolderSettings",
            "[inputs]": "dlm.pipeline.tables:InputSettings",
            "[unigrams]": "dlm.federated.counting.settings:CollectionSettings",
            "[pieces]": "dlm.federated.pieces.settings:PieceSettings",
            "[estimate]": "dlm.estimate.settings:EstimateOptions",
            "[distill]": "dlm.distill.settings:DistillSettings",
            "[prune]": "dlm.estimate.goal:PruneSettings",
            "[shard]": "dlm.index.settings:ShardSettings",
        },
    ),
}


def settings(name: str) -> Topic:
    """The settings of one part; ModuleNotFoundError if packages that they need are missing."""
    title, about, tables = SETTINGS[name]
    found = {}
    for heading, kind in _declared(**tables).items():
        declared: Iterable[Setting] = settings_of(kind)
        if name == "pipeline":
            declared = _in_a_pipeline(heading.strip("[]"), declared)
        found[heading] = [
            ReferenceEntry(
                one.name,
                (
                    one.expected or kind_name(one.kind),
                    _default(one),
                    stability("setting", f"{name}.{heading}.{one.name}"),
                ),
                f"{one.meaning} {one.why}".strip(),
            )
            for one in declared
        ]
    return Topic(title, about, "setting", ("values", "default", "stability"), found)


def _default(one: Setting) -> str:
    if one.required:
        return "required"
    if one.default is None or one.default == "":
        return ""
    if isinstance(one.default, bool):
        return str(one.default).lower()
    if one.default == ():
        return "[]"
    return number(one.default) if isinstance(one.default, (int, float)) else str(one.default)


def _in_a_pipeline(table: str, declared: Iterable[Setting]) -> list[Setting]:
    """Returns settings with the pipeline's defaults; leaves out settings that the pipeline sets."""
    from dlm.pipeline.settings import DEFAULTS, SET_HERE

    defaults = DEFAULTS.get(table, {})
    return [
        one._replace(default=defaults[one.name], required=False) if one.name in defaults else one
        for one in declared
        if one.name not in SET_HERE.get(table, {})
    ]


def _declared(**parts: str) -> dict[str, Any]:
    import pkgutil  # `dlm --help` does not need it

    return {part: pkgutil.resolve_name(where) for part, where in parts.items()}


def events() -> Topic:
    """The events that servers, gateways and clients log."""
    parts = _declared(
        Client="dlm.client.metrics:EVENTS",
        Server="dlm.server.events:EVENTS",
        Gateway="dlm.gateway.events:EVENTS",
    )
    return Topic(
        "Events",
        "Servers and gateways log JSON lines on standard error; a client logs to the loggers "
        "below `dlm.client`. An event's name comes first, and its known fields follow. No field "
        "has a word of a query.",
        "event",
        ("fields", "stability"),
        {
            part: [
                ReferenceEntry(name, (", ".join(e.fields), stability("event", name)), e.meaning)
                for name, e in found.items()
            ]
            for part, found in parts.items()
        },
    )


def metrics() -> Topic:
    """The metrics of servers, gateways and clients."""
    parts = _declared(
        Client="dlm.client.metrics:FAMILIES",
        Server="dlm.server.metrics:FAMILIES",
        Gateway="dlm.gateway.metrics:FAMILIES",
    )
    return Topic(
        "Metrics",
        "Servers and gateways answer `/metrics` on their metrics port; a client is registered with "
        "`prometheus_client.REGISTRY.register(client.metrics)`. Metrics with the label `le` are "
        "histograms. No label has a word of a query.",
        "metric",
        ("labels", "stability"),
        {
            part: [
                ReferenceEntry(name, (", ".join(f.labels), stability("metric", name)), f.meaning)
                for name, f in found.items()
            ]
            for part, found in parts.items()
        },
    )


def errors() -> Topic:
    """The errors that dlm raises on purpose."""
    import dlm.errors

    found = [
        ReferenceEntry(
            name, (one.__bases__[0].__name__, stability("error", name)), _paragraphs(one)
        )
        for name, one in vars(dlm.errors).items()
        if inspect.isclass(one) and one.__module__ == dlm.errors.__name__
    ]
    return Topic(
        "Errors",
        "`dlm.errors` has these errors. A command prints the message of an error on one line and "
        "exits with 1.",
        "error",
        ("a kind of", "stability"),
        {"dlm.errors": found},
    )


def _paragraphs(kind: type) -> str:
    """A docstring without its list of attributes, on one line."""
    parts = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    return " ".join(" ".join(part.split()) for part in parts if "  " not in part)


TOPICS: dict[str, Callable[[], Topic]] = {
    **{name: lambda name=name: settings(name) for name in SETTINGS},  # type: ignore[misc]
    "events": events,
    "metrics": metrics,
    "errors": errors,
}


def entries() -> Iterator[tuple[str, Topic, str, ReferenceEntry]]:
    """Yields (topic's name, topic, heading, entry) of each entry whose packages are installed."""
    for topic_name, make in TOPICS.items():
        with contextlib.suppress(ModuleNotFoundError):
            topic = make()
            for heading, found in topic.tables.items():
                yield from ((topic_name, topic, heading, entry) for entry in found)


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
    if name is None:
        _print_topics(as_json)
    elif name in TOPICS:
        _print_topic(TOPICS[name](), as_json)
    elif found := [one for one in entries() if fnmatchcase(name, one[-1].name)]:
        lines = []
        for _, topic, heading, entry in found:
            lines += _lines(topic, entry, place=f"{topic.title}, {heading}")
        print_answer({"entries": [_facts(*one) for one in found]}, lines, as_json=as_json)
    else:
        known = sorted({*TOPICS, *(entry.name for *_, entry in entries())})
        raise ConfigError(
            f"{name} is not a topic, setting, event, metric or error{nearest(name, known)}. "
            "dlm explain lists the topics"
        )


def _print_topics(as_json: bool) -> None:
    titles = {
        **{name: title for name, (title, _, _) in SETTINGS.items()},
        "events": "Events that servers, gateways and clients log",
        "metrics": "Metrics of servers, gateways and clients, for Prometheus",
        "errors": "What dlm raises",
    }
    lines = [f"{name:10}{title}" for name, title in titles.items()]
    print_answer({"topics": titles}, lines, as_json=as_json)


def _print_topic(topic: Topic, as_json: bool) -> None:
    tables = {
        heading: [_facts("", topic, "", entry) for entry in found]
        for heading, found in topic.tables.items()
    }
    lines = [topic.title, "", *_wrapped(topic.about, "")]
    for heading, found in topic.tables.items():
        lines.append(f"\n{heading}\n")
        for entry in found:
            lines += _lines(topic, entry)
    facts = {"title": topic.title, "about": topic.about, "tables": tables}
    print_answer(facts, lines, as_json=as_json)


def _facts(name: str, topic: Topic, heading: str, entry: ReferenceEntry) -> dict[str, Any]:
    place = {"topic": name, "table": heading} if name else {}
    facts = dict(zip(topic.facts, entry.facts, strict=True))
    return {**place, topic.kind: entry.name, **facts, "meaning": entry.meaning}


def _lines(topic: Topic, entry: ReferenceEntry, place: str = "") -> list[str]:
    facts = [f"{n}: {fact}" for n, fact in zip(topic.facts, entry.facts, strict=True) if fact]
    head = entry.name + (f"  ({place})" if place else "")
    return [head, *_wrapped("; ".join(facts), "    "), *_wrapped(entry.meaning, "    ")]


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, 100)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
