"""Checks a command's input and output files before hours of work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from dlm.errors import ConfigError

# Folders that this process created for a command's output.
_made: list[Path] = []


def check_reads(
    name: str, *paths: Path | str | None, folders: bool = False, what: str = "file"
) -> None:
    """Raises `ConfigError` unless each path can be read; `-` and None are skipped.

    Args
        name     of the option or argument
        folders  whether a folder is accepted too
        what     is expected: "file" or "folder"
    """
    for path in paths:
        if path is None or str(path) == "-":
            continue
        place = Path(path)
        if not place.exists():
            kind = "file or folder" if folders and what == "file" else what
            raise ConfigError(f"{name}: no such {kind}: {place}; check the name")
        if place.is_dir() and not folders:
            raise ConfigError(f"{name}: {place} is a folder; expected a file")
        if not os.access(place, os.R_OK):
            raise ConfigError(f"{name}: this user may not read {place}; check its permissions")


# Compression that is not available for writing ARPA files.
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
    """Raises `ConfigError` unless a file can be written at `path`; None is skipped.

    Missing folders are created, and removed if the command ends without using them.

    Args
        folder  whether it will be a folder, which the command creates with its parents
        stdout  whether `-` means standard output; otherwise it is refused, since nobody wants a
                file of that name
        arpa    whether it will be an ARPA file, whose suffix selects the compression
        inputs  files that the command reads; it never replaces one of them
    """
    if path is None or (stdout and str(path) == "-"):
        return
    if str(path) == "-":
        raise ConfigError(
            f"{name} is -, but this command cannot write that to standard output; name a "
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
    """Raises `ConfigError` unless files can be created in `folder`; None is skipped.

    Args
        make  whether to create the folder now, with its parents; False leaves it to the command
    """
    if folder is None:
        return
    missing: list[Path] = []
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        missing.append(there)
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{name}: {there} is not a folder; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}: this user may not write to {there}; check its permissions")
    if make:
        for place in reversed(missing):
            place.mkdir(exist_ok=True)
            _made.append(place)


def remove_empty_folders() -> None:
    """Removes the folders that `check_folder` created and the command left empty."""
    while _made:
        with contextlib.suppress(OSError):  # it is used
            _made.pop().rmdir()
