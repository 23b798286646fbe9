"""What commands that score text share: how they open it, how they start, what they print."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dlm.scoring import BLOCK_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from dlm.estimate.text import Reader
    from dlm.scoring import ScoreSummary

SKIP = "Leave out, and count, lines that are not UTF-8, above 1 MiB, or hold NUL; nulls of parquet."
COLUMN = "Of parquet files."


def open_text(
    sources: Iterable[Path], skip: bool, column: str, block_bytes: int = BLOCK_BYTES
) -> Reader:
    """Texts that are scored, read as all commands read text; standard input if there is none."""
    from dlm.estimate.text import Reader

    names = [str(source) for source in sources] or ["-"]
    return Reader(names, skip=skip, column=column, scored=True, block_bytes=block_bytes)


@contextmanager
def quick_start() -> Iterator[None]:
    """Opens a model in two thirds of the time; for commands that score with it and then end.

    The garbage collector would look again and again at what is imported and at every word, none of
    which ever goes. And numba would import scipy for products that no kernel here has.
    """
    sys.modules.setdefault("scipy.linalg.cython_blas", None)  # type: ignore[arg-type]
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def print_summary(summary: ScoreSummary, reader: Reader, skip: bool) -> None:
    """The perplexities and what they are of; with `skip`, how many lines were left out."""
    facts = summary.facts()

    def number(value: float | None) -> str:
        return "undefined" if value is None else f"{value:.6f}"

    print(f"Perplexity including OOVs:\t{number(facts['perplexity'])}")
    print(f"Perplexity excluding OOVs:\t{number(facts['perplexity_without_oovs'])}")
    print(f"OOVs:\t{summary.oovs}")
    print(f"Tokens:\t{summary.tokens}")
    print(f"Sentences:\t{summary.sentences}")
    if skip:
        print(f"Lines left out:\t{reader.totals.left_out()}")
