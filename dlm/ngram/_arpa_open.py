"""What a file given as ARPA really is: its compression, and what people mistake for ARPA."""

from __future__ import annotations

import gzip
import lzma
import shlex
import zlib
from pathlib import Path
from typing import BinaryIO, Protocol

import pyarrow as pa

GZIP_MAGIC = b"\x1f\x8b"
XZ_MAGIC = b"\xfd7zXZ\x00"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# An xz stream asks for a dictionary of its own choice; `xz -9` needs 65 MiB to decompress.
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
    """A compressed stream ends early or does not decompress."""


class _Decompressor(Protocol):
    def read1(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class _XzStream:
    """A strict xz reader: several streams and their zero padding, and nothing else after them."""

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
        """Nothing is held besides the file."""


class _ZstdStream:
    def __init__(self, file: BinaryIO) -> None:
        self._stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")

    def read1(self, size: int, /) -> bytes:
        return bytes(self._stream.read(size))

    def close(self) -> None:
        self._stream.close()


class TextSource:
    """The decompressed bytes of a file, whichever of the known ways it is compressed.

    Args
        path  a file, or anything that opens and reads as one (a pipe)
    Raises
        OSError  the file cannot be opened
    Guarantees
        the compression is told from the first bytes, never from the name; `compression` names it
    """

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115 (closed by close)
        try:
            head = self._file.peek(8)[:8]
            self._stream: _Decompressor
            if head.startswith(GZIP_MAGIC):
                self.compression = "gzip"
                self._stream = gzip.GzipFile(fileobj=self._file, mode="rb")
            elif is_zstd(head):
                self.compression = "zstd"
                self._stream = _ZstdStream(self._file)
            elif head.startswith(XZ_MAGIC):
                self.compression = "xz"
                self._stream = _XzStream(self._file)
            else:
                self.compression = "plain"
                self._stream = self._file
        except BaseException:
            self._file.close()
            raise

    def read(self, size: int) -> bytes:
        """At least one and at most `size` bytes; none at the end.

        Raises
            DamagedStream  the compressed stream is cut short or damaged
            OSError        the disk failed
        """
        try:
            # Small steps lose the least text where a stream turns out to be cut short.
            step = size if self.compression == "plain" else min(size, 1 << 16)
            return self._stream.read1(step)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, pa.ArrowException) as exc:
            raise DamagedStream(str(exc)) from exc
        except OSError as exc:
            # pyarrow says OSError for a bad stream too; only the system's own carry a number.
            if exc.errno is not None or self.compression == "plain":
                raise
            raise DamagedStream(str(exc)) from exc

    def close(self) -> None:
        """Close the file."""
        if self._stream is not self._file:
            self._stream.close()
        self._file.close()


def is_zstd(head: bytes) -> bool:
    """Whether `head` opens a zstd frame, or a skippable one as parallel zstd writers put first."""
    return head.startswith(ZSTD_MAGIC) or (
        len(head) >= 4 and head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F
    )


def text_command(path: str, compression: str) -> str:
    """The shell command that prints the text of the file."""
    return f"{_UNPACK_COMMAND[compression]} {shlex.quote(path)}"


def damage_advice(path: str, compression: str) -> str:
    """What to do about a damaged stream."""
    tool = {"gzip": "gzip", "zstd": "zstd", "xz": "xz"}[compression]
    return f"Copy the file again from where it was made; `{tool} -t {shlex.quote(path)}` checks it"


def recognise(head: bytes, path: str, compression: str) -> tuple[str, str] | None:
    """What a text that starts with `head` is, where it is a known kind of not-ARPA.

    Returns
        (what it looks like, what to do about it), or None for a text that may be ARPA
    """
    text = text_command(path, compression)
    quoted = shlex.quote(path)
    inner = None
    if head.startswith(GZIP_MAGIC):
        inner = "gzip"
    elif is_zstd(head):
        inner = "zstd"
    elif head.startswith(XZ_MAGIC):
        inner = "xz"
    elif head.startswith(b"BZh"):
        inner = "bzip2"
    elif head.startswith(b"\x04\x22\x4d\x18"):
        inner = "lz4"
    elif head.startswith(b"\x1f\x9d"):
        inner = "compress"
    if inner is not None:
        unpack = f"`{text} | {_UNPACK_COMMAND[inner]} > OUT.arpa`"
        if compression == "plain":
            return f"the file is compressed with {inner}, which is not read here", f"Run {unpack}"
        return f"the file is compressed twice, with {compression} over {inner}", f"Run {unpack}"
    if head.startswith((b"PK\x03\x04", b"7z\xbc\xaf\x27\x1c")):
        tool, kind = ("unzip -p", "zip") if head.startswith(b"PK") else ("7z x -so", "7z")
        return (
            f"the file is a {kind} archive, not an ARPA file",
            f"Take the ARPA file out of it: `{tool} {quoted} > OUT.arpa`",
        )
    if head[257:262] == b"ustar":
        return (
            "the file is a tar archive, not an ARPA file",
            f"Take the ARPA file out of it: `{text} | tar -xO > OUT.arpa`",
        )
    if head.startswith(b"mmap lm http://kheafield.com/code"):
        return (
            "the file is a KenLM binary model, not an ARPA file",
            "A KenLM binary cannot be turned back into ARPA: give the file it was built from, "
            "the IN.arpa of `build_binary IN.arpa OUT.binary`",
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
                f"Run `compile-lm --text yes {quoted} OUT.arpa` of IRSTLM and give OUT.arpa",
            )
    if head.startswith(b"\xef\xbb\xbf"):
        return (
            "the file starts with a UTF-8 byte order mark, which is no part of ARPA",
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
                f"the file is text in UTF-{width}; ARPA files are bytes, usually UTF-8",
                f"Run `{text} | iconv -f {encoding} -t UTF-8 > OUT.arpa`",
            )
    return None


def guess(head: bytes) -> tuple[str, str] | None:
    """What a text without `\\data\\` probably is, from signs too weak to refuse a file on alone.

    Returns
        (what it looks like, what to do about it), or None without an idea
    """
    lines = head[:4096].split(b"\n")
    if len(lines) > 2 and lines[0].strip().isdigit() and b"\t" in lines[1]:
        return (
            "the file looks like n-gram counts, as tongrams and count tools write them",
            "Estimate a model from the counts first and give its ARPA file",
        )
    if b"\0" in head[:4096]:
        what = "the file is binary, not text"
        if head[0] & 3 < 3 and head[0] < 0x40:
            # tongrams marks its files with one byte of flags only: structure, values, remapping.
            what += "; its first byte would fit a tongrams index"
        return (what, "Give the ARPA file that it was built from")
    return None


def is_reopenable(path: str) -> bool:
    """Whether reading `path` a second time gives the same bytes: false for pipes."""
    return Path(path).is_file()
