"""dlm.server.tokens: the tokens file, and whose a token is."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dlm.errors import ConfigError
from dlm.server.tokens import MAX_TOKENS, Tokens, read_tokens
from dlm.wire.secret import digest

NOW = 1.8e9  # in 2027
ALICE, BOB = "alice-" + "a" * 32, "bob-" + "b" * 32


def write(folder: Path, content: bytes) -> Path:
    """A tokens file."""
    path = folder / "tokens"
    path.touch(0o600)
    path.write_bytes(content)
    return path


def find(tokens: Tokens, value: str | bytes) -> str | None:
    """Whose call it is that carries `value`."""
    number = tokens.find((("user-agent", "x"), ("authorization", value)), NOW)
    return None if number is None else tokens.names[number]


def test_tokens_are_kept_hashed_whichever_way_they_stand_in_the_file(tmp_path):
    """Plain or hashed, with comments; a name may have two, while one replaces the other."""
    second = "c" * 20
    lines = (
        f"# servers\n\nalice:{ALICE}\nbob:{digest(BOB.encode()).hex().upper()}\n"
        f"alice:{second}\n  # end\n"
    )
    tokens = read_tokens(write(tmp_path, lines.encode()))
    assert find(tokens, f"Bearer {ALICE}") == "alice"
    assert find(tokens, f"bearer {BOB}") == "bob"
    assert find(tokens, f"Bearer {second}".encode()) == "alice"
    assert find(tokens, f"Bearer {digest(BOB.encode()).hex()}") is None
    for shown in (repr(tokens), str(tokens)):
        assert shown == "Tokens(3: alice, bob)"


@given(st.text() | st.binary())
def test_whatever_is_brought_is_refused_and_raises_nothing(value):
    """Odd bytes, surrogates, control characters, nothing."""
    tokens = Tokens((digest(ALICE.encode()),), ("alice",), (inf,), ((),))
    assert find(tokens, value) is None
    scheme = "Bearer " if isinstance(value, str) else b"Bearer "
    assert find(tokens, scheme + value) is None  # type: ignore[operator]


def test_every_digest_is_compared_whatever_was_brought(monkeypatch):
    """So that the time says nothing: of the name, of the token, or whether there is one."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(asked: bytes, good: bytes) -> bool:
        compared.append((asked, good))
        return asked == good

    monkeypatch.setattr("dlm.server.tokens.hmac.compare_digest", compare)
    tokens = Tokens(
        (digest(ALICE.encode()), digest(BOB.encode())), ("alice", "bob"), (inf, inf), ((), ())
    )
    for brought in (
        (),
        (("authorization", "Bearer nobody"),),
        (("authorization", f"Bearer {ALICE}"),),
        (("authorization", f"Bearer {ALICE[:-1]}"),),
        (("authorization", f"Basic {BOB}"),),
    ):
        compared.clear()
        tokens.find(brought, NOW)
        assert [good for _, good in compared] == list(tokens.digests)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (ALICE, "line 2: expected NAME:SHA256"),
        (f":{ALICE}", "line 2"),
        (f"al ice:{ALICE}", "line 2"),
        (f"{'n' * 65}:{ALICE}", "1 to 64 characters"),
        ("alice:", "the token of alice is not valid"),
        ("alice:short", "16 to 512"),
        (f"alice:{ALICE} x", "the token of alice"),
        (f"alice:{'a' * 600}", "the token of alice"),
        (f"alice:{BOB}", "of bob"),
        (f"alice:{digest(BOB.encode()).hex()}", "of bob"),
    ],
)
def test_bad_lines_are_named_by_number_and_never_shown(tmp_path, line, fault):
    """What stands there may be a secret nearly right."""
    path = write(tmp_path, f"bob:{BOB}\n{line}\n".encode())
    with pytest.raises(ConfigError, match=fault) as caught:
        read_tokens(path)
    assert ALICE not in str(caught.value)
    assert BOB not in str(caught.value)


def test_a_missing_file_is_told_with_the_command_that_makes_it(tmp_path):
    """The first start of a server with --tokens."""
    with pytest.raises(ConfigError, match=r"tokens .*`dlm token NAME --tokens "):
        read_tokens(tmp_path / "tokens")


def test_none_and_too_many_are_refused(tmp_path):
    """An empty file is a half-written one; the time of a call grows with the number."""
    with pytest.raises(ConfigError, match="no token"):
        read_tokens(write(tmp_path, b"# nobody\n"))
    lines = [f"n{i}:{i:064x}\n" for i in range(MAX_TOKENS + 1)]
    assert len(read_tokens(write(tmp_path, "".join(lines[:-1]).encode())).names) == MAX_TOKENS
    with pytest.raises(ConfigError, match="at most 1024"):
        read_tokens(write(tmp_path, "".join(lines).encode()))
    path = write(tmp_path, lines[0].encode())
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"chmod 6[04]0"):
        read_tokens(path)


@pytest.mark.parametrize(
    ("end", "is_known"),
    [
        ("", True),
        (" expires=2100-01-31", True),
        ("  expires=2100-01-31T12:00+02:00 ", True),
        (" expires=2026-12-31", False),
        (" expires=2026-12-31T23:59:59Z", False),
    ],
)
def test_a_token_is_known_until_it_expires(tmp_path, end, is_known):
    """At NOW, by the server's clock; a time without a zone is UTC."""
    line = f"alice:{digest(ALICE.encode()).hex()}{end}\n"
    tokens = read_tokens(write(tmp_path, line.encode()))
    assert (find(tokens, f"Bearer {ALICE}") == "alice") is is_known
    assert (len(tokens.valid(NOW)) == 1) is is_known


def test_a_token_names_models_by_the_first_digits_of_their_ids(tmp_path):
    """In any order with its end; a token without such digits may ask for all."""
    lines = f"alice:{ALICE} models=0123ABcd,{'f' * 32} expires=2100-01-31\nbob:{BOB}\n"
    tokens = read_tokens(write(tmp_path, lines.encode()))
    assert tokens.models == (("0123abcd", "f" * 32), ())
    assert list(tokens.valid(NOW).values()) == list(tokens.models)


@pytest.mark.parametrize(
    "end",
    [
        " expires=soon",
        " expire=2100-01-31",
        " 2100-01-31",
        " expires=2100-01-31 expires=2100-01-31",
        " models=",
        " models=0123",
        " models=0123abcd,,",
        " models=0123abcd models=0123abcd",
    ],
)
def test_what_stands_after_a_token_and_is_not_known_is_rejected(tmp_path, end):
    """By line; the content is not repeated."""
    with pytest.raises(ConfigError, match="line 1") as found:
        read_tokens(write(tmp_path, f"alice:{ALICE}{end}\n".encode()))
    assert ALICE not in str(found.value)
