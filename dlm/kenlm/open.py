"""Opens a model's n-grams from any kind of file; every command reads models with it.

with open_ngrams("model.binary", progress=tell) as reader:
    for batch in reader.batches():
        ...
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dlm.kenlm.layout import is_kenlm_file
from dlm.ngram.arpa import ArpaReader
from dlm.progress import Tell
from dlm.resources import available_bytes

if TYPE_CHECKING:
    from dlm.kenlm.reader import NgramReader


def open_ngrams(
    path: str | os.PathLike[str],
    *,
    vocab: str | os.PathLike[str] | None = None,
    memory_bytes: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Tell = lambda line: None,
) -> NgramReader:
    """Returns a reader of the n-grams of an ARPA file or of a KenLM binary file.

    Args
        vocab         path of a list of words, one per line, for a KenLM file that stores none
        memory_bytes  limit for a search of KenLM's hash tables; None: a quarter of free memory
        folder        folder for data beyond this limit; None: the folder for temporary files
        force         whether to search however long it takes
    Raises  ArpaError, KenlmFormatError, OSError
    """
    if not is_kenlm_file(path):
        return ArpaReader(path)
    # Imported late; otherwise commands that read an ARPA file would start 40 ms later.
    from dlm.kenlm.invert import LIMIT_S, Effort
    from dlm.kenlm.reader import KenlmReader

    limit = available_bytes() // 4 if memory_bytes is None else memory_bytes
    place = None if folder is None else Path(folder)
    effort = Effort(limit, place, None if force else LIMIT_S)
    return KenlmReader(path, vocab=vocab, effort=effort, progress=progress)
