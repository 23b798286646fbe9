"""Reads files of lattices and n-best lists, whose format it detects, and writes results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from dlm.asr.lines import finite, read_lines, recovered, whole
from dlm.asr.rescoring.kaldi import SymbolTable, kaldi_text, read_kaldi
from dlm.asr.rescoring.lattice import NON_WORDS, Lattice
from dlm.asr.rescoring.nbest import Hypotheses, NbestList, nbest_json, nbest_text, read_nbest
from dlm.asr.rescoring.slf import read_slf, slf_text
from dlm.client.phrases import SPACES, split_text
from dlm.errors import ConfigError, LatticeError
from dlm.files import replacing, write_whole
from dlm.ngram.vocab import as_bytes

SLF, KALDI, NBEST = "slf", "kaldi", "nbest"
FORMATS = (SLF, KALDI, NBEST)
_HEAD_LINES = 20


@dataclass(frozen=True)
class LatticeFiles:
    """Files of one format; `table` is for Kaldi lattices whose labels are numbers."""

    paths: Sequence[Path]
    format: str
    table: SymbolTable | None = None
    non_words: Collection[str] = ()

    @classmethod
    def find(
        cls,
        path: Path,
        format_: str | None = None,
        table: SymbolTable | None = None,
        non_words: Collection[str] = (),
    ) -> LatticeFiles:
        """Finds the file at `path`, or a folder's files, sorted by name; detects their format.

        Raises  ConfigError  no file, unknown format;  LatticeError  no format fits the first file
        """
        if format_ not in (None, *FORMATS):
            raise ConfigError(f"unknown format {format_!r}; expected one of {', '.join(FORMATS)}")
        if path.is_dir():
            paths = sorted(p for p in path.iterdir() if p.is_file() and p.name[0] != ".")
            if not paths:
                raise ConfigError(f"{path} has no files; expected lattice files")
        else:
            paths = [path]
            if str(path) != "-" and not path.exists():
                raise ConfigError(f"no such file or folder: {path}; check the path")
        if format_ is None:
            if str(path) == "-":
                raise ConfigError("dlm cannot detect the format of standard input; give --format")
            format_ = _format_of(paths[0])
        return cls(paths, format_, table, non_words)

    def read(self, skip: Callable[[LatticeError], None] | None = None) -> Iterator[Hypotheses]:
        """Yields every utterance, in the order of the files; a malformed utterance is left out if
        `skip` accepts the error.

        Raises  LatticeError, OSError, ConfigError: see the readers
        """
        non_words = {*NON_WORDS, *self.non_words}
        for path in self.paths:
            if self.format == SLF:
                yield from recovered(partial(read_slf, path, non_words=non_words), skip)
            elif self.format == KALDI:
                yield from read_kaldi(path, self.table, non_words=non_words, skip=skip)
            else:
                yield from read_nbest(path, skip=skip)


def _format_of(path: Path) -> str:
    lines = [text for _, text in islice(read_lines(path), _HEAD_LINES) if text.strip(SPACES)]
    if lines and lines[0].lstrip(SPACES)[0] == "{":
        return NBEST
    if any(line.startswith(("VERSION=", "V=", "N=", "I=", "UTTERANCE=")) for line in lines):
        return SLF
    if not lines:
        raise LatticeError("the file is empty; expected lattices or n-best lists", path=str(path))
    fields = [split_text(line) for line in lines[:2]]
    if (
        len(fields) == 2
        and len(fields[0]) == 1
        and all(whole(f) is not None for f in fields[1][:1])
    ):
        return KALDI
    if fields and len(fields[0]) > 2 and None not in map(finite, fields[0][1:3]):
        return NBEST
    raise LatticeError(
        "the file is not an SLF lattice, a Kaldi text lattice or an n-best list (JSON lines, or "
        "ID ACOUSTIC LM WORDS...). Convert binary Kaldi lattices with `lattice-copy ark:F ark,t:F`",
        path=str(path),
    )


class FileWriter(ExitStack):
    """Writes all results to one file, which appears only once it is complete. N-best lists become
    JSON lines if the file's name ends in .jsonl or .json."""

    def __init__(self, path: Path, format_: str, table: SymbolTable | None = None) -> None:
        super().__init__()
        self._format, self._table = format_, table
        self._json = path.suffix in (".jsonl", ".json")
        self._file = self.enter_context(replacing(path))

    def write(self, found: Hypotheses, remark: str = "") -> None:
        if isinstance(found, NbestList):
            text = nbest_json(found) if self._json else nbest_text(found)
        elif self._format == KALDI:
            text = kaldi_text(found, self._table)
        else:
            text = slf_text(found, remark)
        self._file.write(as_bytes(text))


class FolderWriter(ExitStack):
    """Writes one SLF file per lattice, which appears only once it is complete. With `resume`, the
    folder may already have files, whose utterances are skipped; else they raise ConfigError."""

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; expected a folder for the lattice files")
        if not resume and folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} already has files; give another folder, or pass --resume to skip the "
                "lattices that are done"
            )
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._written: set[str] = set()

    def has(self, name: str) -> bool:
        return name not in self._written and self._path(name).exists()

    def write(self, found: Hypotheses, remark: str = "") -> None:
        """Writes an utterance's file, with `remark` as a comment; ConfigError if it exists."""
        assert isinstance(found, Lattice)
        if found.id in self._written:
            raise ConfigError(
                f"two utterances have the id {found.id!r}, but each gets a file of that name; "
                "rename one of the utterances"
            )
        self._written.add(found.id)
        write_whole(self._path(found.id), as_bytes(slf_text(found, remark)))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.slf"
