"""A network that users trained, for tests of the commands that take one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

from dlm.cli.main import app

if TYPE_CHECKING:
    from dlm.distill.sources.network import NetworkSource

CONFIG = """
[run]
rounds = 2
seed = 3
[data]
{data}
[model]
embedding_size = 4
hidden_size = 5
[privacy]
clip_norm = 0.5
mechanism = "tree"
noise_multiplier = 0.5
gap = 1
max_participations = 2
[sampling]
report_goal = 4
"""


def dlm(*arguments: object, status: int | None = None) -> Result:
    """The command, in this process; its exit status is checked if given."""
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert status in (None, done.exit_code), done.exception or done.output
    return done


def told(*arguments: object, **options: Any) -> Result:
    """The same of a command whose error is raised here."""
    done = CliRunner().invoke(app, [str(each) for each in arguments], **options)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def train(place: Path, words: Sequence[str], data: str) -> None:
    """A run of two rounds, in place/run, of twenty users who say these words; `data` is what its
    configuration has below [data]."""
    rng = np.random.default_rng(0)
    rows = [f"user{u}\t{' '.join(rng.choice(words, 5))}" for u in range(20) for _ in range(3)]
    (place / "users.tsv").write_text("user_id\tutterance\n" + "\n".join(rows) + "\n")
    (place / "run.toml").write_text(CONFIG.format(data=data))
    done = dlm("federate", place / "users.tsv", "-c", place / "run.toml", "-o", place / "run")
    assert done.exit_code == 0, done.exception


def ln_after(network: NetworkSource, said: Sequence[int]) -> NDArray[np.float32]:
    """ln P of each next word or piece. What stands behind a prefix does not count, so that prefixes
    are of few lengths, for each of which XLA compiles."""
    prefix = np.zeros((1, len(said) + -len(said) % 32), np.int32)
    prefix[0, : len(said)] = said
    return network.log_probs(prefix, np.array([len(said)], np.int32))[0]
