"""`dlm token`: creates a token for the servers and for the client."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.checks import WRITE
from dlm.cli.options import Json
from dlm.cli.output import print_answer


def token(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the client, shown in logs: A-Z a-z 0-9 . _ -"),
    ],
    tokens: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The servers' file; the hashed token is added to it."),
        WRITE,
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The client's file to create; it must not exist yet."),
        WRITE,
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="When the token expires: an ISO 8601 date or time, in UTC unless it names a time "
            "zone.  [default: never]",
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            metavar="ID,ID",
            help="Models that the client may use: the first 6 to 32 digits of ids of models or of "
            "shard sets (dlm info).  [default: all]",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a client's token, and its hash for the servers.

    Without --tokens, the line for the servers' file is printed; without --token-file, the secret.

    Examples:
        dlm token decoder-1 --tokens tokens --token-file decoder-1.token
        dlm token decoder-2 --expires 2100-01-31 --models 0123abcd,4567cdef
    """
    from dlm.errors import ConfigError
    from dlm.files import editing
    from dlm.server.tokens import (
        EXPIRES,
        MAX_TOKENS,
        MODELS,
        is_name,
        parse_expiry,
        parse_models,
        read_tokens,
    )
    from dlm.wire.secret import digest, new_token, read_secret

    if not is_name(name):
        raise ConfigError(
            f"NAME is {name}; expected 1 to 64 characters of A-Z a-z 0-9 . _ -, starting with a "
            "letter or a digit"
        )
    options = []
    if expires is not None:
        end = expires.replace(" ", "T")
        if parse_expiry(end) <= time.time():
            raise ConfigError(f"--expires is {expires}, which has passed; expected a later time")
        options.append(f"{EXPIRES}{end}")
    if models is not None:
        options.append(f"{MODELS}{','.join(parse_models(models))}")
    if token_file is not None and token_file.exists():
        raise ConfigError(
            f"--token-file: {token_file} already exists; remove it first, or name another file"
        )
    new = new_token()
    line = " ".join([f"{name}:{digest(new.encode()).hex()}", *options]) + "\n"
    with nullcontext() if tokens is None else editing(tokens.resolve()):
        present = b""
        if tokens is not None and tokens.exists():
            # Do not extend a file that servers reject, or would reject once it is longer.
            if len(read_tokens(tokens).names) == MAX_TOKENS:
                raise ConfigError(
                    f"{tokens} has {MAX_TOKENS} tokens, the most that a server accepts; remove the "
                    "lines of clients that no longer exist"
                )
            present = read_secret(tokens)
        # The client's file comes first, so that a failure to write it leaves no unusable token in
        # the servers' file.
        if token_file is not None:
            _write(token_file, f"{new}\n".encode())
        if tokens is not None:
            try:
                _write(tokens, present + line.encode())
            except BaseException:
                if token_file is not None:  # no server will accept this token
                    token_file.unlink()
                raise
    facts = {
        "name": name,
        "tokens": None if tokens is None else str(tokens),
        "token_file": None if token_file is None else str(token_file),
        "line": line.rstrip() if tokens is None else None,
        "token": new if token_file is None else None,
    }
    lines = []
    if token_file is not None:
        lines.append(f"wrote {token_file}, for the client (token_file)")
    if tokens is not None:
        lines.append(f"added {name} to {tokens}, for the servers (--tokens)")
    else:
        lines.append(f"# line for the servers' file (--tokens), mode 600:\n{line.rstrip()}")
    if token_file is None:
        lines.append(f"# content of the client's file (token_file), mode 600:\n{new}")
    print_answer(facts, lines, as_json=as_json)


def _write(path: Path, content: bytes) -> None:
    """Writes a file of mode 600, all of it or nothing; an existing file keeps owner and mode."""
    from dlm.files import write_whole

    try:
        # A symbolic link stays a link.
        write_whole(path.resolve(), content, mode=0o600, keep_owner=True)
    except OSError as exc:
        if exc.filename is None:  # on a full disk the system does not name the file
            exc.filename = os.fspath(path)
        raise
