"""A device's text, as the ids of a round's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dlm.errors import ConfigError, ProtocolError
from dlm.federated.devices.participant import Task
from dlm.federated.tokens import Ids
from dlm.federated.users import TOKENIZERS, tokens_of
from dlm.federated.words import RunVocabulary
from dlm.record.provenance import Provenance


class DeviceText:
    """One user's utterances, one per line of a file; ConfigError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            self._utterances = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"the text {path} cannot be read: {exc}") from exc

    def __call__(self, task: Task) -> Callable[[], list[Ids]]:
        """What reads the text for a task; ProtocolError, before it is read, for a vocabulary of
        another size than the network's."""
        given = json.loads(task.settings)
        vocabulary = RunVocabulary.from_bytes(task.vocabulary, Provenance.none("a server sent it"))
        if vocabulary.size != given["model"]["vocab_size"]:
            raise ProtocolError(
                f"the vocabulary has {vocabulary.size} ids, but the network "
                f"{given['model']['vocab_size']}"
            )
        split, cap = TOKENIZERS[given["text"]["tokenizer"]], int(given["text"]["max_tokens"])
        return partial(tokens_of, self._utterances, vocabulary.encoder(), cap=cap, split=split)
