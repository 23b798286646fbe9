"""Words as ids by a list of them, and public text from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dlm.errors import ConfigError
from dlm.federated.counts_file import read_counts
from dlm.federated.provenance import Provenance
from dlm.federated.recorded import sidecar
from dlm.federated.tokens import FIRST_WORD_ID, OOV_ID, Ids

PIECES_SUFFIX = ".model"
Encode: TypeAlias = Callable[[list[str]], Any]


@dataclass(frozen=True)
class WordList:
    """Words by id: 0 to 2 are the marks, words follow in the order of the file.

    Fields
        words       in that order
        provenance  of counts that they were taken from; None for a list, which is then public
    """

    words: tuple[str, ...]
    provenance: Provenance | None = None

    @classmethod
    def read(cls, path: Path) -> WordList:
        """A file of one word a line, or counts of words (`counts_file`) with their record.

        Raises
            ConfigError   the file cannot be read or is empty, a line is not one word or comes twice
            FormatError   counts that cannot be read
            PrivacyError  counts that are not those of the record beside them
        """
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"the vocabulary {path} cannot be read: {exc}") from exc
        if (lines and "\t" in lines[0]) or sidecar(path).exists():
            # Whatever is built from counts of users inherits what they are worth.
            counts = read_counts(path)
            return cls(counts.words, counts.provenance)
        seen: dict[str, int] = {}
        for number, line in enumerate(lines, 1):
            parts = line.split()
            if len(parts) != 1 or parts[0] in seen:
                what = "comes twice" if len(parts) == 1 else "is not one word"
                raise ConfigError(f"{path}, line {number}: {line!r} {what}")
            seen[parts[0]] = number
        if not seen:
            raise ConfigError(f"the vocabulary {path} is empty")
        return cls(tuple(seen))

    @property
    def size(self) -> int:
        """Ids, marks included."""
        return len(self.words) + FIRST_WORD_ID

    @property
    def content(self) -> bytes:
        """The words, one a line: what a checkpoint keeps of them."""
        return "".join(f"{word}\n" for word in self.words).encode()

    def first(self, size: int) -> WordList:
        """The first words, `size` of them or all where it is 0.

        Raises
            ConfigError  there are fewer
        """
        if size > len(self.words):
            raise ConfigError(f"the vocabulary has {len(self.words)} words; {size} were asked for")
        return dataclasses.replace(self, words=self.words[: size or None])

    def encoder(self) -> Encode:
        """Words of an utterance -> ids; 0 for what the vocabulary lacks."""
        ids = {word: place for place, word in enumerate(self.words, FIRST_WORD_ID)}

        def encode(words: list[str]) -> Ids:
            return np.fromiter((ids.get(w, OOV_ID) for w in words), np.int32, len(words))

        return encode


def read_encoder(path: Path, size: int = 0) -> tuple[Encode, int, Provenance | None, bytes]:
    """What a run's `data.vocabulary` names: words, or wordpieces where it ends in .model.

    Returns      (words of an utterance -> ids, number of ids, what protects whose text it came
                 from; None for a plain list, which is public; the words or wordpieces, as bytes)
    Raises
        ConfigError, FormatError, PrivacyError   as `WordList.read` and `pieces.Inventory.load`
    """
    if path.suffix != PIECES_SUFFIX:
        words = WordList.read(path).first(size)
        return words.encoder(), words.size, words.provenance, words.content
    from dlm.federated.pieces import Inventory

    try:
        inventory = Inventory.load(path)
    except OSError as exc:
        raise ConfigError(f"the wordpieces {path} cannot be read: {exc}") from exc
    return inventory.encode, inventory.size, inventory.provenance, inventory.model


def public_text(
    path: Path, encode: Encode, split: Callable[[str], list[str]] = str.split
) -> list[Ids]:
    """Utterances of a text file, an utterance a line; a name in .zst or .gz is decompressed."""
    import pyarrow as pa

    kind = {".zst": "zstd", ".gz": "gzip"}.get(path.suffix)
    try:
        with pa.input_stream(str(path), compression=kind) as stream:
            lines = stream.read().decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the public text {path} cannot be read: {exc}") from exc
    return [np.asarray(encode(words), np.int32) for words in map(split, lines) if words]
