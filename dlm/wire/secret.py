"""Tokens: how they look, how they travel, how a server keeps them; and files that hold secrets.

A token is 256 random bits as text. It travels in the metadata of each call, as RFC 6750 has it
(``authorization: Bearer TOKEN``); a server keeps its SHA-256 alone, which is enough for what
nobody can guess.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from pathlib import Path

from dlm.errors import ConfigError

AUTHORIZATION = "authorization"  # DO NOT CHANGE: metadata of a call, on the wire
SCHEME = "Bearer "  # DO NOT CHANGE: before the token, on the wire

# RFC 6750's alphabet. 16 characters are the least that is not guessed over a network.
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,512}={0,2}")
MAX_SECRET_BYTES = 1 << 20

Signature = tuple[tuple[int, ...] | None, ...]


def new_token() -> str:
    """A fresh token of 256 random bits, 43 characters."""
    return secrets.token_urlsafe(32)


def digest(token: bytes) -> bytes:
    """What a server keeps of a token, 32 bytes."""
    return hashlib.sha256(token).digest()


def signature(*paths: Path) -> Signature:
    """What changes when one of the files does: by another write, or another file in its place."""
    found: list[tuple[int, ...] | None] = []
    for path in paths:
        try:
            s = path.stat()
        except OSError:
            found.append(None)
        else:
            found.append((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_mode))
    return tuple(found)


def require_file(path: Path) -> None:
    """Nothing where a regular file is there, or nothing: opening will say so.

    Looked at before it is opened, since a named pipe that nobody writes to is opened for ever.

    Raises
        ConfigError  a folder, a pipe, a device
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise ConfigError(
            f"{path} cannot be read: it is no regular file, and a file is expected there"
        )


def read_secret(path: Path) -> bytes:
    """The content of a file that nobody else may read.

    Its owner alone; or, where it belongs to root, its group too, which is how orchestrators and
    service managers hand secrets to a process. Root itself reads such a file to change it.

    Raises
        ConfigError  it is no regular file, cannot be read, is larger than 1 MiB, or others may read
                     it
    """
    require_file(path)
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            of_root = found.st_uid == 0
            if stat.S_ISREG(found.st_mode) and found.st_mode & (0o037 if of_root else 0o077):
                raise ConfigError(
                    f"{path} holds a secret and has mode {stat.S_IMODE(found.st_mode):04o}, so "
                    "that others may read or change it; "
                    + (
                        f"root may, and its group may read it: chmod 640 {path}"
                        if of_root
                        else f"its owner alone may: chmod 600 {path}"
                    )
                )
            content = file.read(MAX_SECRET_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    if len(content) > MAX_SECRET_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_SECRET_BYTES} bytes: no file of secrets")
    return content


def lines_of(content: bytes, path: Path) -> list[tuple[int, str]]:
    """(number, text) of the lines of a file of secrets, without comments and empty ones.

    Raises
        ConfigError  bytes that are no ASCII, or no end to the last line, which is how a file looks
                     that is half-written. No message repeats what the file holds.
    """
    if content and not content.endswith(b"\n"):
        raise ConfigError(
            f"{path}: its last line has no end, as if the file were half-written; end it with a "
            "newline, and replace such files by renaming a new one over them"
        )
    out = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.lstrip().startswith(b"#") or not line.strip():
            continue
        try:
            out.append((number, line.decode("ascii").strip()))
        except UnicodeDecodeError:
            raise ConfigError(f"{path}, line {number}: bytes that are no ASCII text") from None
    return out


def parse_token_file(content: bytes, path: Path) -> str:
    """The one token in a client's file.

    Raises  ConfigError
    """
    lines = lines_of(content, path)
    if len(lines) != 1 or not TOKEN.fullmatch(lines[0][1]):
        raise ConfigError(
            f"{path}: one line with one token is expected (16 to 512 characters of A-Z a-z 0-9 "
            ". _ ~ + / -), such as `dlm token NAME` prints for the client"
        )
    return lines[0][1]
