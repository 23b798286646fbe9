"""Tokens: their form, how they are sent and stored; and files that contain secrets.

A token is 256 random bits as text, sent in the metadata of each call as RFC 6750 says
(``authorization: Bearer TOKEN``). A server stores only its SHA-256.
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
SCHEME = "Bearer "  # DO NOT CHANGE: prefix of a token, on the wire

# RFC 6750's alphabet. 16 characters are the fewest that cannot be guessed over a network.
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,512}={0,2}")
MAX_SECRET_BYTES = 1 << 20

Signature = tuple[tuple[int, ...] | None, ...]


def new_token() -> str:
    return secrets.token_urlsafe(32)


def digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def signature(*paths: Path) -> Signature:
    """A value that changes when one of the files is written to or replaced."""
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
    """Raises `ConfigError` for a folder, a pipe or a device, but not for a missing file.

    Call this before a file is opened: opening a named pipe without a writer waits forever.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} cannot be read: it is not a regular file; give a regular file")


def read_secret(path: Path) -> bytes:
    """Returns the content of a file, after checking that other users cannot read it.

    Only the file's owner may read it; or, if root owns it, also its group, since orchestrators and
    service managers pass secrets to a process in this way. Root itself can read any file.

    Raises  ConfigError  the file is not regular, cannot be read, is larger than 1 MiB, or can be
            read by other users
    """
    require_file(path)
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            of_root = found.st_uid == 0
            if stat.S_ISREG(found.st_mode) and found.st_mode & (0o037 if of_root else 0o077):
                raise ConfigError(
                    f"{path} holds a secret and has mode {stat.S_IMODE(found.st_mode):04o}, so "
                    "other users can read or change it; "
                    + (
                        f"restrict it to root, with read access for its group: chmod 640 {path}"
                        if of_root
                        else f"restrict it to its owner: chmod 600 {path}"
                    )
                )
            content = file.read(MAX_SECRET_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    if len(content) > MAX_SECRET_BYTES:
        raise ConfigError(
            f"{path} is larger than {MAX_SECRET_BYTES} bytes, the limit for a secret file; give "
            "another file"
        )
    return content


def lines_of(content: bytes, path: Path) -> list[tuple[int, str]]:
    """Returns (number, text) per line of a secret file, without comments and empty lines.

    Raises  ConfigError  bytes are not ASCII, or the last line has no end, as in a half-written
                         file. No message repeats the file's content
    """
    if content and not content.endswith(b"\n"):
        raise ConfigError(
            f"{path}: its last line has no newline, so the file may be half-written; end it with a "
            "newline, and replace the file only by renaming a new one over it"
        )
    out = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.lstrip().startswith(b"#") or not line.strip():
            continue
        try:
            out.append((number, line.decode("ascii").strip()))
        except UnicodeDecodeError:
            raise ConfigError(f"{path}, line {number}: the line is not ASCII text") from None
    return out


def parse_token_file(content: bytes, path: Path) -> str:
    lines = lines_of(content, path)
    if len(lines) != 1 or not TOKEN.fullmatch(lines[0][1]):
        raise ConfigError(
            f"{path}: expected one line with one token (16 to 512 characters of A-Z a-z 0-9 "
            ". _ ~ + / -), as `dlm token NAME` prints it for the client"
        )
    return lines[0][1]
