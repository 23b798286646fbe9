"""Reads the tokens file, and finds the client that a token belongs to."""

from __future__ import annotations

import hmac
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dlm.errors import ConfigError
from dlm.wire.ids import check_beginning
from dlm.wire.secret import AUTHORIZATION, SCHEME, TOKEN, digest, lines_of, read_secret

# A call's token is compared with every token, so that timing reveals nothing; for this many tokens,
# that takes 0.1 ms.
MAX_TOKENS = 1024
EXPIRES = "expires="  # prefix of a token's expiry, after a space
MODELS = "models="  # prefix of the ids of the models that a token allows, after a space
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_FORMAT = "NAME:SHA256 in hex or NAME:TOKEN, as printed by `dlm token NAME`"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a file.

    digests  SHA-256 of each token, 32 bytes
    names    each token's client; a client may have several tokens, so that they can be rotated
    expires  when each token ends, in seconds since 1970; infinity for never
    models   what each token allows: the first digits of ids of models or shard sets; () for all
    """

    digests: tuple[bytes, ...]
    names: tuple[str, ...]
    expires: tuple[float, ...]
    models: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return f"Tokens({len(self.digests)}: {', '.join(sorted(set(self.names)))})"

    def valid(self, now: float) -> dict[bytes, tuple[str, ...]]:
        """The tokens that have not expired: digest -> the models that each may use."""
        every = zip(self.digests, self.expires, self.models, strict=True)
        return {one: models for one, end, models in every if now < end}

    def find(self, metadata: object, now: float) -> int | None:
        """Index of the token that a call carries; None if it carries no valid one.

        Args        now  seconds since 1970

        Guarantees  the same steps whatever the call carries: one hash, one comparison with each
                    digest, none of which ends early
        """
        brought = [value for key, value in metadata or () if key == AUTHORIZATION]  # type: ignore[attr-defined]
        value = brought[0] if len(brought) == 1 else ""
        raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        scheme, token = raw[: len(SCHEME)], raw[len(SCHEME) :]
        asked = digest(token)
        found = -1
        for number, good in enumerate(self.digests):
            if hmac.compare_digest(asked, good):
                found = number
        right = scheme.lower() == SCHEME.lower().encode()
        return found if right and found >= 0 and now < self.expires[found] else None


def parse_expiry(text: str) -> float:
    """Seconds since 1970 of an ISO 8601 time, in UTC unless it names a zone; raises
    `ConfigError`."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is not a time; expected a date or time in ISO 8601 format, such as "
            "2027-01-31 or 2027-01-31T12:00Z"
        ) from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def parse_models(text: str) -> tuple[str, ...]:
    """Ids, or their first digits, separated by commas; raises `ConfigError`."""
    return tuple(check_beginning(one) for one in text.split(","))


def _options_of(words: Sequence[str]) -> tuple[float, tuple[str, ...]]:
    expires = math.inf
    models: tuple[str, ...] = ()
    for place, word in enumerate(words):
        name = next((one for one in (EXPIRES, MODELS) if word.startswith(one)), None)
        if name is None or any(one.startswith(name) for one in words[:place]):
            raise ConfigError(
                f"{word!r} is not expected here; the token may be followed by {EXPIRES}TIME and "
                f"{MODELS}ID,ID, once each"
            )
        if name == EXPIRES:
            expires = parse_expiry(word.removeprefix(EXPIRES))
        else:
            models = parse_models(word.removeprefix(MODELS))
    return expires, models


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def read_tokens(path: Path) -> Tokens:
    """The tokens in a file: each a line ``NAME:TOKEN`` or ``NAME:SHA256``; `#` begins a comment.

    After a space, ``expires=TIME`` gives a token's end, and ``models=ID,ID`` its models.

    Raises
        ConfigError  names the faulty line and its fault, but never the contents of the line
    """
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist; `dlm token NAME --tokens {path} --token-file FILE` creates it"
        )
    digests: list[bytes] = []
    names: list[str] = []
    expires: list[float] = []
    models: list[tuple[str, ...]] = []
    for number, line in lines_of(read_secret(path), path):
        if len(digests) == MAX_TOKENS:  # before one more token is compared with all these
            raise ConfigError(
                f"{path} has too many tokens; expected at most {MAX_TOKENS}. Remove some"
            )
        name, colon, rest = line.partition(":")
        secret, _, options = rest.partition(" ")
        if not colon or not is_name(name):
            raise ConfigError(
                f"{path}, line {number}: expected {_FORMAT}, with a name of 1 to 64 characters of "
                "A-Z a-z 0-9 . _ -"
            )
        if _HASH.fullmatch(secret):
            hashed = bytes.fromhex(secret)
        elif TOKEN.fullmatch(secret):
            hashed = digest(secret.encode())
        else:
            raise ConfigError(
                f"{path}, line {number}: the token of {name} is not valid; expected {_FORMAT}. A "
                "token has 16 to 512 characters of A-Z a-z 0-9 . _ ~ + / -"
            )
        if hashed in digests:
            raise ConfigError(
                f"{path}, line {number}: the token of {name} is also in an earlier line "
                f"(of {names[digests.index(hashed)]}); give each client its own token"
            )
        digests.append(hashed)
        names.append(name)
        try:
            end, named = _options_of(options.split())
        except ConfigError as exc:
            raise ConfigError(f"{path}, line {number}, the token of {name}: {exc}") from None
        expires.append(end)
        models.append(named)
    if not digests:
        raise ConfigError(
            f"{path} contains no token; expected {_FORMAT}. (To refuse all clients, stop the "
            "server.)"
        )
    return Tokens(tuple(digests), tuple(names), tuple(expires), tuple(models))
