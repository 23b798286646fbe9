"""dlm.wire.secret: tokens, and files that hold secrets."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dlm.errors import ConfigError
from dlm.wire.secret import (
    TOKEN,
    digest,
    lines_of,
    new_token,
    parse_token_file,
    read_secret,
    signature,
)


def test_new_tokens_are_tokens_and_differ():
    """Of the alphabet that travels, long enough."""
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(TOKEN.fullmatch(token) and len(token) == 43 for token in tokens)
    assert len({digest(token.encode()) for token in tokens}) == 100


@pytest.fixture
def owner(monkeypatch):
    """Says who owns the files that are read from now on."""
    real = os.fstat

    def set_owner(uid: int) -> None:
        def owned(descriptor: int) -> os.stat_result:
            found = list(real(descriptor))
            found[stat.ST_UID] = uid
            return os.stat_result(found)

        monkeypatch.setattr(os, "fstat", owned)

    return set_owner


@pytest.mark.promise("secrets_refused")
@pytest.mark.parametrize(
    ("mode", "fine"),
    [(0o600, True), (0o400, True), (0o640, False), (0o604, False), (0o620, False), (0o644, False)],
)
def test_a_secret_is_its_owners_alone(tmp_path, owner, mode, fine):
    """Any right of others is refused, with the command that mends it."""
    owner(1000)
    path = tmp_path / "secret"
    path.write_text("x\n")
    path.chmod(mode)
    if fine:
        assert read_secret(path) == b"x\n"
    else:
        with pytest.raises(ConfigError, match=f"mode 0{mode:o}.*chmod 600"):
            read_secret(path)


@pytest.mark.parametrize("reader", [0, 1000])
def test_what_root_hands_to_a_group_may_be_read_by_it(tmp_path, owner, monkeypatch, reader):
    """As orchestrators mount secrets and `deploy/hosts.md` makes them; root may read it as well,
    or it could not add a token. More than that is refused, with the mode that is right for it."""
    owner(0)
    monkeypatch.setattr(os, "geteuid", lambda: reader)
    path = tmp_path / "secret"
    path.write_text("x\n")
    for mode in (0o440, 0o640, 0o600):
        path.chmod(mode)
        assert read_secret(path) == b"x\n"
    for mode in (0o460, 0o444, 0o644, 0o660):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 640"):
            read_secret(path)


def test_a_secret_that_is_missing_or_too_large_is_refused(tmp_path):
    """With the path, without the content."""
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(tmp_path / "none")
    path = tmp_path / "large"
    path.touch(0o600)
    path.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_secret(path)


def test_comments_and_empty_lines_are_left_out():
    """Numbers are those of the file."""
    assert lines_of(b"# a\n\n  one \n\t# b\ntwo\r\n", Path("f")) == [(3, "one"), (5, "two")]
    assert lines_of(b"", Path("f")) == []


@pytest.mark.parametrize("content", [b"one", b"one\ntw", b"one\n\xff\n"])
def test_half_written_and_odd_files_are_refused_without_their_content(content):
    """A cut line and bytes that are no text."""
    with pytest.raises(ConfigError) as caught:
        lines_of(content, Path("f"))
    assert "tw" not in str(caught.value).split()
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "content",
    [b"", b"# only\n", b"short\n", b"a" * 16 + b"\n" + b"b" * 16 + b"\n", b"a b" * 10 + b"\n"],
)
def test_a_clients_file_holds_one_token(content):
    """Nothing, two, or what is none: refused, and not repeated."""
    with pytest.raises(ConfigError, match="`dlm token NAME`") as caught:
        parse_token_file(content, Path("f"))
    assert "aaaa" not in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_opened(tmp_path, make):
    """A pipe that nobody writes to would be opened for ever."""
    path = tmp_path / "secret"
    make(path)
    with pytest.raises(ConfigError, match="regular file"):
        read_secret(path)


def test_a_signature_changes_with_content_place_and_mode(tmp_path):
    """Even where the size stays; a missing file has one too."""
    path = tmp_path / "f"
    seen = [signature(path)]
    path.write_text("a")
    seen.append(signature(path))
    other = tmp_path / "g"
    other.write_text("b")
    other.rename(path)
    seen.append(signature(path))
    path.chmod(0o600 if seen[-1][0][-1] & 0o077 else 0o640)
    seen.append(signature(path))
    assert len(set(seen)) == len(seen)
    assert signature(path) == seen[-1]
