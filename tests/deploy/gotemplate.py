"""A test tool: renders the Go templates of deploy/helm, and knows just what those use.

Anything else (a function, a keyword, a value that is not in values.yaml) is a `TemplateError`, so
that a template can not grow past what is tested. It is no Helm: where they might differ, Helm is
right and this is to be mended.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

ACTION = re.compile(r"(\s*\{\{-|\{\{)\s*(.*?)\s*(-\}\}\s*|\}\})", re.S)
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|:=|[()|,]|[^\s()|,]+')


class TemplateError(Exception):
    """A template asks for what is not there, or calls `fail`."""


def parse(text: str) -> tuple[Any, ...]:
    """The tree of a template: text, ("do", words) and blocks (keyword, words, body, otherwise)."""
    parts: list[str | list[str]] = []
    at = 0
    for match in ACTION.finditer(text):
        parts.append(text[at : match.start()])
        words = TOKEN.findall(match[2])
        parts.append([] if match[2].startswith("/*") else words)
        at = match.end()
    parts.append(text[at:])
    stack: list[tuple[list[str], list[Any], list[Any]]] = [([], [], [])]
    body = stack[0][1]
    for part in parts:
        if isinstance(part, str):
            body.append(part)
        elif part and part[0] in ("if", "with", "range", "define"):
            stack.append((part, [], []))
            body = stack[-1][1]
        elif part == ["else"]:
            body = stack[-1][2]
        elif part == ["end"]:
            if len(stack) == 1:
                raise TemplateError("an end too many")
            words, inside, otherwise = stack.pop()
            # Text, if only an empty one, follows an else: so a list with nothing had none.
            body = stack[-1][2] if stack[-1][2] else stack[-1][1]
            body.append((words[0], words[1:], inside, otherwise))
        elif part:
            body.append(("do", part))
    if len(stack) > 1:
        raise TemplateError(f"{' '.join(stack[-1][0])} has no end")
    return tuple(stack[0][1])


class Chart:
    """The templates of a chart.

    used  paths below .Values that any template named while it was rendered
    """

    def __init__(self, folder: Path) -> None:
        self.facts = yaml.safe_load((folder / "Chart.yaml").read_text())
        self.values = yaml.safe_load((folder / "values.yaml").read_text())
        self.used: set[tuple[str, ...]] = set()
        self._defined: dict[str, Any] = {}
        self._files: dict[str, Any] = {}
        for file in sorted((folder / "templates").iterdir()):
            tree = parse(file.read_text())
            for node in tree:
                if isinstance(node, tuple) and node[0] == "define":
                    self._defined[json.loads(node[1][0])] = node[2]
            self._files[file.name] = tree

    def render(self, given: dict[str, Any] | None = None) -> dict[str, str]:
        """file -> text, with `given` laid over values.yaml."""
        root = {
            "Values": _merged(self.values, given or {}),
            "Release": {"Name": "lm", "Namespace": "speech", "Service": "Helm"},
            "Chart": {"AppVersion": self.facts["appVersion"]},
        }
        return {
            name: "".join(self._run(tree, root, {"$": root}))
            for name, tree in self._files.items()
            if not name.startswith("_")
        }

    def objects(self, given: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Every object that the templates make."""
        texts = [t for name, t in self.render(given).items() if name.endswith(".yaml")]
        return [o for text in texts for o in yaml.safe_load_all(text) if o is not None]

    def _run(self, body: Any, dot: Any, names: dict[str, Any]) -> Iterator[str]:
        for node in body:
            if isinstance(node, str):
                yield node
            elif node[0] == "do":
                yield _text(self._pipeline(node[1], dot, names))
            elif node[0] in ("if", "with"):
                value = self._pipeline(node[1], dot, names)
                inner = value if node[0] == "with" and value else dot
                yield from self._run(node[2] if value else node[3], inner, names)
            elif node[0] == "range":
                variables, _, rest = _split(node[1], ":=")
                variables = [v for v in variables if v != ","]
                value = self._pipeline(rest, dot, names)
                pairs = sorted(value.items()) if isinstance(value, dict) else enumerate(value)
                for key, item in pairs:
                    bound = dict(zip(variables[::-1], (item, key), strict=False))
                    yield from self._run(node[2], item, names | bound)

    def _pipeline(self, words: list[str], dot: Any, names: dict[str, Any]) -> Any:
        first, bar, rest = _split(words, "|")
        value = self._call(first, dot, names)
        while bar:
            first, bar, rest = _split(rest, "|")
            value = self._call(first, dot, names, value)
        return value

    def _call(self, words: list[str], dot: Any, names: dict[str, Any], *piped: Any) -> Any:
        arguments: list[Any] = []
        at = 0
        while at < len(words):
            if words[at] == "(":
                depth, end = 1, at
                while depth:
                    end += 1
                    depth += {"(": 1, ")": -1}.get(words[end], 0)
                arguments.append(self._pipeline(words[at + 1 : end], dot, names))
                at = end + 1
            else:
                arguments.append(self._value(words[at], dot, names))
                at += 1
        if not callable(arguments[0]):
            if len(arguments) + len(piped) > 1:
                raise TemplateError(f"{words[0]} is called, and is no function")
            return arguments[0]
        return arguments[0](*arguments[1:], *piped)

    def _value(self, word: str, dot: Any, names: dict[str, Any]) -> Any:
        if word[0] == '"' or word.isdigit():
            return json.loads(word)
        if word == "include":
            return lambda name, inner: "".join(self._run(self._defined[name], inner, {"$": inner}))
        if word in FUNCTIONS:
            return FUNCTIONS[word]
        start, *path = word.split(".")
        if start and start not in names:
            raise TemplateError(f"{word}: this renderer does not know {start}")
        value = names[start] if start else dot
        path = [name for name in path if name]
        if path[:1] == ["Values"]:
            self.used.add(tuple(path[1:]))
        for name in path:
            if not isinstance(value, dict) or name not in value:
                raise TemplateError(f"{word}: there is no {name}")
            value = value[name]
        return value


def _fail(message: str) -> str:
    raise TemplateError(message)


def _text(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=False).rstrip("\n").removesuffix("\n...")


def _indented(width: int, text: str) -> str:
    return "".join(f"\n{' ' * width}{line}" if line else "\n" for line in text.split("\n"))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "and": lambda *values: next((v for v in values if not v), values[-1]),
    "or": lambda *values: next((v for v in values if v), values[-1]),
    "not": lambda value: not value,
    "default": lambda fallback, value: value or fallback,
    "div": lambda a, b: a // b,
    "fail": _fail,
    "int": int,
    "nindent": _indented,
    "printf": lambda form, *values: form % values,
    "quote": lambda value: json.dumps(_text(value)),
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "toJson": lambda value: json.dumps(value, separators=(",", ":"), sort_keys=True),
    "toYaml": _yaml,
    "trunc": lambda width, text: text[:width],
    "until": lambda count: list(range(count)),
}


def _split(words: list[str], at: str) -> tuple[list[str], bool, list[str]]:
    """Words before and after the first `at` outside of brackets, and whether there is one."""
    depth = 0
    for place, word in enumerate(words):
        depth += {"(": 1, ")": -1}.get(word, 0)
        if word == at and not depth:
            return words[:place], True, words[place + 1 :]
    return ([], False, words) if at == ":=" else (words, False, [])


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """As Helm lays values over values: objects by their fields; null takes a field away."""
    out = dict(under)
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = _merged(out[name], value) if both else value
        if value is None:
            del out[name]
    return out
