"""`dlm evaluate`: compares n-gram models and networks on the same held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.checks import READ, READ_ANY, within
from dlm.cli.options import Json, Memory, Options, Quiet
from dlm.cli.output import print_answer, stage_printer
from dlm.federated.counting.settings import TOKENIZER_NAMES, UserTextSettings
from dlm.units import counted

if TYPE_CHECKING:
    from dlm.distill.evaluate import Evaluation, Figure


def evaluate(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL...", help="ARPA files and run folders of dlm federate."),
        READ_ANY,
    ],
    *,
    users: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Users' held-out text: parquet or TSV (plain, .zst or .gz) with user ids.",
        ),
        READ_ANY,
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Held-out text without user ids, one sentence per line."),
        READ,
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(help="whitespace, or words (lower-case letters and apostrophes)."),
        within(one_of=TOKENIZER_NAMES),
    ] = "whitespace",
    columns: Annotated[UserTextSettings, Options("user_column text_column")],
    draws: Annotated[
        int,
        typer.Option(help="Bootstrap samples of users for the intervals; 0 for no intervals."),
        within(low=0),
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap."), within(low=0)] = 0,
    memory: Memory = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare models and networks on the same held-out text.

    Prints perplexity per word, sentence ends included; sentence log-likelihood (SLL, natural
    logarithm, mean per sentence); and top-1 accuracy (of the words known to all models, the share
    that a model ranks first). SLL and top-1 leave out sentence ends. "Without OOVs" excludes words
    that any of the models lacks. With --users, each figure has a 95 % interval (bootstrap over
    users), and so has each model's difference from the first. No privacy guarantee covers figures
    of users' text.

    Examples:
        dlm evaluate model.arpa.zst small.arpa.zst --text heldout.txt
        dlm evaluate model.arpa.zst runs/first --users heldout.tsv
    """
    from dlm.checkpoint import CHECKPOINT
    from dlm.distill.evaluate import Judge, NetworkJudge, NgramJudge, evaluate as judge
    from dlm.errors import ConfigError
    from dlm.estimate.columns import ModelColumns
    from dlm.federated.users import TOKENIZERS
    from dlm.resources import available_bytes

    if (users is None) == (text is None):
        raise ConfigError(
            "give either --users (text with user ids) or --text (text without them), not both"
        )
    tell = stage_printer(quiet=quiet)
    limit = available_bytes() if memory is None else memory
    judges: list[Judge] = []
    for path in models:
        tell(f"reading {path}")
        if path.name == CHECKPOINT or (path / CHECKPOINT).exists():
            judges.append(NetworkJudge(str(path), path))
        else:
            judges.append(NgramJudge(str(path), ModelColumns.read(path, memory_bytes=limit)))
    split = TOKENIZERS[tokenizer]
    if users is not None:
        from dlm.federated.users import UserDataset

        everyone = UserDataset.open(users, **vars(columns))
        tell(f"scoring the text of {counted(len(everyone), 'user')}")
        spoken: Iterator[Iterable[list[str]]] = (
            map(split, everyone.utterances(user)) for user in range(len(everyone))
        )
    else:
        assert text is not None
        tell(f"scoring {text}")
        spoken = iter([map(split, _lines(text))])
    found = judge(judges, spoken)
    figures = found.figures(draws if users is not None else 0, seed)
    total = found.total(0)
    of_users = f"{counted(found.sums.shape[1], 'user')}, " if users is not None else ""
    lines = [
        f"{of_users}{counted(int(total.sentences), 'sentence')}, "
        f"{counted(int(total.words), 'word')}, "
        f"{int(total.known):,} of them known to all models"
    ]
    for model, told in zip(judges, figures, strict=True):
        lines.append(model.name)
        for name, figure in told.items():
            lines.append(f"  {name.replace('_', ' '):<36}{_shown(figure)}")
    facts = _facts(found, figures, with_users=users is not None)
    print_answer(facts, lines, as_json=as_json)


def _lines(path: Path) -> Iterator[str]:
    from dlm.estimate.text import Reader

    for block in Reader([str(path)], scored=True).read():
        if block.size:
            yield from block.lines.decode("utf-8", "surrogateescape").split("\n")


def _facts(
    found: Evaluation, figures: list[dict[str, Figure]], *, with_users: bool
) -> dict[str, object]:
    total = found.total(0)
    return {
        "users": found.sums.shape[1] if with_users else None,
        "sentences": int(total.sentences),
        "words": int(total.words),
        "known_words": int(total.known),
        "models": [
            {
                "model": judge.name,
                **{name: _finite(figure) for name, figure in told.items()},
            }
            for judge, told in zip(found.judges, figures, strict=True)
        ],
    }


def _finite(figure: Figure) -> dict[str, float | None]:
    """Returns a figure for JSON, with None for infinity, which a word of probability 0 causes."""
    return {k: v if v is not None and math.isfinite(v) else None for k, v in vars(figure).items()}


def _shown(figure: Figure) -> str:
    if figure.value is None:
        return "unknown"
    if figure.low is None:
        return f"{figure.value:.6g}"
    return f"{figure.value:.6g}  [{figure.low:.6g}, {figure.high:.6g}]"
