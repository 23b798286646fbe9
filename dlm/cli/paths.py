"""What a command reads and writes, looked for before it works for hours."""

from __future__ import annotations

import os
from pathlib import Path

from dlm.errors import ConfigError


def check_reads(
    name: str, *paths: Path | str | None, folders: bool = False, what: str = "file"
) -> None:
    """Raises `ConfigError` unless each path can be read; `-` and None stand for no file.

    Args
        name     of the option or argument
        folders  whether a folder will do, too
        what     is looked for: "file" or "folder"
    """
    for path in paths:
        if path is None or str(path) == "-":
            continue
        place = Path(path)
        if not place.exists():
            kind = "file or folder" if folders and what == "file" else what
            raise ConfigError(f"{name}: no such {kind}: {place}")
        if place.is_dir() and not folders:
            raise ConfigError(f"{name}: {place} is a folder; a file is expected")
        if not os.access(place, os.R_OK):
            raise ConfigError(f"{name}: {place} may not be read by this user")


# Compressed files of kinds that are read here, or elsewhere, and that no ARPA file is written as.
NOT_WRITTEN = (".bz2", ".lz4", ".lzma", ".zip", ".7z", ".Z")


def check_writes(
    name: str,
    path: Path | str | None,
    *,
    folder: bool = False,
    stdout: bool = False,
    arpa: bool = False,
) -> None:
    """Raises `ConfigError` unless a file can be put at `path`; None stands for no file.

    Args
        folder  whether it will be a folder, whose parents are made
        stdout  whether `-` stands for standard output; else it is refused, since nobody wants a
                file of that name
        arpa    whether it will be an ARPA file, whose name says how it is compressed
    """
    if path is None or (stdout and str(path) == "-"):
        return
    if str(path) == "-":
        raise ConfigError(
            f"{name}: - was given, and this command does not write there to standard output; name "
            f"a {'folder' if folder else 'file'}"
        )
    place = Path(path)
    if arpa and place.suffix in NOT_WRITTEN:
        raise ConfigError(
            f"{name}: {place}: .gz, .zst and .xz can be written, and plain text, not {place.suffix}"
        )
    if place.is_dir() and not folder:
        raise ConfigError(f"{name}: {place} is a folder; name a file in it")
    check_folder(name, place.absolute().parent, made=folder)


def check_folder(name: str, folder: Path | None, *, made: bool = False) -> None:
    """Raises `ConfigError` unless files can be made in `folder`; None stands for no folder.

    Args
        made  the command makes the folder, and its parents, where there is none
    """
    if folder is None:
        return
    while made and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        found = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{name}: the folder {folder} {found}; make it, or give another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}: this user may not write to {folder}")
