"""Detects what a text file really is: its compression, and formats mistaken for ARPA."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import select
import shlex
import stat
import sys
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

GZIP_MAGIC = b"\x1f\x8b"
XZ_MAGIC = b"\xfd7zXZ\x00"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# A text may begin with "BZh"; in bzip2, a level and the mark of a block or of the end follow it.
BZIP2_MAGICS = tuple(
    b"BZh%d" % level + mark
    for level in range(1, 10)
    for mark in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
)
_MAGICS = {
    "gzip": (GZIP_MAGIC,),
    # zstd also has skippable frames, which parallel writers put first.
    "zstd": (ZSTD_MAGIC, *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))),
    "xz": (XZ_MAGIC,),
    "bzip2": BZIP2_MAGICS,
    "lz4": (b"\x04\x22\x4d\x18",),
    "compress": (b"\x1f\x9d",),
}
# The compressions that dlm reads: for ARPA files, and for text.
ARPA_COMPRESSIONS = ("gzip", "zstd", "xz")
TEXT_COMPRESSIONS = (*ARPA_COMPRESSIONS, "bzip2")
_HEAD_BYTES = max(len(magic) for magics in _MAGICS.values() for magic in magics)
# An xz stream chooses the size of its dictionary; `xz -9` needs 65 MiB to decompress.
XZ_MEMORY_BYTES = 512 << 20

_UNPACK_COMMAND = {
    "plain": "cat",
    "gzip": "gzip -dc",
    "zstd": "zstd -dc",
    "xz": "xz -dc",
    "bzip2": "bzip2 -dc",
    "lz4": "lz4 -dc",
    "compress": "uncompress -c",
}


class DamagedStream(Exception):
    """A compressed stream ends early or cannot be decompressed."""


class _Decompressor(Protocol):
    def read1(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class _XzStream:
    """Reads xz strictly: accepts streams and their zero padding, and nothing else after them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = self._new_decoder()

    @staticmethod
    def _new_decoder() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)

    def _after_padding(self, packed: bytes) -> bytes:
        packed = packed.lstrip(b"\0")
        while not packed:
            packed = self._file.read(1 << 16)
            if not packed:
                return b""
            packed = packed.lstrip(b"\0")
        return packed

    def read1(self, size: int, /) -> bytes:
        while True:
            packed = b""
            if self._decoder.eof:
                packed = self._after_padding(self._decoder.unused_data)
                if not packed:
                    return b""
                self._decoder = self._new_decoder()
            elif self._decoder.needs_input:
                packed = self._file.read(1 << 16)
                if not packed:
                    raise EOFError("the xz stream ends before its end marker")
            text = self._decoder.decompress(packed, size)
            if text:
                return text

    def close(self) -> None:
        """Does nothing: the file is the only resource."""


class _ZstdStream:
    def __init__(self, file: BinaryIO) -> None:
        self._stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")

    def read1(self, size: int, /) -> bytes:
        return bytes(self._stream.read(size))

    def close(self) -> None:
        self._stream.close()


class TextSource:
    """Reads the decompressed bytes of a file in any known compression.

    Args        path   a file, anything that opens and reads as one (a pipe), or `-`: standard input
                kinds  compressions to decompress; everything else is "plain"
                file   the open file, if the caller has opened it; it stays open
    Guarantees  the compression is detected from the first bytes, however few arrive at once, and
                never from the name; `compression` names it, and `head` holds the first bytes
    """

    def __init__(
        self, path: str, kinds: Collection[str] = ARPA_COMPRESSIONS, *, file: Any = None
    ) -> None:
        self._owned = file is None and path != "-"
        if file is None:
            file = Path(path).open("rb") if self._owned else sys.stdin.buffer  # noqa: SIM115
        self._file: Any = file
        try:
            head = self._file.read1(_HEAD_BYTES)
            while _may_become_magic(head):
                more = self._file.read1(_HEAD_BYTES - len(head))
                if not more:
                    break
                head += more
            if file.seekable():
                file.seek(-len(head), io.SEEK_CUR)
            else:
                file = io.BufferedReader(_Headed(head, file))
            self.head = head
            found = compression_of(head)
            self.compression = found if found in kinds else "plain"
            self._stream: _Decompressor
            if self.compression == "gzip":
                self._stream = gzip.GzipFile(fileobj=file, mode="rb")
            elif self.compression == "zstd":
                self._stream = _ZstdStream(file)
            elif self.compression == "xz":
                self._stream = _XzStream(file)
            elif self.compression == "bzip2":
                self._stream = bz2.BZ2File(file, "rb")
            else:
                self._stream = file
        except BaseException:
            if self._owned:
                self._file.close()
            raise

    def read(self, size: int) -> bytes:
        """Returns 1 to `size` bytes, or none at the end. Raises DamagedStream if the stream is cut
        short or does not decompress, and OSError if the disk failed."""
        try:
            # Small steps lose the least text where a stream turns out to be cut short.
            step = size if self.compression == "plain" else min(size, 1 << 16)
            return self._stream.read1(step)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, pa.ArrowException) as exc:
            raise DamagedStream(str(exc)) from exc
        except OSError as exc:
            # pyarrow also raises OSError for a bad stream; only the system's errors have a number.
            if exc.errno is not None or self.compression == "plain":
                raise
            raise DamagedStream(str(exc)) from exc

    def waits(self) -> bool:
        """Whether the next read may wait for the writer; always true for a compressed pipe."""
        try:
            number = self._file.fileno()
            if stat.S_ISREG(os.fstat(number).st_mode):
                return False
            return self.compression != "plain" or not select.select([number], [], [], 0)[0]
        except (OSError, ValueError):  # bytes in memory have no descriptor
            return False

    def position(self) -> int:
        """The number of stored bytes read so far from the file; raises `OSError` for a pipe."""
        return int(self._file.tell())

    def close(self) -> None:
        if not self._owned:
            return
        if self._stream is not self._file:
            self._stream.close()
        self._file.close()


class _Headed(io.RawIOBase):
    """A stream that cannot seek, with the bytes that were already read put in front."""

    def __init__(self, head: bytes, rest: Any) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        some = self._head[: len(buffer)] or self._rest.read1(len(buffer))
        self._head = self._head[len(some) :]
        buffer[: len(some)] = some
        return len(some)


def compression_of(head: bytes) -> str:
    """The compression of a text that begins with `head`; "plain" if none is recognised."""
    for name, magics in _MAGICS.items():
        if head.startswith(magics):
            return name
    return "plain"


def _may_become_magic(head: bytes) -> bool:
    return any(
        len(head) < len(magic) and magic.startswith(head)
        for magics in _MAGICS.values()
        for magic in magics
    )


def text_command(path: str, compression: str) -> str:
    return f"{_UNPACK_COMMAND[compression]} {shlex.quote(path)}"


def damage_advice(path: str, compression: str) -> str:
    check = f"{compression} -t {shlex.quote(path)}"
    return f"Copy the file again from its origin; `{check}` checks it"


def recognise(head: bytes, path: str, compression: str) -> tuple[str, str] | None:
    """Returns (what a text is, what to do), if it starts like a known format other than ARPA."""
    text = text_command(path, compression)
    quoted = shlex.quote(path)
    inner = compression_of(head)
    if inner != "plain":
        unpack = f"`{text} | {_UNPACK_COMMAND[inner]} > OUT.arpa`"
        if compression == "plain":
            return f"the file is compressed with {inner}, which dlm does not read", f"Run {unpack}"
        return f"the file is compressed twice, with {compression} over {inner}", f"Run {unpack}"
    if head.startswith((b"PK\x03\x04", b"7z\xbc\xaf\x27\x1c")):
        tool, kind = ("unzip -p", "zip") if head.startswith(b"PK") else ("7z x -so", "7z")
        return (
            f"the file is a {kind} archive, not an ARPA file",
            f"Extract the ARPA file: `{tool} {quoted} > OUT.arpa`",
        )
    if head[257:262] == b"ustar":
        return (
            "the file is a tar archive, not an ARPA file",
            f"Extract the ARPA file: `{text} | tar -xO > OUT.arpa`",
        )
    if head.startswith(b"mmap lm http://kheafield.com/code"):
        return (
            "the file is a KenLM binary model, not an ARPA file",
            f"dlm reads it only from an uncompressed file: run `{text} > OUT.binary`, then `dlm "
            "export OUT.binary --output OUT.arpa`",
        )
    for magic, kind in (
        (b"blmt", "an IRSTLM binary table"),
        (b"Qblmt", "a quantised IRSTLM binary table"),
        (b"iARPA", "an IRSTLM iARPA file"),
        (b"qARPA", "a quantised IRSTLM qARPA file"),
    ):
        if head.startswith(magic):
            return (
                f"the file is {kind}, not an ARPA file",
                f"Run IRSTLM's `compile-lm --text yes {quoted} OUT.arpa` and give OUT.arpa",
            )
    if head.startswith(b"\xef\xbb\xbf"):
        return (
            "the file starts with a UTF-8 byte order mark, which is not part of ARPA",
            f"Remove its three bytes: `{text} | tail -c +4 > OUT.arpa`",
        )
    for width, marks in (
        (32, (b"\xff\xfe\0\0", b"\0\0\xfe\xff")),
        (16, (b"\xff\xfe", b"\xfe\xff", b"\\\0d\0", b"\0\\\0d")),
    ):
        if head.startswith(marks):
            if head.startswith(b"\\"):
                encoding = f"UTF-{width}LE"
            elif head.startswith(b"\0\\"):
                encoding = f"UTF-{width}BE"
            else:
                encoding = f"UTF-{width}"
            return (
                f"the file is UTF-{width} text; expected UTF-8 or another superset of ASCII",
                f"Run `{text} | iconv -f {encoding} -t UTF-8 > OUT.arpa`",
            )
    return None


def guess(head: bytes) -> tuple[str, str] | None:
    r"""Like `recognise`, for a text without `\data\`, by signs too weak to reject a file."""
    lines = head[:4096].split(b"\n")
    if len(lines) > 2 and lines[0].strip().isdigit() and b"\t" in lines[1]:
        return (
            "the file looks like n-gram counts, as from tongrams or a similar tool",
            "Estimate a model from the counts first and give its ARPA file",
        )
    if b"\0" in head[:4096]:
        what = "the file is binary, not text"
        if head[0] & 3 < 3 and head[0] < 0x40:
            # tongrams marks its files with one byte of flags only: structure, values, remapping.
            what += "; its first byte matches a tongrams index"
        return (what, "Give the ARPA file that it was built from")
    return None


def is_reopenable(path: str) -> bool:
    return Path(path).is_file()
