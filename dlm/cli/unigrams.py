"""`dlm unigrams` and `dlm pieces`: count how often users use each word of a list, and make
wordpieces from such counts."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.checks import READ, WRITE
from dlm.cli.options import Json, Options, PublicKey, Quiet, Users
from dlm.cli.output import print_answer, stage_printer
from dlm.errors import ConfigError
from dlm.federated.counting.settings import CollectionSettings, UserTextSettings
from dlm.federated.pieces.settings import PieceSettings
from dlm.resources import parse_size
from dlm.units import counted

if TYPE_CHECKING:
    from dlm.federated.counting.count_unigrams import CountedUnigrams
    from dlm.federated.counting.unigrams import OovRate, RoundMetrics

REPORT_INTERVAL_S = 5.0

# Options that `dlm devices unigrams` also has.
COUNTING = (
    "clip rounds report_goal noise_multiplier delta max_participations min_separation cap_words "
    "tokenizer public public_key seed"
)
Wordlist = Annotated[
    Path, typer.Option("--wordlist", metavar="FILE", help="Words to count, one per line."), READ
]
CountsFile = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="TSV to write: word, count."), WRITE
]


def unigrams(
    users: Users,
    wordlist: Wordlist,
    settings: Annotated[CollectionSettings, Options(f"{COUNTING} poisson test_fraction capacity")],
    text: Annotated[UserTextSettings, Options()],
    output: CountsFile,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory limit while sorting users.")
    ] = "256M",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Count how often users use the words of a list.

    Next to the counts, the command writes who took part (.ledger.json), the privacy report
    (.privacy.md, .privacy.json), the record that everything built from the counts inherits
    (.provenance.json) and the journal of the rounds (.metrics.jsonl). If the run is interrupted,
    the same command resumes it; until it is done, the folder .work holds users' text. With noise,
    the word list needs its own privacy record, or --public-attested-by NAME must attest that it is
    public. With --public-key, that key must have signed the list (dlm privacy sign).

    Examples:
        dlm unigrams users.parquet --wordlist words.txt \\
            --public-attested-by "ACME research" \\
            --lambda 100 --rounds 20 --max-participations 1 --noise-multiplier 1.0 \\
            --delta 1e-6 --output counts.tsv
    """
    from dlm.federated.counting.count_unigrams import count_unigrams
    from dlm.federated.users import UserDataset

    memory_bytes = parse_size(memory)
    if memory_bytes < 1 << 20:
        raise ConfigError(f"--memory is {memory}; sorting needs at least 1M")
    # The duration of a round would reveal how much its users wrote.
    tell = stage_printer(quiet=quiet, timed=not settings.released)
    done = count_unigrams(
        lambda store: UserDataset.open(users, **vars(text), memory_bytes=memory_bytes, store=store),
        wordlist,
        output,
        settings,
        data_name=users.name,
        progress=tell,
        on_round=count_teller(tell, settings.rounds),
    )
    tell(f"done: {output}")
    print_counted(done, output, settings.capacity, as_json=as_json)


def count_teller(tell: Callable[[str], None], rounds: int) -> Callable[[RoundMetrics], None]:
    """Returns a function that reports rounds at intervals, and all with a Z statistic."""
    last_s = 0.0

    def on_round(metrics: RoundMetrics) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if metrics.z is not None or metrics.round == rounds or now_s - last_s > REPORT_INTERVAL_S:
            last_s = now_s
            tell(_line(metrics, rounds))

    return on_round


def print_counted(done: CountedUnigrams, output: Path, capacity: int, *, as_json: bool) -> None:
    words, rate = len(done.counts.words), done.oov
    facts = {
        "output": str(output),
        "words": words,
        "privacy": done.report.statement(),
        "held_out": None if rate is None else dataclasses.asdict(rate),
    }
    lines = [f"{counted(words, 'word')} in {output}", done.report.statement()]
    if done.held_out:
        lines.append(_oov(rate, min(capacity, words)))
    print_answer(facts, lines, as_json=as_json)


def _line(metrics: RoundMetrics, rounds: int) -> str:
    between = metrics.rounds_between_new
    rare = "none new lately" if math.isinf(between) else f"a new word every {between:.1f} rounds"
    text = f"round {metrics.round}/{rounds}: {counted(metrics.words_seen, 'word')} seen, {rare}"
    return text if metrics.z is None else f"{text}, Z {metrics.z:+.4g}"


def _oov(rate: OovRate | None, words: int) -> str:
    if rate is None:
        return "OOV rate: undefined, since the held-out users have no words"
    return (
        f"OOV rate of {rate.users:,} held-out users, vocabulary of {counted(words, 'word')}: "
        f"{rate.of_words:.3f} % of "
        f"words, user mean {rate.of_users:.3f} +- {rate.error:.3f} % (not covered by any guarantee)"
    )


def pieces(
    counts: Annotated[
        Path,
        typer.Argument(metavar="COUNTS", help="TSV of words and counts, as dlm unigrams writes."),
        READ,
    ],
    settings: Annotated[PieceSettings, Options()],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Inventory to write, NAME.model."),
        WRITE,
    ],
    public: Annotated[
        str | None,
        typer.Option(
            "--public-attested-by",
            metavar="NAME",
            help="Name of the person who attests that the counts come from public text.",
        ),
    ] = None,
    public_key: PublicKey = None,
    as_json: Json = False,
) -> None:
    """Build wordpieces from word counts.

    No text is read. Every character of every word is a piece, so no word made of these characters
    is unknown. The inventory is a SentencePiece model. The privacy record of the
    counts is written beside it (.provenance.json); dlm federate composes it with its rounds. Counts
    without a record carry no guarantee, unless --public-attested-by NAME attests that they come
    from public text.
    With --public-key, that key must have signed the counts (dlm privacy sign).

    Examples:
        dlm pieces counts.tsv --size 4000 --output pieces.model
    """
    from dlm.federated.pieces.make_pieces import make_pieces

    made = make_pieces(counts, settings, output, public=public, public_key=public_key)
    statement = made.inventory.provenance.statement()
    facts = {
        "output": str(output),
        "pieces": made.inventory.size,
        "pieces_per_word": made.per_word,
        "privacy": statement,
    }
    number = counted(made.inventory.size, "piece")
    lines = [f"{number} in {output}, {made.per_word:.2f} per word", statement]
    print_answer(facts, lines, as_json=as_json)
