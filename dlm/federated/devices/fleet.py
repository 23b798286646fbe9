"""The devices that may take part in a run; a file written before the run lists their pseudonyms."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dlm.errors import ConfigError
from dlm.federated.tokens import Ids

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # a device's name is also a file's name
_KEY = re.compile("[0-9a-f]{64}")


def check_name(name: str) -> str:
    """Returns `name`; ConfigError if a device cannot have this name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the device name is {name!r}; expected 1 to 64 letters, digits, dots, hyphens "
            "and underscores, beginning with a letter or digit"
        )
    return name


@dataclass(frozen=True)
class Fleet:
    """Devices as a `Population`: the server knows only sorted pseudonyms and, unless `keys` is
    None, each device's registered key for signatures."""

    names: tuple[str, ...]
    keys: dict[str, bytes] | None

    @classmethod
    def read(cls, path: Path) -> Fleet:
        """Reads a file with one line per device: its name and, after a tab, its registered key in
        hexadecimal digits, either for all devices or for none. ConfigError for other content."""
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"the list of devices {path} cannot be read: {exc}") from exc
        found: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            name, _, key = line.partition("\t")
            try:
                check_name(name)
            except ConfigError as exc:
                exc.add_note(f"in {path}, line {number}")
                raise
            if name in found or (key and not _KEY.fullmatch(key)):
                what = (
                    "appears twice; remove one"
                    if name in found
                    else "has a key that is not 64 hexadecimal digits"
                )
                raise ConfigError(f"{path}, line {number}: the device {name} {what}")
            found[name] = key
        if not found or len(set(map(bool, found.values()))) > 1:
            raise ConfigError(
                f"{path} lists {len(found)} devices, {sum(map(bool, found.values()))} of them with "
                "a key; expected at least one device, and a key for each device or for none"
            )
        keys = {name: bytes.fromhex(key) for name, key in found.items()}
        if len(set(keys.values())) < len(keys) and any(keys.values()):
            raise ConfigError(
                f"two devices in {path} have the same key; give each its own (dlm devices register)"
            )
        return cls(tuple(sorted(found)), keys if any(keys.values()) else None)

    def __len__(self) -> int:
        return len(self.names)

    def user_id(self, user: int) -> str:
        return self.names[user]

    def tokens(
        self,
        user: int,
        encode: Callable[[list[str]], Any],
        *,
        cap: int | None = None,
        split: Callable[[str], list[str]] = str.split,
    ) -> list[Ids]:
        """Returns an empty list, since text stays on devices."""
        return []

    def split(self, fraction: float) -> tuple[Self, Self]:
        """Returns all devices for training and none for evaluation, which needs text."""
        if fraction:
            raise ConfigError(
                f"data.held_out is {fraction}; expected 0: devices keep their text, so the server "
                "has none to evaluate with. Use dlm evaluate afterwards, with text of your own"
            )
        return self, type(self)((), None)

    @property
    def digest(self) -> str:
        content = repr((self.names, self.keys and sorted(self.keys.items())))
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
