"""Maps words to ids by a list, and reads public text from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dlm.errors import ConfigError
from dlm.federated.tokens import FIRST_WORD_ID, OOV_ID, Ids
from dlm.record.counts_file import read_counts
from dlm.record.provenance import Provenance, content_digest
from dlm.record.sidecar import PIECES_DIGEST, sidecar
from dlm.record.signature import require_signed

if TYPE_CHECKING:
    from dlm.federated.pieces.inventory import Inventory

PIECES_SUFFIX = ".model"
Encode: TypeAlias = Callable[[list[str]], Any]


@dataclass(frozen=True)
class WordList:
    """Words by id: ids 0 to 2 are the marks, and the words follow in the order of the file. The
    `provenance` is the record of the words' counts; None for a plain list, which has no record."""

    words: tuple[str, ...]
    provenance: Provenance | None = None

    @classmethod
    def read(cls, path: Path, content: bytes | None = None) -> WordList:
        """Reads one word per line, or counts of words with a record, from a file or its `content`.
        Raises ConfigError and, for counts, what `read_counts` raises."""
        try:
            content = path.read_bytes() if content is None else content
            lines = content.decode("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"the vocabulary {path} cannot be read: {exc}") from exc
        if (lines and "\t" in lines[0]) or sidecar(path).exists():
            # Whatever is built from users' counts inherits their guarantee.
            counts = read_counts(path, content)
            return cls(counts.words, counts.provenance)
        seen: dict[str, int] = {}
        for number, line in enumerate(lines, 1):
            parts = line.split()
            if len(parts) != 1 or parts[0] in seen:
                what = (
                    "appears twice; remove one of the two lines"
                    if len(parts) == 1
                    else "is not one word; write one word per line"
                )
                raise ConfigError(f"{path}, line {number}: {line!r} {what}")
            seen[parts[0]] = number
        if not seen:
            raise ConfigError(f"the vocabulary {path} is empty; expected one word per line")
        return cls(tuple(seen))

    @property
    def size(self) -> int:
        return len(self.words) + FIRST_WORD_ID

    @property
    def content(self) -> bytes:
        return "".join(f"{word}\n" for word in self.words).encode()

    def first(self, size: int) -> WordList:
        """Returns the first `size` words; 0 means all. ConfigError if the list has fewer."""
        if size > len(self.words):
            raise ConfigError(
                f"the vocabulary has {len(self.words)} words; expected {size} or more. Request "
                "fewer words, or 0 for all of them"
            )
        return dataclasses.replace(self, words=self.words[: size or None])

    def encoder(self) -> Encode:
        """Returns a function that maps words to ids, and words outside the vocabulary to 0."""
        ids = {word: place for place, word in enumerate(self.words, FIRST_WORD_ID)}

        def encode(words: list[str]) -> Ids:
            return np.fromiter((ids.get(w, OOV_ID) for w in words), np.int32, len(words))

        return encode


@dataclass(frozen=True)
class RunVocabulary:
    """The content of a run's `data.vocabulary`: words, or an inventory of wordpieces. `record`
    states the guarantee for the people behind `words`; None for a plain list of words."""

    words: WordList | Inventory
    record: Provenance | None

    @classmethod
    def read(cls, path: Path, size: int = 0, public_key: Path | None = None) -> RunVocabulary:
        """Words, or wordpieces if the name ends in .model, with the record beside them.

        The key in the file `public_key`, if any, must have signed the bytes that are read. Raises
        what `WordList.read`, `Inventory.load` and `require_signed` raise.
        """
        has_pieces = path.suffix == PIECES_SUFFIX
        try:
            content = path.read_bytes()
        except OSError as exc:
            what = "wordpieces" if has_pieces else "vocabulary"
            raise ConfigError(f"the {what} {path} cannot be read: {exc}") from exc
        words: WordList | Inventory
        if has_pieces:
            from dlm.federated.pieces.inventory import Inventory

            words = Inventory.load(path, content)
        else:
            words = WordList.read(path, content).first(size)
        record = words.provenance
        if public_key is not None:
            record = require_signed(path, public_key, content)
        return cls(words, record)

    @classmethod
    def of(cls, encode: Encode, record: Provenance) -> RunVocabulary | None:
        """The inventory that `encode` is bound to, with this record; None if there is none."""
        from dlm.federated.pieces.inventory import Inventory, inventory_of

        owner = inventory_of(encode)
        return None if owner is None else cls(Inventory(owner.model, record), record)

    @classmethod
    def from_bytes(cls, content: bytes, record: Provenance) -> RunVocabulary:
        try:
            words = WordList(tuple(content.decode().splitlines()), record)
        except UnicodeDecodeError:
            words = None
        if words is not None and words.content == content and "\0" not in content.decode():
            return cls(words, record)
        from dlm.federated.pieces.inventory import Inventory

        return cls(Inventory(content, record), record)

    @property
    def content(self) -> bytes:
        """The words, one per line, or SentencePiece's model, as stored in a checkpoint."""
        return self.words.content if isinstance(self.words, WordList) else self.words.model

    @property
    def size(self) -> int:
        return self.words.size

    def encoder(self) -> Encode:
        return self.words.encoder() if isinstance(self.words, WordList) else self.words.encode


def record_of(encode: Encode) -> Provenance:
    """Returns the record of the wordpieces to which `encode` is bound; a record without a guarantee
    if `encode` is wrapped or of another type, or if the record is for another model."""
    from dlm.federated.pieces.inventory import inventory_of

    owner = inventory_of(encode)
    if owner is None:
        return Provenance.none("nothing says whose text the given encoder was made from")
    record = owner.provenance
    named = record.content.get(PIECES_DIGEST)
    if record.guarantee is not None and named != content_digest(owner.model):
        return Provenance.none("the record of the given encoder is of other wordpieces")
    return record


def public_text(
    path: Path,
    content: bytes,
    encode: Encode,
    split: Callable[[str], list[str]] = str.split,
) -> list[Ids]:
    """Reads utterances, one per line, from a text file's content; the suffix says how to unpack."""
    import pyarrow as pa

    kind = {".zst": "zstd", ".gz": "gzip"}.get(path.suffix)
    try:
        with pa.input_stream(pa.BufferReader(content), compression=kind) as stream:
            lines = stream.read().decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the public text {path} cannot be read: {exc}") from exc
    return [np.asarray(encode(words), np.int32) for words in map(split, lines) if words]
