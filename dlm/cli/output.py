"""The output of commands: progress on standard error, then the answer, for people or as JSON."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from dlm.progress import compiling_notice
from dlm.units import finite

SILENT_S = 1.0  # seconds after which a command on a terminal reports that it is working

_waiting: list[threading.Timer] = []


def begin_waiting(silent_s: float = SILENT_S) -> None:
    """Reports after `silent_s` that the command is working, unless it reports a stage first.
    `stop_waiting` cancels the report. Only a terminal gets it, since nobody watches a pipe."""
    if not sys.stderr.isatty():
        return
    timer = threading.Timer(silent_s, lambda: print("working ...", file=sys.stderr, flush=True))
    timer.daemon = True
    _waiting.append(timer)
    timer.start()


def stop_waiting() -> None:
    """Cancels `begin_waiting`, because the command prints something else from now on."""
    while _waiting:
        _waiting.pop().cancel()


def stage_printer(*, quiet: bool = False, timed: bool = True) -> Callable[[str], None]:
    """Returns a printer of progress lines, with the seconds since this call if `timed`; silent if
    `quiet`. From now on, the command also reports when it waits for kernels to compile."""
    began = time.monotonic()

    def tell(line: str) -> None:
        stop_waiting()
        if not quiet:
            stamp = f"[{time.monotonic() - began:6.1f} s] " if timed else ""
            # Written in one call: otherwise threads that report at the same time would mix lines.
            sys.stderr.write(f"{stamp}{line}\n")

    compiling_notice.use(tell)
    return tell


def compile_kernels(kernels: Sequence[Any]) -> int:
    """Compiles the kernels that the cache lacks, and returns how many; see `jit.compile_ahead`.
    Progress goes where the command reports its stages, or else to standard error."""
    from dlm.jit import compile_ahead

    if compiling_notice.is_logged:
        compiling_notice.use(lambda line: print(line, file=sys.stderr, flush=True))
    return compile_ahead(kernels)


# Made once: json.dumps would make a new encoder for each line of `dlm score --json`.
_LINE = json.JSONEncoder(allow_nan=False)
_INDENTED = json.JSONEncoder(allow_nan=False, indent=1)


def _encoded(facts: Mapping[str, Any], encoder: json.JSONEncoder) -> str:
    """The facts as JSON in ASCII; infinity and nan, which JSON lacks, become null."""
    try:
        return encoder.encode(facts)
    except ValueError:
        return encoder.encode(finite(facts))


def as_json_line(facts: Mapping[str, Any]) -> str:
    return _encoded(facts, _LINE)


def print_json(facts: Mapping[str, Any], *, to: TextIO | None = None) -> None:
    """Prints one object, for commands that answer once."""
    print(_encoded(facts, _INDENTED), file=sys.stdout if to is None else to)


def print_answer(
    facts: Mapping[str, Any],
    lines: Iterable[str],
    *,
    as_json: bool,
    quiet: bool = False,
    to: TextIO | None = None,
) -> None:
    if as_json:
        print_json(facts, to=to)
    elif not quiet:
        for line in lines:
            print(line, file=to)


def print_json_line(facts: Mapping[str, Any]) -> None:
    print(as_json_line(facts), flush=True)
