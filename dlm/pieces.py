"""Splits text and words into pieces with a SentencePiece model."""

from __future__ import annotations

from pathlib import Path

from dlm.errors import ConfigError, FormatError

_LINES = 512  # lines split at once: lists of pieces take thirty times the memory of their text
_SPACES = bytes.maketrans(b"\t\r", b"  ")  # needed for a model that does not normalise


class Pieces:
    """A SentencePiece model, made from the bytes of its file; `processor` is the package's object.
    Any thread may use it. Raises FormatError if the bytes are not such a model."""

    def __init__(self, model: bytes) -> None:
        import sentencepiece

        self.model, self.processor = model, sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(model)
        except RuntimeError as exc:
            raise FormatError(f"not a SentencePiece model: {exc}") from exc

    @classmethod
    def read(cls, path: str | Path) -> Pieces:
        """Reads a file; ConfigError if it cannot be read or is not a SentencePiece model."""
        try:
            return cls(Path(path).read_bytes())
        except (OSError, FormatError) as exc:
            raise ConfigError(f"the SentencePiece model {path} cannot be read: {exc}") from exc

    def of_word(self, word: str) -> list[str]:
        """A word's pieces; the first begins with U+2581. Unknown characters stay as they are."""
        return list(self.processor.encode(word, out_type=str))

    def cut(self, text: bytes) -> bytes:
        """Puts a space between all pieces of each line; the number of lines stays the same."""
        lines = text.translate(_SPACES).decode("utf-8", "replace").split("\n")
        parts = (
            self.processor.encode(lines[at : at + _LINES], out_type=str, num_threads=1)
            for at in range(0, len(lines), _LINES)
        )
        return b"\n".join(" ".join(line).encode() for part in parts for line in part)
