"""Checks a command's values, above all its input and output files, before hours of work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dlm.config import Setting
from dlm.errors import ConfigError
from dlm.stores.remote import RemotePath, located

T = TypeVar("T")

# Folders that this process created for a command's output.
_made: list[Path] = []


def check_reads(
    name: str, *paths: Path | str | None, folders: bool = False, stores: bool = False
) -> None:
    """Raises `ConfigError` unless each path can be read or, with `stores` (for commands that open
    stores), is a place in a store. `-` and None are skipped."""
    for path in paths:
        if path is None or str(path) == "-":
            continue
        place = located(path)
        if isinstance(place, RemotePath):
            if stores:
                continue
            raise ConfigError(
                f"{name}: {place} is in a store; expected a local path. Fetch it with dlm fetch"
            )
        if not place.exists():
            raise ConfigError(f"{name}: no such file or folder: {place}; check the name")
        if place.is_dir() and not folders:
            raise ConfigError(f"{name}: {place} is a folder; expected a file")
        if not os.access(place, os.R_OK):
            raise ConfigError(f"{name}: cannot read {place}; check its permissions")


# Suffixes of compressions in which dlm cannot write ARPA files.
NOT_WRITTEN = (".bz2", ".lz4", ".lzma", ".zip", ".7z", ".Z")


def check_writes(
    name: str,
    path: Path | str | None,
    *,
    folder: bool = False,
    stdout: bool = False,
    arpa: bool = False,
    inputs: Iterable[Path | str | None] = (),
) -> None:
    """Raises `ConfigError` unless a file can be written at `path`; None is skipped. Missing folders
    are created, and removed if the command ends without using them.

    Args
        folder  whether `path` will be a folder, which the command creates with its parents
        stdout  whether `-` means standard output; otherwise `-` is refused
        arpa    whether `path` will be an ARPA file, whose suffix selects the compression
        inputs  files that the command reads, and so must not replace
    """
    if path is None or (stdout and str(path) == "-") or isinstance(located(path), RemotePath):
        return
    if str(path) == "-":
        raise ConfigError(
            f"{name} is -, but this command cannot write to standard output; name a "
            f"{'folder' if folder else 'file'}"
        )
    place = Path(path)
    if arpa and place.suffix in NOT_WRITTEN:
        raise ConfigError(
            f"{name}: cannot write {place}: {place.suffix} is not supported; expected .gz, .zst, "
            ".xz or plain text"
        )
    for one in inputs:
        if one is not None and Path(one).exists() and place.exists() and place.samefile(one):
            raise ConfigError(f"{name}: {place} is an input of this command; name another file")
    if place.is_dir() and not folder:
        raise ConfigError(f"{name}: {place} is a folder; expected a file, so name one in it")
    check_folder(name, place.parent, make=not folder)


def check_folder(name: str, folder: Path | None, *, make: bool = True) -> None:
    """Raises `ConfigError` unless files can be created in `folder`; `make` creates it now."""
    if folder is None:
        return
    missing: list[Path] = []
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        missing.append(there)
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{name}: {there} is not a folder; name another path")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}: cannot write to {there}; check its permissions")
    if make:
        for place in reversed(missing):
            place.mkdir(exist_ok=True)
            _made.append(place)


def check_bounds(name: str, *values: float | str | None, bounds: Setting) -> None:
    """Raises `ConfigError` unless each value is within the bounds; None is skipped."""
    for value in values:
        if value is not None and not bounds.allows(value):
            shown = value if isinstance(value, str) else f"{value:g}"
            raise ConfigError(f"{name} is {shown}; expected {bounds.expected}")


def parsed(name: str, text: str, parse: Callable[[str], T], expected: str) -> T:
    """The result of `parse` for an option's text; `ConfigError` if the text is not as expected."""
    try:
        return parse(text)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{name} is {text!r}; expected {expected}") from None


def numbers_of(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def integers_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


# Checks to put into parameters' annotations, one per parameter; they run before the command.
READ = partial(check_reads)
READ_ANY = partial(check_reads, folders=True)
READ_PLACE = partial(check_reads, folders=True, stores=True)
WRITE = partial(check_writes)
WRITE_FOLDER = partial(check_writes, folder=True)
WRITE_ARPA = partial(check_writes, arpa=True)
SCRATCH = partial(check_folder)
SCRATCH_LATER = partial(check_folder, make=False)  # the command makes the folder


def within(**bounds: Any) -> partial[None]:
    """Makes a check of bounds, given as for `Setting`, to annotate a number or a choice."""
    return partial(check_bounds, bounds=Setting(**bounds))


def check_all(given: Iterable[tuple[str, Any, partial[None]]]) -> None:
    """Runs each option's check on its value or values; an output must not be an input."""
    found = [
        (name, value if isinstance(value, list) else [value], check) for name, value, check in given
    ]
    inputs = [path for _, values, check in found if check.func is check_reads for path in values]
    for name, values, check in found:
        known = {"inputs": inputs} if check.func is check_writes else {}
        check(name, *values, **known)


def remove_empty_folders() -> None:
    """Removes the folders that `check_folder` created and the command left empty."""
    while _made:
        with contextlib.suppress(OSError):  # the folder is not empty
            _made.pop().rmdir()
