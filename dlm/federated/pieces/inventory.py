"""Wordpieces: an inventory made only from the distribution of words (FNG 6).

SentencePiece estimates the unigram model of Kudo (2018), but collects candidate substrings without
counts; so this module gives SentencePiece candidates that it collects with weights.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, message_factory

from dlm.errors import ConfigError, EstimationError, FormatError
from dlm.federated.pieces.settings import PieceSettings
from dlm.files import scratch_folder
from dlm.pieces import Pieces
from dlm.record.counts_file import WordCounts
from dlm.record.provenance import Provenance, content_digest
from dlm.record.sidecar import PIECES_DIGEST, read_record, write_recorded
from dlm.units import counted

SIZES = {"4k": 4_000, "16k": 16_000, "30k": 30_000}  # FNG Table 2: S_e / N_e
UNKNOWN, BEGIN, END = 0, 1, 2  # ids of <unk>, <s>, </s>
SPACE = "▁"  # U+2581, which marks the beginning of a word
# SentencePiece marks words with SPACE, and uses the others internally. It cuts marks such as
# </s> out of words, so a character that occurs only inside marks would not become a piece.
FORBIDDEN = (SPACE, "\u2585", "\u2047", "\0", "<unk>", "<s>", "</s>")
SEEDS_PER_PIECE = 8  # substrings to choose from for each piece that is kept
MAX_SEEDS = 1_000_000
# SentencePiece gets whole numbers that sum to about this, so that clipped counts, which are
# fractions, keep their ratios.
TOTAL = 100_000_000


@dataclass(frozen=True)
class Inventory:
    """Wordpieces with ids. A word is split into its most probable pieces, which decode to the same
    word; none is unknown if the counted words had all its characters."""

    model: bytes  # SentencePiece's model, serialised
    provenance: Provenance

    def __post_init__(self) -> None:
        processor = Pieces(self.model).processor
        ids = (processor.unk_id(), processor.bos_id(), processor.eos_id())
        if ids != (UNKNOWN, BEGIN, END):
            raise FormatError(
                f"<unk>, <s>, </s> have the ids {ids}; expected {(UNKNOWN, BEGIN, END)}, as dlm "
                "pieces numbers them"
            )
        object.__setattr__(self, "_processor", processor)
        object.__setattr__(self, "_cache", {})

    @property
    def size(self) -> int:
        """Number of ids, including <unk>, <s> and </s>."""
        return int(self._sp.GetPieceSize())

    @property
    def _sp(self) -> Any:
        return self._processor  # type: ignore[attr-defined]

    def pieces(self) -> list[str]:
        """Returns the piece of each id; a piece that begins a word starts with U+2581."""
        return [str(self._sp.IdToPiece(i)) for i in range(self.size)]

    def log_probabilities(self) -> npt.NDArray[np.float64]:
        """Returns ln p of each piece; 0 for <unk>, <s> and </s>, which have no probability."""
        return np.array([self._sp.GetScore(i) for i in range(self.size)])

    def encode_word(self, word: str) -> list[int]:
        found: list[int] | None = self._cache.get(word)  # type: ignore[attr-defined]
        if found is None:
            found = [int(i) for i in self._sp.EncodeAsIds(word)]
            if len(self._cache) < 1 << 20:  # type: ignore[attr-defined]
                self._cache[word] = found  # type: ignore[attr-defined]
        return found

    def encode(self, words: Sequence[str]) -> npt.NDArray[np.int32]:
        return np.array([i for word in words for i in self.encode_word(word)], np.int32)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Returns the words that ids spell; U+2047 stands for an unknown character."""
        text = "".join("\u2047" if i == UNKNOWN else str(self._sp.IdToPiece(int(i))) for i in ids)
        return [word for word in text.split(SPACE) if word]

    def pieces_per_word(self, counts: WordCounts) -> float:
        """Mean number of pieces per word, weighted by use."""
        shares = counts.probabilities().tolist()
        pairs = zip(counts.words, shares, strict=True)
        return float(sum(share * len(self.encode_word(word)) for word, share in pairs))

    def save(self, path: str | Path) -> None:
        write_recorded(path, self.model, self.provenance, digest_name=PIECES_DIGEST)

    @classmethod
    def load(cls, path: str | Path, content: bytes | None = None) -> Inventory:
        """Reads what `save` wrote, or its `content`; without a record there is no guarantee. Raises
        FormatError, and PrivacyError if the record belongs to another model or was changed."""
        model = Path(path).read_bytes() if content is None else content
        try:
            found = cls(model, Provenance.none("not said yet"))
        except FormatError as exc:
            raise FormatError(
                f"{path}: {exc} (a file whose name ends in .model must hold wordpieces from dlm "
                "pieces; give a list of words another name)"
            ) from exc
        record = read_record(path, model, digest_name=PIECES_DIGEST, kind="wordpieces")
        return dataclasses.replace(found, provenance=record)


def inventory_of(encode: object) -> Inventory | None:
    """The `Inventory` that the method `encode` is bound to; None otherwise, even for a subclass."""
    owner = getattr(encode, "__self__", None)
    return owner if type(encode) is MethodType and type(owner) is Inventory else None


def build_inventory(
    counts: WordCounts,
    size: int,
    *,
    threads: int = 1,
    max_piece_length: int = PieceSettings.max_length,
) -> Inventory:
    """Builds an inventory of `size` pieces from words and their counts.

    No text is read again, so the inventory has the guarantee of the counts, if they have one.

    Guarantees  every character of every word is a piece, so that no word is partly unknown; nothing
                is normalised, so a word's pieces decode to the same word
    Raises      ConfigError      a word has white space or a mark, so it could not be decoded
                EstimationError  the words do not give that many pieces, or have too many characters
    Paper       FNG 6: inventories of 4K, 16K, 30K with 100 % character coverage; Kudo 2018
    """
    import sentencepiece

    PieceSettings(size, max_piece_length)  # checks both numbers
    for word in counts.words:
        if word.split() != [word] or any(mark in word for mark in FORBIDDEN):
            raise ConfigError(
                f"{word!r} contains white space or a wordpiece mark ({', '.join(FORBIDDEN[4:])}, "
                "U+2581, U+2585, U+2047, NUL); remove it from the list"
            )
    weights = scaled(counts.counts)
    characters = {c for word in counts.words for c in word} | {SPACE}
    if len(characters) + 3 > size:
        raise EstimationError(
            f"the words use {len(characters)} different characters, which together with <unk>, <s> "
            f"and </s> do not fit in {size} pieces; set --size to at least {len(characters) + 3}"
        )
    seeds = seed_pieces(
        counts.words, weights, min(MAX_SEEDS, SEEDS_PER_PIECE * size), max_piece_length
    )
    model = io.BytesIO()
    with scratch_folder(None, "dlm-pieces") as folder:
        words_file, seeds_file = Path(folder, "words.tsv"), Path(folder, "seeds.tsv")
        with words_file.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(
                f"{word}\t{n}\n" for word, n in zip(counts.words, weights.tolist(), strict=True)
            )
            file.writelines(f"{word}\t1\n" for word in lone_characters(counts.words))
        with seeds_file.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{piece}\t{n}\n" for piece, n in seeds)
        try:
            sentencepiece.SentencePieceTrainer.Train(
                input=str(words_file),
                input_format="tsv",
                seed_sentencepieces_file=str(seeds_file),
                model_writer=model,
                model_type="unigram",
                vocab_size=size,
                character_coverage=1.0,
                # Keep words as they were counted, without normalising them.
                normalization_rule_name="identity",
                # SentencePiece silently leaves out longer lines.
                max_sentence_length=max(len(w.encode()) for w in counts.words) + 64,
                max_sentencepiece_length=max_piece_length,
                num_threads=threads,
                unk_id=UNKNOWN,
                bos_id=BEGIN,
                eos_id=END,
                pad_id=-1,
                minloglevel=2,
            )
        # A size that does not fit into 32 bits raises ValueError.
        except (RuntimeError, OSError, ValueError) as exc:
            # Of the message "INTERNAL: src/...cc(744) [...]", only the limit is useful.
            limit = re.search(r"<= (\d+)", str(exc))
            why = f"at most {limit[1]} are possible" if limit else str(exc).rstrip(". ")
            raise EstimationError(
                f"SentencePiece cannot make {size} pieces from "
                f"{counted(len(counts.words), 'word')}: {why}. Give a smaller size, "
                "or count more words"
            ) from exc
    made = _without_paths(model.getvalue())
    record = counts.provenance.derive(f"wordpieces {size}", **{PIECES_DIGEST: content_digest(made)})
    return Inventory(made, record)


# Declare only the fields of SentencePiece's messages that name files: protobuf keeps the others.
# SentencePiece's own generated classes need the newest protobuf.
_FILE_NAMES = descriptor_pb2.FileDescriptorProto(
    name="dlm/file_names.proto",
    message_type=[
        {
            "name": "ModelProto",
            "field": [
                {
                    "name": "trainer_spec",
                    "number": 2,
                    "type": "TYPE_MESSAGE",
                    "type_name": "TrainerSpec",
                }
            ],
        },
        {
            "name": "TrainerSpec",
            "field": [
                {"name": "input", "number": 1, "label": "LABEL_REPEATED", "type": "TYPE_BYTES"},
                {"name": "seed_sentencepieces_file", "number": 54, "type": "TYPE_BYTES"},
            ],
        },
    ],
)


def _without_paths(model: bytes) -> bytes:
    known = message_factory.GetMessages([_FILE_NAMES])["ModelProto"].FromString(model)
    for name in ("input", "seed_sentencepieces_file"):
        known.trainer_spec.ClearField(name)
    return bytes(known.SerializeToString(deterministic=True))


def scaled(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    shares = counts / counts.max()  # their sum is finite for all counts
    whole: npt.NDArray[np.int64] = np.rint(shares * (TOTAL / shares.sum())).astype(np.int64)
    return np.maximum(whole, 1)


def lone_characters(words: Iterable[str]) -> list[str]:
    """Returns words of two characters that no given word contains, one for each last character.

    At its first pruning SentencePiece drops each piece that no word needs. If every word were a
    piece by then, it would drop all other pieces, including single characters, and then also short
    frequent words. Each word returned here needs its last character as a piece.
    """
    pairs = {word[at : at + 2] for word in words for at in range(len(word) - 1)}
    characters = sorted({c for word in words for c in word})
    found = []
    for last in characters:
        first = next((c for c in characters if c + last not in pairs), None)
        if first is not None:
            found.append(first + last)
    return found


def seed_pieces(
    words: Sequence[str], weights: npt.NDArray[np.int64], count: int, max_length: int
) -> list[tuple[str, int]]:
    """Collects candidates for the pieces of a unigram model: (substring, weighted occurrences).

    Returns up to `count` substrings of two characters or more, those that cover the most text
    (occurrences times length) first. So does SentencePiece, but here each occurrence has its word's
    weight. A substring that always occurs inside a longer one is left out.

    Cost  O(characters of all words) times `max_length`; substrings of two lengths in memory
    """
    marked = [SPACE + word for word in words]
    values = weights.tolist()
    best: list[tuple[int, str, int]] = []
    longer: dict[str, int] = {}
    for length in range(max_length, 1, -1):
        now: dict[str, int] = {}
        for word, value in zip(marked, values, strict=True):
            for at in range(len(word) - length + 1):
                piece = word[at : at + length]
                now[piece] = now.get(piece, 0) + value
        inside = {
            part
            for piece, total in longer.items()
            for part in (piece[:-1], piece[1:])
            if now[part] == total
        }
        best += [(-n * length, piece, n) for piece, n in now.items() if piece not in inside]
        best.sort()
        del best[count:]
        longer = now
    return [(piece, n) for _, piece, n in best]
