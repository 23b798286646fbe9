"""The labels of an acoustic model's outputs, as a CTC beam search reads them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders.beam_kernels import NEW_WORD, WHOLE_WORD
from dlm.errors import ConfigError

BEGIN = "\u2581"  # of SentencePiece: begins a word
INSIDE = "##"  # of BERT: goes on with a word
UNKNOWN = "\u2047"
BLANK_PATTERN = re.compile(r"[<\[]pad[>\]]", re.IGNORECASE)
UNKNOWN_PATTERN = re.compile(r"[<\[]unk[>\]]", re.IGNORECASE)
_SPECIAL = re.compile(r"[<\[].+[>\]]")


def codes_of(text: str) -> NDArray[np.int32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)


def begins_of(words: Iterable[str]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, words)], dtype=np.int64)


class Labels:
    """Labels by index, with a blank, which is added at the end if they have none.

    Args    is_pieces  whether a mark says where words begin, and not a space; by default, whether
                       any label begins with SentencePiece's or BERT's mark
    Raises  ConfigError  two equal labels, white space within a label, or not a list of strings
    Attributes
        names   "" for the blank, " " for the space, words begin with SentencePiece's mark
        others  see `beam_kernels.expand`; after the last label comes one that ends every word
    """

    def __init__(self, labels: Sequence[str], is_pieces: bool | None = None) -> None:
        if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
            raise ConfigError("labels is not a list of strings; expected one string per output")
        if is_pieces is None:
            twice = [label for label, count in Counter(labels).items() if count > 1]
            if twice:
                raise ConfigError(f"labels has {twice[0]!r} twice; expected different labels")
            is_pieces = any(label.startswith((BEGIN, INSIDE)) for label in labels)
            labels = _of_pieces(labels) if is_pieces else _of_letters(labels)
        self.names, self.is_pieces = list(labels), is_pieces
        for label in self.names:
            if label.split() != [label] and label not in ("", *[" "] * (not is_pieces)):
                raise ConfigError(
                    f"the label {label!r} has white space; expected letters, pieces of words, or a "
                    "space alone between words"
                )
        first: dict[str, int] = {}
        self.alike = np.array([first.setdefault(one, at) for at, one in enumerate(self.names)])
        self.alike = np.append(self.alike, len(self.names))
        self.blank = first[""]
        kinds, spelled = zip(*map(self._spelled, [*self.names, " "]), strict=True)
        self.kinds = np.array(kinds, np.uint8)
        self.letters, self.begins = codes_of("".join(spelled)), begins_of(spelled)
        self.longest = max(map(len, spelled))

    def _spelled(self, label: str) -> tuple[int, str]:
        if label == " ":
            return NEW_WORD, ""
        if not self.is_pieces or not label.startswith(BEGIN):
            return 0, label
        text = label[1:].removesuffix(BEGIN)
        return WHOLE_WORD if text and label.endswith(BEGIN) else NEW_WORD, text


def _of_letters(labels: Sequence[str]) -> list[str]:
    names = list(labels)
    if "|" in names and " " not in names:
        names[names.index("|")] = " "
    names = ["" if BLANK_PATTERN.fullmatch(name) else name for name in names]
    if "_" in names and "" not in names:
        names[names.index("_")] = ""
    names += [""] * ("" not in names)
    return [UNKNOWN if UNKNOWN_PATTERN.fullmatch(name) else name for name in names]


def _of_pieces(labels: Sequence[str]) -> list[str]:
    names, unknown = list(labels), BEGIN + UNKNOWN + BEGIN
    if any(name.startswith(INSIDE) for name in names):
        kept = ("", BEGIN, unknown)
        names = [
            name.removeprefix(INSIDE)
            if name.startswith(INSIDE) or name in kept or _SPECIAL.fullmatch(name)
            else BEGIN + name
            for name in names
        ]
    names = ["" if BLANK_PATTERN.fullmatch(name) else name for name in names]
    names += [""] * ("" not in names)
    return [unknown if UNKNOWN_PATTERN.fullmatch(name) else name for name in names]
