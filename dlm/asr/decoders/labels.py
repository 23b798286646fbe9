"""The labels of an acoustic model's outputs, in the form that a CTC beam search reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders.beam_kernels import NEW_WORD, WHOLE_WORD
from dlm.errors import ConfigError

BEGIN = "\u2581"  # SentencePiece's mark of where a word begins
BLANKS = ("<blank>", "<blk>", "<pad>", "[PAD]", "", "_")  # names of CTC's blank
INSIDE = "##"  # BERT's mark of where a word continues
# pyctcdecode's names.
UNK_TOKEN = "\u2047"
BLANK_TOKEN_PTN = re.compile("|".join(map(re.escape, BLANKS[:4])), re.IGNORECASE)
UNK_TOKEN_PTN = re.compile(r"[<\[]unk[>\]]", re.IGNORECASE)
_SPECIAL = re.compile(r"[<\[].+[>\]]")


def codes_of(text: str) -> NDArray[np.int32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)


def begins_of(words: Iterable[str]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, words)], dtype=np.int64)


class Labels:
    """Labels by index; if there is no blank among them, one is added at the end.

    Args    is_pieces  whether marks, not spaces, show where words begin; by default, whether any
                       label begins with SentencePiece's or BERT's mark
    Raises  ConfigError  two equal labels, white space within a label, or not a list of strings
    Attributes
        labels  "" for the blank, " " for the space; words begin with SentencePiece's mark
        others  see `beam_kernels.expand`; an additional last label ends every word
    """

    def __init__(self, labels: Sequence[str], is_pieces: bool | None = None) -> None:
        if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
            raise ConfigError("labels must be a list of strings, one string per model output")
        if is_pieces is None:
            twice = [label for label, count in Counter(labels).items() if count > 1]
            if twice:
                raise ConfigError(f"label {twice[0]!r} is given twice; expected distinct labels")
            is_pieces = any(label.startswith((BEGIN, INSIDE)) for label in labels)
            labels = _named(labels, is_pieces)
        self.labels, self.is_pieces = list(labels), is_pieces
        for label in self.labels:
            if label.split() != [label] and label not in ("", *[" "] * (not is_pieces)):
                raise ConfigError(
                    f"the label {label!r} contains white space; expected letters, pieces of words, "
                    "or a single space as the word separator"
                )
        first: dict[str, int] = {}
        self.alike = np.array([first.setdefault(one, at) for at, one in enumerate(self.labels)])
        self.alike = np.append(self.alike, len(self.labels))
        self.blank = first[""]
        kinds, spelled = zip(*map(self._spelled, [*self.labels, " "]), strict=True)
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


def _named(labels: Sequence[str], is_pieces: bool) -> list[str]:
    names, unknown = list(labels), BEGIN + UNK_TOKEN + BEGIN if is_pieces else UNK_TOKEN
    if not is_pieces and "|" in names and " " not in names:
        names[names.index("|")] = " "
    if any(name.startswith(INSIDE) for name in names if is_pieces):
        names = [
            name.removeprefix(INSIDE)
            if name.startswith(INSIDE) or name in ("", BEGIN, unknown) or _SPECIAL.fullmatch(name)
            else BEGIN + name
            for name in names
        ]
    names = ["" if BLANK_TOKEN_PTN.fullmatch(name) else name for name in names]
    if not is_pieces and BLANKS[-1] in names and "" not in names:
        names[names.index(BLANKS[-1])] = ""
    names += [""] * ("" not in names)
    return [unknown if UNK_TOKEN_PTN.fullmatch(name) else name for name in names]
