"""The reference, written from the code: a page of `reference/` begins by hand and goes on here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def cell(text: object) -> str:
    """Text in a cell of a table."""
    plain = " ".join(str(text).split())
    parts = re.split(r"(`[^`]*`)", plain.replace("|", "\\|"))
    return "".join(p if p.startswith("`") else re.sub(r"([<*_\[])", r"\\\1", p) for p in parts)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lines of a table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield f"| {' | '.join(map(cell, row))} |"
    yield ""


# -- commands ----------------------------------------------------------------------------------


def command_line() -> Iterator[str]:
    """Every command: what it does, its options, its examples."""
    import typer

    from dlm.cli.main import HEADINGS, app
    from loadtest.cli.main import app as loadtest

    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        if name in HEADINGS:
            yield from (f"## {HEADINGS[name]}", "")
        yield from one_command(f"dlm {name}", command)
    yield from ("## Load-test", "")
    for name, command in typer.main.get_command(loadtest).commands.items():  # type: ignore[attr-defined]
        yield from one_command(f"python -m loadtest {name}", command)


def one_command(name: str, command: Any) -> Iterator[str]:
    """A command, and those below it if it is a group."""
    yield from (f"### {name}", "")
    inner = getattr(command, "commands", {})
    context = command.make_context(name, [], resilient_parsing=True)
    text = command.help or ""
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield from (*markdown(text), "", classes("command", name), "", "```text", usage, "```", "")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    rows = [(f"`{p.make_metavar(context)}`", p.help or "") for p in arguments]
    rows += [option_row(p, context) for p in options if not getattr(p, "hidden", False)]
    if rows:
        yield from table(["argument or option", "meaning"], rows)
    if command.epilog:
        yield from ("```console", *(f"$ {e}" for e in examples(command.epilog)), "```", "")
    for child, below in inner.items():
        yield from one_command(f"{name} {child}", below)


def classes(kind: str, name: str) -> str:
    """The class of a public name, and what is experimental below it."""
    from dlm.cli.reference import EXPERIMENTAL, stability

    found = stability(kind, name)
    below = [
        f"`{one}`"
        for one in EXPERIMENTAL[kind]
        if one.startswith(f"{name}{'. '[kind == 'command']}")
    ]
    but = f", but experimental: {', '.join(below)}" if below and found != "experimental" else ""
    return f"*Stability*: {found}{but}."


def examples(text: str) -> Iterator[str]:
    """Each line of examples."""
    yield from (line.strip() if not line.startswith(" ") else line for line in text.splitlines())


def option_row(option: Any, context: Any) -> tuple[str, str]:
    """Its names, and its help with bounds and default."""
    names, text = option.get_help_record(context)
    return " ".join(f"`{part.strip()}`" for part in re.split(r"\s*[,/]\s*(?=-)", names)), text


def markdown(text: str) -> list[str]:
    """A help text: indented lines are code."""
    out, code = [], False
    for line in text.splitlines():
        indented = line.startswith("  ")
        if indented != code and line:
            out += ["```" + ("text" if indented else ""), ""] if not indented else ["", "```text"]
            code = indented
        out.append(line)
    return [*out, "```"] if code else out


# -- Python ------------------------------------------------------------------------------------


def python_api() -> Iterator[str]:
    """What users import, by its docstrings."""
    import dlm.client

    yield from (
        "## dlm, dlm.client",
        "",
        "Import these from `dlm.client`; the clients, too, from `dlm`.",
        "",
        classes("python", "dlm.client"),
        "",
    )
    yield from ("```{eval-rst}", ".. currentmodule:: dlm.client", "")
    for name in dlm.client.__all__:
        yield from autodoc("class", f"dlm.client.{name}")
    yield from autodoc("class", "dlm.LocalModel")
    yield from ("```", "")
    for module in MODULES:
        yield from (f"## {module}", "", classes("python", module), "", "```{eval-rst}")
        yield from (
            f".. automodule:: {module}",
            "   :members:",
            "   :undoc-members:",
            "   :imported-members:" if module == "dlm.asr.kenlm" else "",
            "",
            "```",
            "",
        )


MODULES = [
    "dlm.asr.kenlm",
    "dlm.asr.open",
    "dlm.asr.ctc",
    "dlm.asr.decoders.flashlight",
    "dlm.asr.decoders.advance",
    "dlm.asr.speech.wer",
]


def autodoc(kind: str, name: str) -> Iterator[str]:
    yield from (f".. auto{kind}:: {name}", "   :members:", "   :inherited-members: tuple", "")


# -- settings, events, metrics, errors ---------------------------------------------------------


def looked_up(*names: str) -> Iterator[str]:
    """Topics of `dlm explain`; each entry is what the search calls an object."""
    from dlm.cli.reference import TOPICS

    for name in names:
        topic = TOPICS[name]()
        if len(names) > 1:
            yield from (f"## {topic.title}", "")
        yield from (topic.about, "")
        for heading, found in topic.tables.items():
            yield from (f"{'###' if len(names) > 1 else '##'} {heading}", "")
            # `server.port`, `ClientConfig.window`, `federate.run.rounds`, `client.mode.changed`
            table = heading.strip("[]").removesuffix(".toml")
            parts = [name] * (table != name and name != "client") + [table]
            before = ".".join([*parts, ""]) if topic.kind == "setting" else ""
            for one in found:
                facts = zip(topic.facts, one.facts, strict=True)
                known = "; ".join(f"*{fact}*: {value}" for fact, value in facts if value)
                yield from (f"````{{{topic.kind}}} {before}{one.name}", cell(one.meaning), "")
                yield from (known, "````", "")


def settings() -> Iterator[str]:
    """Those of every part."""
    from dlm.cli.reference import SETTINGS

    yield from looked_up(*SETTINGS)


def errors() -> Iterator[str]:
    """The tree of errors, and each with its docstring."""
    yield from ("```{eval-rst}", ".. automodule:: dlm.errors", "   :members:")
    yield from ("   :show-inheritance:", "```", "")


# -- alerts, promises --------------------------------------------------------------------------


def alerts() -> Iterator[str]:
    """Every alert of the rules for Prometheus."""
    import yaml

    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text(encoding="utf-8"))
    for group in rules["groups"]:
        found = [rule for rule in group["rules"] if "alert" in rule]
        if not found:
            continue
        yield from (f"## {group['name'].removeprefix('dlm-').capitalize()}", "")
        for rule in found:
            note = {
                name: re.sub(r"{{ \$(?:labels\.)?(\w+).*? }}", r"*\1*", text)
                for name, text in rule["annotations"].items()
            }
            anchor = note["runbook_url"].partition("#")[2]
            yield from (
                f"### {rule['alert']}",
                "",
                f"{note['summary']}. {note['description']} "
                f"[What to do](/deploy/runbook.md#{anchor}).",
                "",
                f"Severity {rule['labels']['severity']}, after {rule.get('for', 'no time')}:",
                "",
                "```text",
                " ".join(rule["expr"].split()),
                "```",
                "",
            )


def promised() -> Iterator[str]:
    """What each page promises, and the tests that check it."""
    from promises import marked, promises

    tests: dict[str, list[str]] = {}
    for one in marked():
        text = f"`{one.file}::{one.test}`" + " *slow*" * one.slow
        tests.setdefault(one.promise, []).append(text)
    for page, found in promises().items():
        title = "dlm" if page == "README.md" else page.removesuffix("/README.md")
        yield from (f"## [{title}](/{page})", "")
        for name, sentence in found.items():
            yield from (f"{sentence}", "", *(f"- {test}" for test in tests[name]), "")


WRITERS: dict[str, Callable[[], Iterator[str]]] = {
    "index": lambda: iter([(HERE / "contents.md").read_text(encoding="utf-8")]),
    "reference/commands": command_line,
    "reference/settings": settings,
    "reference/python": python_api,
    "reference/errors": errors,
    "reference/events": partial(looked_up, "events"),
    "reference/metrics": partial(looked_up, "metrics"),
    "reference/alerts": alerts,
    "reference/promises": promised,
}


def write(app: Any, page: str, source: list[str]) -> None:
    """Adds what is generated to a page's beginning."""
    if page in WRITERS:
        source[0] = "\n".join([source[0], "", *WRITERS[page]()])


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    for kind in ("setting", "event", "metric"):
        app.add_object_type(kind, kind)
    app.connect("source-read", write)
    return {"parallel_read_safe": True}
