"""`dlm token`: a new token, as its server and its client keep it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def token(
    name: Annotated[str, typer.Argument(help="Whose it is: A-Z a-z 0-9 . _ -; shown in logs.")],
    tokens: Annotated[
        Path | None, typer.Option(help="The server's file; the hashed token is added to it.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="The client's file, which must not be there yet.")
    ] = None,
) -> None:
    """Make a token: hashed for the servers, whole for the client.

    Without --tokens or --token-file that line is printed instead.
    Example: dlm token decoder-1 --tokens tokens --token-file decoder-1.token
    """
    from dlm.cli.paths import check_writes
    from dlm.errors import ConfigError
    from dlm.server.tokens import is_name, read_tokens
    from dlm.wire.secret import digest, new_token, read_secret

    if not is_name(name):
        raise ConfigError(
            f"{name!r} is no name of a client: 1 to 64 characters of A-Z a-z 0-9 . _ - are "
            "expected, the first a letter or a digit"
        )
    if token_file is not None and token_file.exists():
        raise ConfigError(f"{token_file} exists; give another --token-file, or remove it first")
    check_writes("--token-file", token_file)
    check_writes("--tokens", tokens)
    present = b""
    if tokens is not None and tokens.exists():
        read_tokens(tokens)  # a file that servers refuse is not made longer
        present = read_secret(tokens)
    new = new_token()
    line = f"{name}:{digest(new.encode()).hex()}\n"
    # The client's first: a token that nobody holds would let in nobody, but stay for ever.
    if token_file is not None:
        _write(token_file, f"{new}\n".encode())
        print(f"wrote {token_file}, for the client (token_file)")
    if tokens is not None:
        _write(tokens, present + line.encode())
        print(f"added {name} to {tokens}, for the servers (--tokens)")
    if tokens is None:
        print(f"# one line of the servers' file (--tokens), mode 600:\n{line}", end="")
    if token_file is None:
        print(f"# the client's file (token_file), mode 600:\n{new}")


def _write(path: Path, content: bytes) -> None:
    """Puts a file of mode 600 in place, whole or not at all; owner, group and mode stay."""
    from dlm.files import write_whole

    try:
        # Where a link stands, it stays.
        write_whole(path.resolve(), content, mode=0o600, keep_owner=True)
    except OSError as exc:
        if exc.filename is None:  # a full disk: the system does not say which of two
            exc.filename = os.fspath(path)
        raise
