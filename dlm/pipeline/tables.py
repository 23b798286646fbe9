"""The tables of a pipeline's configuration that no command has."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from dlm.config import about, check, setting
from dlm.errors import ConfigError
from dlm.federated.counting.settings import MISSING, TOKENIZER_NAMES
from dlm.resources import parse_size


@dataclass(frozen=True)
class FolderSettings:
    """[run]"""

    folder: Path = field(
        metadata=about("Folder for all that the pipeline writes; a run that stopped in it resumes.")
    )
    seed: int | None = setting(
        None,
        "With a seed, stages that use users' text are simulations, which are not private.",
        low=0,
    )
    memory: str | None = setting(
        None, "Memory limit for each stage that has one, such as 4G; by default, the free memory."
    )
    threads: int = setting(2, "Number of threads.", low=1)

    def __post_init__(self) -> None:
        check("run", self)
        _ = self.memory_bytes

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_size(self.memory)


@dataclass(frozen=True)
class InputSettings:
    """[inputs]"""

    users: Path = field(metadata=about("Users' text: .parquet or TSV, plain, .zst or .gz."))
    held_out: Path | None = setting(
        None,
        "Text of other users, who agreed to be measured without noise; the final model's "
        "perplexity on it is reported.",
    )
    wordlist: Path | None = setting(
        None, "List of words to count in users' text; give this or `vocabulary`."
    )
    vocabulary: Path | None = setting(
        None,
        "The words of the network: a list, or counts with their record; or wordpieces, FILE.model.",
    )
    text: Path | None = setting(
        None,
        "Public text, one sentence per line, whose n-grams the model will have; give this or "
        "`topology`.",
    )
    topology: Path | None = setting(None, "An ARPA file with the n-grams that the model will have.")
    public: str = setting(
        "",
        "Name of the person who attests that no user's text is in `wordlist`, `vocabulary`, "
        "`text`, `topology` and [federate.pretrain] `text`; needed for those without a record.",
    )
    user_column: str = setting("user_id", "Column of user ids, in `users` and `held_out`.")
    text_column: str = setting("utterance", "Column of text, in `users` and `held_out`.")
    missing: str = setting(
        "refuse",
        "What to do with rows without a user id, and with users without text.",
        one_of=MISSING,
    )
    tokenizer: str = setting(
        "words", "How users' text is split into words.", one_of=TOKENIZER_NAMES
    )

    def __post_init__(self) -> None:
        check("inputs", self)
        for a, b in (("wordlist", "vocabulary"), ("text", "topology")):
            if (getattr(self, a) is None) == (getattr(self, b) is None):
                raise ConfigError(f"[inputs] must have either {a} or {b}, and not both")

    def files(self) -> dict[str, Path]:
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: path for name, path in found.items() if isinstance(path, Path)}
