"""Functions for commands that score text: they open text, start quickly and print a summary."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dlm.cli.output import compile_kernels, print_json_line
from dlm.scoring import BLOCK_BYTES

if TYPE_CHECKING:
    from dlm.client import Utterance
    from dlm.estimate.text import Reader
    from dlm.index.search.local import LocalModel
    from dlm.kenlm.model import KenlmFile
    from dlm.scoring import ScoreSummary


def open_text(
    sources: Iterable[Path],
    skip: bool,
    column: str,
    pieces: Path | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Reader:
    """Opens texts to score, or standard input if none is given."""
    from dlm.estimate.text import Reader

    names = [str(source) for source in sources] or ["-"]
    return Reader(
        names, skip=skip, column=column, scored=True, pieces=pieces, block_bytes=block_bytes
    )


def any_bytes_on_stdout() -> None:
    """Makes standard output print words and file names that are not UTF-8 as their bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")


@contextmanager
def quick_start() -> Iterator[None]:
    """Lets commands that score and then exit open a model in a third less time: turns off the
    garbage collector, which would free nothing here, and keeps numba from importing scipy."""
    sys.modules.setdefault("scipy.linalg.cython_blas", None)  # type: ignore[arg-type]
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def open_here(
    place: Path, memory: int | None, tmp: Path | None, stack: ExitStack, tell: Callable[[str], None]
) -> LocalModel | KenlmFile:
    """Opens the shard set, KenLM or ARPA file at `place`, and compiles kernels; an ARPA file is
    sharded into a folder that `stack` removes. Raises ConfigError if memory or tmp is given but not
    used; ShardFormatError or KenlmFormatError for any other folder or a damaged model."""

    with quick_start():
        from dlm.index.layout import read_manifest
        from dlm.index.placed import local_model
        from dlm.index.search.local import LocalModel
        from dlm.index.search.shard import OPENING
        from dlm.index.search.text.score import KERNELS as SCORING
        from dlm.kenlm.layout import is_kenlm_file
        from dlm.ngram.arpa import ArpaReader, is_parts_folder
        from dlm.stores.remote import located

        place = local_model(located(place), tell)
        if is_kenlm_file(place):
            from dlm.kenlm.model import KERNELS as OF_FILES, KenlmFile

            _check_unsharded(place, "a KenLM binary file, which is scored in place", memory, tmp)
            file = KenlmFile.open(place)
            compile_kernels((*OF_FILES, *SCORING))
            return file
        # Report a damaged model before anything compiles.
        if not place.exists() or (place.is_dir() and not is_parts_folder(place)):
            read_manifest(place)
            _check_unsharded(place, "a folder", memory, tmp)
            compile_kernels((*SCORING, *OPENING))
            return LocalModel.open(place)
        if place.is_file():
            with ArpaReader(place):
                pass
    from dlm.files import scratch_folder
    from dlm.index.making.shard_set import KERNELS as BUILDING, build_shard_set

    compile_kernels((*BUILDING, *SCORING, *OPENING))
    output = stack.enter_context(scratch_folder(tmp, "dlm-model")) / "set"
    build_shard_set(place, output, 1, memory_bytes=memory, progress=tell)
    return LocalModel.open(output, verify=False)  # written just now


def open_there(cluster: Path, model: str | None, stack: ExitStack, **config: Any) -> Utterance:
    """Opens an utterance on the servers of a cluster.toml; `stack` closes its client. `config` has
    fields of `ClientConfig`."""
    from dlm.client import Client, ClientConfig
    from dlm.client.table import KERNELS

    compile_kernels(KERNELS)
    client = Client.connect(cluster, ClientConfig(**config), model=model)
    return stack.enter_context(client).utterance()


def _check_unsharded(place: Path, found: str, memory: int | None, tmp: Path | None) -> None:
    from dlm.errors import ConfigError

    if memory is not None or tmp is not None:
        raise ConfigError(
            f"--memory and --tmp apply to an ARPA file, but {place} is {found}; leave both out"
        )


def print_json_summary(summary: ScoreSummary, reader: Reader, skip: bool, **more: Any) -> None:
    """Prints the object `summary` and the facts `more`; with `skip`, also counts skipped lines."""
    skipped = {"skipped": reader.totals.skipped} if skip else {}
    print_json_line({"summary": {**summary.facts(), **more, **skipped}})


def print_summary(
    summary: ScoreSummary, reader: Reader, skip: bool, to: TextIO | None = None
) -> None:
    """Prints perplexities and totals; with `skip`, also how many lines were skipped."""
    facts = summary.facts()

    def number(value: float | None) -> str:
        return "undefined" if value is None else f"{value:.6f}"

    rows = {
        "Perplexity including OOVs": number(facts["perplexity"]),
        "Perplexity excluding OOVs": number(facts["perplexity_without_oovs"]),
        "OOVs": summary.oovs,
        "Tokens": summary.tokens,
        "Sentences": summary.sentences,
    }
    if skip:
        rows["Skipped lines"] = reader.totals.left_out()
    for name, value in rows.items():
        print(f"{name}:\t{value}", file=to)
