"""The words of a KenLM file by id: stored in it, or given back by a list through their hashes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError, FormatError, KenlmFormatError
from dlm.kenlm import kernels
from dlm.kenlm.layout import Data, Layout
from dlm.kenlm.view import find_ids, find_in_text
from dlm.ngram.vocab import UNK_SPELLINGS
from dlm.ngram.wordtable import WordTable

_DAMAGED = "Get the file again, or build it again from its ARPA file"
_SHOWN = 3  # missing ids in a message


def words_of(
    data: Data,
    layout: Layout,
    view: NDArray[np.int64],
    vocab: str | os.PathLike[str] | None = None,
) -> WordTable:
    """The words of a file by id; that of `<unk>` is 0.

    Args
        vocab  a list, one word per line, for a file that stores none (`build_binary -v`). Words
               that the model lacks are passed over. None: the file's own
    Raises
        ConfigError       the file stores no words, and there is no list
        KenlmFormatError  stored words are not those of the file's hashes, or one occurs twice
        FormatError       the list lacks words of the model, or two lines have the same hash
        OSError           the list cannot be read
    """
    if vocab is not None:
        return _listed(layout, view, Path(vocab))
    if layout.words_at is None:
        raise ConfigError(
            f"{layout.path} stores no words (it was built with `build_binary -v`), and this needs "
            "them. Pass the list of its words, one per line (vocab=FILE; `dlm export --vocab FILE`)"
        )
    return _stored(data, layout, view, layout.words_at)


def _stored(data: Data, layout: Layout, view: NDArray[np.int64], at: int) -> WordTable:
    text = data[at:]
    ends = np.flatnonzero(text == 0)
    if len(ends) != layout.words or ends[-1] != len(text) - 1:
        raise KenlmFormatError(
            f"the file stores {len(ends)} words; expected {layout.words}",
            path=layout.path,
            section="words",
            byte_offset=at,
            advice=_DAMAGED,
        )
    begin = np.concatenate((np.zeros(1, np.int64), ends - np.arange(len(ends))))
    joined = np.concatenate((text[text != 0], np.zeros(kernels.PAD_BYTES, np.uint8)))
    ids = find_in_text(view, joined, begin)
    wrong = np.flatnonzero(ids != np.arange(len(ids), dtype=np.uint32))
    if len(wrong):
        i = int(wrong[0])
        word = joined[begin[i] : begin[i + 1]].tobytes()
        raise KenlmFormatError(
            f"word {i} is {word!r}, but its hash is that of word {ids[i]}",
            path=layout.path,
            section="words",
            byte_offset=at + int(begin[i]) + i,
            advice=_DAMAGED,
        )
    return WordTable.from_arrays(joined[: begin[-1]], begin)


def _listed(layout: Layout, view: NDArray[np.int64], path: Path) -> WordTable:
    lines = [line.removesuffix(b"\r") for line in path.read_bytes().split(b"\n")]
    ids = find_ids(view, lines)
    found: list[bytes | None] = [None] * layout.words
    found[0] = UNK_SPELLINGS[0]
    for number, (word, i) in enumerate(zip(lines, ids.tolist(), strict=True), 1):
        if not i:
            continue
        if found[i] is not None:
            raise FormatError(
                f"{path}, line {number}: {word!r} has the same hash as the line {found[i]!r}; "
                f"expected each word of {layout.path} once. Remove one of them"
            )
        found[i] = word
    missing = [i for i, word in enumerate(found) if word is None]
    if missing:
        shown = ", ".join(map(str, missing[:_SHOWN])) + ", ..." * (len(missing) > _SHOWN)
        raise FormatError(
            f"{path} lacks {len(missing)} of the {layout.words} words of {layout.path} (ids "
            f"{shown}). Pass the list of words that the model was built with"
        )
    return WordTable([word for word in found if word is not None])
