"""The roll-out that cluster.toml describes: which share of new utterances gets the next model."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import xxhash

from dlm.config import about
from dlm.errors import ConfigError

CHANGED = ("model", "rollout")
_TABLE = re.compile(r"\s*\[")
_MODEL = re.compile(r"\s*model\s*=")


@dataclass(frozen=True, slots=True)
class Rollout:
    """The next model beside the default one: the table [rollout], which `dlm rollout` writes."""

    model: str = field(
        metadata=about("The first digits of the next model's id, or of its shard set's.")
    )
    replaces: str = field(metadata=about("Likewise of the model that was the default before."))
    share: float = field(
        metadata=about("Share of new utterances that get the next model.", low=0, high=1)
    )

    @property
    def text(self) -> str:
        return (
            f"roll-out: {100 * self.share:g} % of new utterances get shard set {self.model[:12]}, "
            f"which replaces {self.replaces[:12]}"
        )

    def takes(self, key: str | bytes | None, draw: Callable[[], float] = random.random) -> bool:
        """Whether a new utterance gets the next model: by the hash of its key, or at random. A key
        that gets it keeps it while the share grows; another roll-out chooses other keys."""
        if key is None:
            return draw() < self.share
        data = key.encode() if isinstance(key, str) else key
        # DO NOT CHANGE: decoders on several hosts must give a key the same model.
        return xxhash.xxh3_64_intdigest(self.model.encode() + b"\0" + data) < self.share * 2**64


def edited(text: str, model: str | None, rollout: Rollout | None) -> str:
    """The text of a cluster.toml with this default model and this roll-out; all else stays. Raises
    ConfigError if they stand there in another form than `dlm` writes, as in an inline table."""
    kept: list[str] = []
    is_top, in_rollout = True, False
    for line in text.splitlines():
        if _TABLE.match(line):
            is_top, in_rollout = False, line.split("#")[0].strip() == "[rollout]"
        if line.startswith("#") or not (in_rollout or (is_top and _MODEL.match(line))):
            kept.append(line)
    comments = 0
    while comments < len(kept) and kept[comments].startswith("#"):
        comments += 1
    head = [f"model = {json.dumps(model)}"] if model else []
    if rollout is not None:
        values = (f"{name} = {json.dumps(value)}" for name, value in asdict(rollout).items())
        while kept and not kept[-1].strip():
            kept.pop()
        kept += ["", "[rollout]", *values]
    after = "\n".join([*kept[:comments], *head, *kept[comments:]]) + "\n"
    wanted = {name: value for name, value in tomllib.loads(text).items() if name not in CHANGED}
    if model:
        wanted["model"] = model
    if rollout is not None:
        wanted["rollout"] = asdict(rollout)
    try:
        is_right = tomllib.loads(after) == wanted
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:
        raise ConfigError(
            "cluster.toml has model or rollout in a form that this command cannot edit; expected "
            'a line model = "ID" before all tables, and a table that begins with a line '
            "[rollout]. Write it so, and repeat the command; nothing was changed"
        )
    return after
