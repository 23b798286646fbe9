"""The ARPA reader and writer: every malformed kind, every compression, exact numbers.

Long, since each way in which a file can be wrong is a case with its order, line and byte.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import itertools
import lzma
import os
import random
import threading
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings, strategies as st

from dlm.errors import ArpaError
from dlm.ngram.arpa import (
    ArpaReader,
    ArpaWarning,
    NgramBatch,
    arpa_bytes,
    header as heading,
    lines as line_reader,
    reader as reading,
    source,
    write_arpa,
    writer,
)
from dlm.ngram.arpa.rows import MAX_LINE_BYTES, RowBlock
from dlm.ngram.vocab import Vocabulary

TINY = b"""# made here
#second

\\data\\
ngram 1=5
ngram 2=4
ngram 3=2

\\1-grams:
-1.5\t<unk>
-99\t<s>\t-0.25
-1\t</s>\t0
-0.75\ta\t-0.5
-1.25\tb

\\2-grams:
-0.5\t<s> a\t-0.125
-0.5\ta b
-0.5\tb </s>\t0
-2\ta <unk>\t-1

\\3-grams:
-0.25\t<s> a b
-0.125\ta b </s>

\\end\\
"""

# Words out of id order, an unknown word in the middle, tabs and spaces mixed.
MIXED = (
    b"\\data\\\r\nngram 1 = 4\r\nngram 2=0\r\n\\1-grams:\r\n"
    b"-1 </s>\r\n-2\t\tx\xa0y \t -0.5 \r\n-3\t<UNK>\t-0\r\n-inf <s>\t-1e-3\r\n"
    b"\\2-grams:\r\n\r\n\\end\\\r\n"
)

NBSP = "\u00a0".encode()
IDEOGRAPHIC_SPACE = "\u3000".encode()


def read(path: Path, **options: Any) -> tuple[Vocabulary, list[tuple[Any, Any, Any]]]:
    """Vocabulary and one (ids, probabilities, weights) per order."""
    with ArpaReader(path, **options) as reader:
        return read_all(reader)


def read_all(reader: ArpaReader) -> tuple[Vocabulary, list[tuple[Any, Any, Any]]]:
    parts: list[list[NgramBatch]] = [[] for _ in reader.counts]
    for batch in reader.batches():
        assert batch.first_row == sum(map(len, parts[batch.order - 1]))
        assert batch.ids.dtype == np.uint32
        assert batch.log10_prob.dtype == batch.log10_backoff.dtype == np.float32
        assert batch.ids.shape == (len(batch), batch.order)
        parts[batch.order - 1].append(batch)
    sections = []
    for order, part in enumerate(parts, start=1):
        assert sum(map(len, part)) == reader.counts[order - 1]
        sections.append(
            (
                np.concatenate([b.ids for b in part] or [np.zeros((0, order), np.uint32)]),
                np.concatenate([b.log10_prob for b in part] or [np.zeros(0, np.float32)]),
                np.concatenate([b.log10_backoff for b in part] or [np.zeros(0, np.float32)]),
            )
        )
    return reader.vocabulary, sections


def same(one: Any, other: Any) -> bool:
    """Whether two results of `read` agree in every bit."""
    return one[0] == other[0] and all(
        x.shape == y.shape and x.tobytes() == y.tobytes()
        for left, right in zip(one[1], other[1], strict=True)
        for x, y in zip(left, right, strict=True)
    )


def saved(tmp_path: Path, text: bytes, name: str = "model.arpa") -> Path:
    path = tmp_path / name
    path.write_bytes(text)
    return path


def refusal(tmp_path: Path, text: bytes, **options: Any) -> ArpaError:
    """The error that reading `text` ends in; it must name the file."""
    path = saved(tmp_path, text)
    with pytest.raises(ArpaError) as caught:
        read(path, **options)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)
    return caught.value


def place(text: bytes, fragment: bytes) -> tuple[int, int]:
    """Line number and offset of the line of `text` that starts with `fragment`."""
    offset = 0
    for number, line in enumerate(text.split(b"\n"), start=1):
        if line.startswith(fragment):
            return number, offset
        offset += len(line) + 1
    raise AssertionError(fragment)


def unigrams(rows: bytes, count: int) -> bytes:
    return b"\\data\\\nngram 1=%d\n\n\\1-grams:\n%s\n\\end\\\n" % (count, rows)


def with_numbers(numbers: list[bytes]) -> bytes:
    """A model whose unigrams after <s> and </s> have these probabilities."""
    rows = b"".join(b"%s\tw%d\n" % (number, i) for i, number in enumerate(numbers))
    return unigrams(b"-1\t<s>\n-1\t</s>\n" + rows, len(numbers) + 2)


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstd,
    "xz": lzma.compress,
}


@pytest.fixture(params=["bulk", "one by one"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read in bulk, or each by itself."""
    if request.param == "one by one":
        one_by_one(monkeypatch)


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Has the bulk path stop before each row."""
    patch.setattr(RowBlock, "read_ngrams", lambda *_: None)
    patch.setattr(RowBlock, "read_words", lambda *args: args[-1])


# ------------------------------------------------------------------------------- content


def test_tiny_model_is_read_as_written(tmp_path: Path) -> None:
    """Counts, comments, words, ids and numbers of a model small enough to check by eye."""
    with ArpaReader(saved(tmp_path, TINY)) as reader:
        assert reader.counts == (5, 4, 2)
        assert reader.order == 3
        assert reader.comments == ["made here", "second"]
        assert reader.compression == "plain"
        vocabulary, (one, two, three) = read_all(reader)
    assert vocabulary.words == [b"<unk>", b"<s>", b"</s>", b"a", b"b"]
    assert vocabulary.unk_in_model
    assert one[0].tolist() == [[0], [1], [2], [3], [4]]
    assert one[1].tolist() == [-1.5, -99, -1, -0.75, -1.25]
    assert one[2].tolist() == [0, -0.25, 0, -0.5, 0]
    assert two[0].tolist() == [[1, 3], [3, 4], [4, 2], [3, 0]]
    assert two[2].tolist() == [-0.125, 0, 0, -1]
    assert three[0].tolist() == [[1, 3, 4], [3, 4, 2]]
    assert three[1].tolist() == [-0.25, -0.125]
    assert three[2].tolist() == [0, 0]


def test_size_and_checksum_are_of_the_decompressed_text(tmp_path: Path) -> None:
    """text_bytes and text_xxh3 do not depend on the compression."""
    for name, pack in {"plain": bytes, **COMPRESSORS}.items():
        with ArpaReader(saved(tmp_path, pack(TINY), name)) as reader:
            with pytest.raises(RuntimeError):
                _ = reader.text_bytes
            with pytest.raises(RuntimeError):
                _ = reader.text_xxh3
            read_all(reader)
            assert reader.text_bytes == len(TINY)
            assert reader.text_xxh3 == xxhash.xxh3_128_hexdigest(TINY)


def test_vocabulary_is_refused_before_the_unigrams_are_read(tmp_path: Path) -> None:
    """The vocabulary is complete once the first batch of order 2 comes, and not before."""
    with ArpaReader(saved(tmp_path, TINY), batch_ngrams=4) as reader:
        batches = reader.batches()
        with pytest.raises(RuntimeError):
            _ = reader.vocabulary
        assert next(batches).order == 1
        with pytest.raises(RuntimeError):
            _ = reader.vocabulary
        assert next(batches).order == 1
        assert next(batches).order == 2
        assert len(reader.vocabulary) == 5


def test_file_is_read_once(tmp_path: Path) -> None:
    """A second pass is refused rather than being silently empty."""
    with ArpaReader(saved(tmp_path, TINY)) as reader:
        read_all(reader)
        with pytest.raises(RuntimeError):
            reader.batches()


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_batch_size_changes_nothing_but_the_batches(tmp_path: Path, rows: int) -> None:
    """Content is the same at any batch size, and no batch is larger."""
    path = saved(tmp_path, TINY)
    assert same(read(path, batch_ngrams=rows), read(path))
    with ArpaReader(path, batch_ngrams=rows) as reader:
        assert all(len(batch) <= rows for batch in reader.batches())


def test_batch_size_of_zero_is_refused(tmp_path: Path) -> None:
    """A batch holds at least one n-gram."""
    with pytest.raises(ValueError, match="batch_ngrams"):
        ArpaReader(saved(tmp_path, TINY), batch_ngrams=0)


@pytest.mark.parametrize("chunk", [1, 7])
def test_block_edges_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """A line may be cut anywhere by the blocks the file is read in."""
    for text in (TINY, MIXED, TINY.replace(b"\n", b"\r\n")):
        path = saved(tmp_path, text)
        whole = read(path)
        with monkeypatch.context() as patch:
            patch.setattr(line_reader, "CHUNK_BYTES", chunk)
            patch.setattr(source, "recognise", lambda *_: None)
            assert same(read(path), whole)


def test_spaces_tabs_and_runs_of_them_separate_fields(tmp_path: Path) -> None:
    """Runs of separators, and separators at line ends, are one separator; NBSP is a word byte."""
    vocabulary, (one, two) = read(saved(tmp_path, MIXED))
    assert vocabulary.words == [b"<UNK>", b"</s>", b"x\xa0y", b"<s>"]
    assert one[0].tolist() == [[1], [2], [0], [3]]
    assert one[1].tolist() == [-1, -2, -3, -np.inf]
    assert one[2].tolist() == [0, -0.5, 0, np.float32(-0.001)]
    assert two[0].shape == (0, 2)


@pytest.mark.parametrize("odd", [NBSP, IDEOGRAPHIC_SPACE, b"\v", b"\f", b"\x1c", b"\x85", b"\0"])
def test_other_spaces_are_word_characters(tmp_path: Path, odd: bytes) -> None:
    """Only space and tab separate fields: not what Unicode or C call a space."""
    text = TINY.replace(b"b", b"x" + odd + b"y")
    vocabulary, sections = read(saved(tmp_path, text))
    assert vocabulary.words[4] == b"x" + odd + b"y"
    assert sections[2][0].tolist() == [[1, 3, 4], [3, 4, 2]]


def test_model_without_unknown_word_has_no_row_zero(tmp_path: Path) -> None:
    """Id 0 stays the unknown word, spelled <unk>, and unk_in_model says that it has no row."""
    text = unigrams(b"-1\t<s>\n-2\t</s>\n-3\tw\n", 3)
    vocabulary, (one,) = read(saved(tmp_path, text))
    assert vocabulary.words == [b"<unk>", b"<s>", b"</s>", b"w"]
    assert not vocabulary.unk_in_model
    assert one[0].tolist() == [[1], [2], [3]]


def test_both_spellings_of_the_unknown_word_are_id_zero(tmp_path: Path) -> None:
    """An n-gram may say <UNK> where the unigrams say <unk>."""
    _, sections = read(saved(tmp_path, TINY.replace(b"a <unk>", b"a <UNK>")))
    assert sections[1][0].tolist()[3] == [3, 0]


def test_empty_orders_are_legal_with_and_without_header(tmp_path: Path) -> None:
    """A section of no n-grams may be announced, or left out, in the middle and at the end."""
    base = b"\\data\\\nngram 1=2\nngram 2=0\nngram 3=0\n\n\\1-grams:\n-1\t<s>\t-1\n-1\t</s>\n\n"
    for headers in (b"", b"\\2-grams:\n\n", b"\\3-grams:\n", b"\\2-grams:\n\\3-grams:\n\n"):
        vocabulary, sections = read(saved(tmp_path, base + headers + b"\\end\\\n"))
        assert len(vocabulary) == 3
        assert [len(ids) for ids, _, _ in sections] == [2, 0, 0]
    middle = base.replace(b"3=0", b"3=1") + b"\\2-grams:\n\n\\3-grams:\n-1\t<s> <s> </s>\n\\end\\\n"
    assert [len(ids) for ids, _, _ in read(saved(tmp_path, middle))[1]] == [2, 0, 1]


def test_negative_zero_is_read_as_zero(tmp_path: Path) -> None:
    """KenLM's flag of a sign is not kept: no value has the bits of -0.0."""
    text = unigrams(b"-0\t<s>\t-0.0\n-0.0\t</s>\t-0\n-1e-60\tw\t-1e-400\n", 3)
    text = text.replace(b"ngram 1=3", b"ngram 1=3\nngram 2=0")
    _, sections = read(saved(tmp_path, text))
    for column in sections[0][1:]:
        assert not np.signbit(column).any()
        assert column.tolist() == [0, 0, 0]


def test_comments_keep_bytes_that_are_not_text(tmp_path: Path) -> None:
    """Bytes of a comment come back as surrogate escapes."""
    with ArpaReader(saved(tmp_path, b"#\xff\xfe\n" + TINY)) as reader:
        assert reader.comments[0].encode("utf-8", "surrogateescape") == b"\xff\xfe"


def test_pipe_is_read(tmp_path: Path) -> None:
    """A file that cannot be read twice or sought is read all the same, compressed or not."""
    for name, pack in {"plain": bytes, **COMPRESSORS}.items():
        path = tmp_path / name
        os.mkfifo(path)
        writer = threading.Thread(target=path.write_bytes, args=(pack(TINY),))
        writer.start()
        with ArpaReader(path) as reader:
            read_all(reader)
            error = reader.error_at("found", order=2, row=1)
        writer.join()
        assert (error.line, error.byte_offset) == (18, None)


def test_error_at_names_the_place_of_a_row(tmp_path: Path) -> None:
    """A fault only the caller can see is reported at the line and offset of its row."""
    for pack in (bytes, *COMPRESSORS.values()):
        path = saved(tmp_path, pack(TINY))
        with ArpaReader(path) as reader:
            with pytest.raises(ValueError, match="3-gram"):
                reader.error_at("x", order=3, row=0)
            read_all(reader)
            error = reader.error_at("no prefix", order=3, row=1, advice="Repair it")
        assert (error.path, error.order, error.advice) == (str(path), 3, "Repair it")
        assert (error.line, error.byte_offset) == place(TINY, b"-0.125\ta b </s>")


# ------------------------------------------------------------------------------- numbers


def nearest_float32(text: str) -> np.float32:
    """The float32 nearest to a decimal, ties to even, by exact fractions: the oracle."""
    value = Fraction(text)
    near = np.float32(float(value))
    with np.errstate(over="ignore"):
        around = [near, *(np.nextafter(near, np.float32(end)) for end in (-np.inf, np.inf))]
    return min(
        (x for x in around if np.isfinite(x)),
        key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1),
    ) + np.float32(0)


def exact_decimal(value: Fraction) -> str:
    """All decimal digits of a fraction whose denominator is a power of two."""
    digits = 0
    while value.denominator != 1:
        value *= 10
        digits += 1
    text = str(abs(value.numerator)).rjust(digits + 1, "0")
    return "-" + (f"{text[:-digits]}.{text[-digits:]}" if digits else text)


def midpoint_texts(seed: int, count: int) -> list[str]:
    """Decimals at and just beside the midpoints of random neighbouring float32."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 0x7F7FFFFF, count, dtype=np.uint32)
    bits[:20] = [0, 1, 2, 3, 0x7FFFFE, 0x7FFFFF, 0x800000, 0x800001, *range(0x3F800000, 0x3F80000C)]
    texts = []
    for low in bits.tolist():
        one, two = np.array([low, low + 1], np.uint32).view(np.float32).tolist()
        middle = exact_decimal((Fraction(one) + Fraction(two)) / 2)
        dotted = middle if "." in middle else middle + ".0"
        texts += [middle, dotted + "0" * 30 + "1", dotted + "0" * 3]
        below = dotted.rstrip("0")
        if not below.endswith("."):
            texts.append(below[:-1] + str(int(below[-1]) - 1) + "9" * 30)
    return texts


@pytest.mark.usefixtures("either_way")
def test_numbers_at_float32_midpoints_are_rounded_once(tmp_path: Path) -> None:
    """Decimals a hair from a midpoint go to the nearest float32, where two roundings would not."""
    texts = midpoint_texts(1, 400)
    _, sections = read(saved(tmp_path, with_numbers([t.encode() for t in texts])))
    expected = np.array([nearest_float32(t) for t in texts])
    got = sections[0][1][2:]
    assert got.tobytes() == expected.tobytes()
    twice = np.array([float(t) for t in texts]).astype(np.float32)
    assert (twice != expected).any()


@pytest.mark.usefixtures("either_way")
def test_ordinary_numbers_are_the_nearest_float32(tmp_path: Path) -> None:
    """Random decimals of every length and size agree with exact arithmetic."""
    rng = random.Random(2)
    texts = ["-0", "-00.50", "-1.", "-.5", "-1e-45", "-7e-46", "-3.4028235e38", "-1E+2", "-2e-320"]
    for _ in range(500):
        digits = "".join(rng.choices("0123456789", k=rng.randint(1, 25)))
        texts.append(f"-{rng.randint(0, 99)}.{digits}e{rng.randint(-50, 35)}")
    _, sections = read(saved(tmp_path, with_numbers([t.encode() for t in texts])))
    expected = np.array([nearest_float32(t) for t in texts])
    assert sections[0][1][2:].tobytes() == expected.tobytes()


def test_number_of_many_digits_is_read_exactly(tmp_path: Path) -> None:
    """Half a million digits at a midpoint are neither refused nor slow nor rounded twice."""
    middle = exact_decimal(Fraction(1) + Fraction(1, 2**24))
    texts = [middle + "0" * 500_000, middle + "0" * 500_000 + "1"]
    _, sections = read(saved(tmp_path, with_numbers([t.encode() for t in texts])))
    assert sections[0][1][2:].tolist() == [-1.0, float(np.float32(-1.0000001))]


@pytest.mark.parametrize(
    "number",
    [
        "nan", "-nan", "NaN", "inf", "+inf", "infinity", "-infinity", "-1_000", "-0x1p3", "-1e",
        "-", "-e5", "--1", "-1.2.3", "-1e39", "-1e400", "-3.4028236e38", "1e-3", "0.5", "-١", "-1f",
        "-1,5", "-1d0", "\\1", "word", "-1\v", "\f-1",
    ],
)  # fmt: skip
def test_texts_that_are_no_log_probability_are_refused(tmp_path: Path, number: str) -> None:
    """Neither what only Python reads as a number, nor NaN, nor a positive or overflowing one."""
    text = with_numbers([b"-1", number.encode(), b"-2"])
    error = refusal(tmp_path, text)
    expected = place(text, number.encode() + b"\tw1")
    assert (error.order, error.line, error.byte_offset) == (1, *expected)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1_0", "0x1", "1e39", "infinity", "w"])
def test_texts_that_are_no_backoff_weight_are_refused(tmp_path: Path, number: str) -> None:
    """A backoff weight is finite."""
    text = TINY.replace(b"<s> a\t-0.125", b"<s> a\t" + number.encode())
    error = refusal(tmp_path, text)
    assert (error.order, error.line, error.byte_offset) == (2, *place(text, b"-0.5\t<s> a"))


def test_weights_above_1_and_probabilities_of_zero_are_accepted(tmp_path: Path) -> None:
    """A positive weight is usual in Kneser-Ney models; -inf may be in any case of letters."""
    _, sections = read(saved(tmp_path, TINY.replace(b"<s> a\t-0.125", b"<s> a\t+0.125")))
    assert sections[1][2][0] == 0.125
    _, sections = read(saved(tmp_path, with_numbers([b"-inf", b"-INF", b"-Inf", b"-99"])))
    assert sections[0][1][2:].tolist() == [-np.inf, -np.inf, -np.inf, -99]


# ------------------------------------------------------------------------- malformed rows

ROW_FAULTS: dict[str, tuple[bytes, bytes, int, bytes, str]] = {
    "too many words": (b"-0.5\ta b\n", b"-0.5\ta b a b\n", 2, b"-0.5\ta b a b", "found 4 fields"),
    "a word more": (b"-0.5\ta b\n", b"-0.5\ta b a\n", 2, b"-0.5\ta b a", "3-gram"),
    "a word less": (b"-0.5\ta b\n", b"-0.5\ta\n", 2, b"-0.5\ta\n"[:-1], "found 1 field"),
    "no word": (b"-1.25\tb\n", b"-1.25\n", 1, b"-1.25", "found 0 fields"),
    "no probability": (b"-0.5\ta b\n", b"a b\n", 2, b"a b", 'found "a"'),
    "unknown word": (b"b </s>\t0", b"c </s>\t0", 2, b"-0.5\tc </s>", '"c" '),
    "backoff at the top": (b"<s> a b\n", b"<s> a b -0.5\n", 3, b"-0.25\t<s> a b", "highest order"),
    "duplicate word": (b"-1.25\tb\n", b"-1.25\ta\n", 1, b"-1.25\ta", 'line 13'),
    "duplicate unk": (b"-1.25\tb\n", b"-1\t<unk>\n", 1, b"-1\t<unk>", "line 10"),
    "both unks": (b"-1.25\tb\n", b"-1\t<UNK>\n", 1, b"-1\t<UNK>", "line 10"),
    "return in a line": (b"-0.5\ta b\n", b"-0.5\ta\rb\n", 2, b"-0.5\ta\rb", "carriage return"),
    "two returns": (b"-0.5\ta b\n", b"-0.5\ta b\r\r\n", 2, b"-0.5\ta b\r\r", "carriage return"),
    "blank line": (b"-0.5\ta b\n", b" \n-0.5\ta b\n", 2, b" ", "2-gram"),
    "too few, then a header": (b"-0.5\ta b\n", b"", 2, b"", "promises 4 2-grams, found 3"),
    "too many": (b"-0.5\ta b\n", b"-0.5\ta b\n" * 3, 2, b"-0.5\tb </s>", "4 2-grams, found 6"),
    "too many at the end": (
        b"-0.125\ta b </s>\n",
        b"-0.125\ta b </s>\n-3\ta a a\n",
        3,
        b"-3\ta a a",
        "2 3-grams, found 3",
    ),
    "header in a section": (b"-0.5\ta b\n", b"\\3-grams:\n", 2, b"\\3-grams:", "found 1"),
    "end in a section": (b"-0.5\ta b\n", b"\\end\\\n", 2, b"\\end\\", "found 1"),
    "rows after a blank line": (
        b"-2\ta <unk>\t-1\n",
        b"-2\ta <unk>\t-1\n\n-2\tb b\n",
        2,
        b"-2\tb b",
        "header",
    ),
}  # fmt: skip


@pytest.mark.promise("malformed_arpa")
@pytest.mark.parametrize("kind", ROW_FAULTS)
@pytest.mark.parametrize("rows", [1, 65536])
def test_faulty_row_is_refused_with_its_place(tmp_path: Path, kind: str, rows: int) -> None:
    """Each malformed row is named by section, line and offset, at any batch size."""
    old, new, order, fragment, message = ROW_FAULTS[kind]
    assert TINY.count(old) == 1
    text = TINY.replace(old, new)
    error = refusal(tmp_path, text, batch_ngrams=rows)
    assert message in str(error)
    assert error.order == order
    if kind == "too few, then a header":
        assert (error.line, error.byte_offset) == (20, text.index(b"\n\n\\3-grams:") + 1)
    elif kind == "blank line":
        assert (error.line, error.byte_offset) == (18, text.index(b" \n-0.5\ta b\n"))
    else:
        assert (error.line, error.byte_offset) == place(text, fragment)


def test_unknown_word_in_an_ngram_needs_a_unigram(tmp_path: Path) -> None:
    """<unk> in a bigram is refused where the unigrams have none."""
    text = TINY.replace(b"-1.5\t<unk>\n", b"").replace(b"1=5", b"1=4")
    for spelling in (b"<unk>", b"<UNK>"):
        faulty = text.replace(b"a <unk>", b"a " + spelling)
        error = refusal(tmp_path, faulty)
        assert (error.order, error.line, error.byte_offset) == (2, *place(faulty, b"-2\ta <"))


def test_duplicate_word_across_batches_names_the_first_line(tmp_path: Path) -> None:
    """The line of the first occurrence is right before and after the row of the unknown word."""
    rows = b"-1\tx\n-1\t<s>\n-1\t<unk>\n-1\ty\n-1\t</s>\n-1\t%s\n"
    for word, line in ((b"x", 5), (b"<s>", 6), (b"<unk>", 7), (b"<UNK>", 7), (b"y", 8)):
        for batch in (1, 2, 10):
            error = refusal(tmp_path, unigrams(rows % word, 6), batch_ngrams=batch)
            assert f"line {line}" in error.args[0].split("(/")[0]
            assert error.line == 10


@pytest.mark.parametrize("missing", [b"<s>", b"</s>"])
def test_model_without_sentence_boundaries_is_refused(tmp_path: Path, missing: bytes) -> None:
    """The message names the missing word and what to do."""
    text = unigrams(b"-1\t<s>\n-1\t</s>\n-1\ta\n".replace(missing, b"<>"), 3)
    error = refusal(tmp_path, text)
    assert f"lack {missing.decode()}" in str(error)
    assert error.order == 1
    assert error.line == 8
    assert error.advice is not None
    assert f"-99 {missing.decode()}" in error.advice


def test_line_beyond_the_cap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long line is refused in a row, in the header, at the end, and before it is all read."""
    long = b"x" * (MAX_LINE_BYTES + 1)
    for old, order in ((b"ngram 2=4", None), (b"-0.5\ta b", 2), (b"-0.5\t<s> a", 2)):
        text = TINY.replace(old, old + long)
        error = refusal(tmp_path, text)
        assert "longer than" in str(error)
        assert (error.order, error.line, error.byte_offset) == (order, *place(text, old))
    assert "longer than" in str(refusal(tmp_path, TINY + long))
    assert "longer than" in str(refusal(tmp_path, long * 12))
    text = TINY.replace(b"-0.5\ta b\n", b"-0.5\t" + long * 12)
    error = refusal(tmp_path, text)
    assert (error.line, error.byte_offset) == place(text, b"-0.5\tx")


def test_memory_does_not_grow_with_an_endless_line(tmp_path: Path) -> None:
    """A compressed file of 256 MiB without a line end is refused after a few megabytes."""
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(TINY[: TINY.index(b"-0.5\ta b")])
        for _ in range(64):
            file.write(bytes(4 << 20))
    with ArpaReader(path) as reader, pytest.raises(ArpaError, match="longer than"):
        read_all(reader)
    assert reader._text.text_bytes < 32 << 20


# ------------------------------------------------------------------------------ malformed header

HEADER_FAULTS: dict[str, tuple[bytes, bytes, int | None, bytes | None, str]] = {
    "text first": (b"#second", b"second", None, b"second", "expected \\data\\"),
    "no data": (b"\\data\\", b"", None, b"ngram 1", "expected \\data\\"),
    "orders swapped": (b"ngram 2=4", b"ngram 3=4", None, b"ngram 3=4", "order 2"),
    "starts at two": (b"ngram 1=5\n", b"", None, b"ngram 2=4", "order 1"),
    "no number": (b"ngram 2=4", b"ngram 2=x", None, b"ngram 2=x", "ngram 2"),
    "two numbers": (b"ngram 2=4", b"ngram 2=4 4", None, b"ngram 2=4 4", "ngram 2"),
    "negative": (b"ngram 2=4", b"ngram 2=-4", 2, b"ngram 2=-4", "not credible"),
    "absurd": (b"ngram 2=4", b"ngram 2=1099511627777", 2, b"ngram 2=1099", "not credible"),
    "too many words": (b"ngram 1=5", b"ngram 1=4294967295", 1, b"ngram 1=42", "not credible"),
    "very long": (b"ngram 2=4", b"ngram 2=" + b"9" * 5000, 2, b"ngram 2=9", "not credible"),
    "no counts": (
        b"ngram 1=5\nngram 2=4\nngram 3=2\n",
        b"",
        None,
        b"\\1-grams:",
        "no count follows",
    ),
    "no first section": (b"\\1-grams:", b"\\2-grams:", 1, b"\\2-grams:", "expected \\1-grams:"),
    "no second section": (b"\\2-grams:", b"\\4-grams:", 2, b"\\4-grams:", "expected \\2-grams:"),
    "odd header": (b"\\2-grams:", b"\\2-gram", 2, b"\\2-gram", "expected \\2-grams:"),
    "a section too many": (b"\\end\\", b"\\4-grams:", None, b"\\4-grams:", "expected \\end\\"),
    "text at the end": (b"\\end\\\n", b"\\end\\\n\nmore\n", None, b"more", "text after \\end\\"),
    "a second model": (b"\\end\\\n", b"\\end\\\n\\1-grams:\n", None, None, "text after \\end\\"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADER_FAULTS)
def test_faulty_header_is_refused_with_its_place(tmp_path: Path, kind: str) -> None:
    """Each fault outside the rows is named by line and offset, and by order where it has one."""
    old, new, order, fragment, message = HEADER_FAULTS[kind]
    text = TINY.replace(old, new)
    error = refusal(tmp_path, text)
    assert message in str(error)
    assert error.order == order
    if fragment is None:
        assert (error.line, error.byte_offset) == (27, text.rindex(b"\\1-grams:"))
    else:
        assert (error.line, error.byte_offset) == place(text, fragment)


def test_absurd_count_reserves_no_memory(tmp_path: Path) -> None:
    """A header that promises a trillion n-grams is believed only as far as rows come."""
    text = TINY.replace(b"ngram 3=2", b"ngram 3=%d" % (1 << 40))
    assert "found 2" in str(refusal(tmp_path, text))


def test_what_has_no_ngrams_is_refused(tmp_path: Path) -> None:
    """A file that stops after the header, or has none, is truncated and not an empty model; order 1
    cannot be empty, with or without its header."""
    for text in (b"\n\n", b"# only\n", b"\\data\\\n", b"\\data\\\nngram 1=3\n"):
        assert refusal(tmp_path, text).line is not None
    for header in (b"", b"\\1-grams:\n\n"):
        error = refusal(tmp_path, b"\\data\\\nngram 1=0\n\n" + header + b"\\end\\\n")
        assert error.order == 1


def test_endless_preamble_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments before the model are bounded."""
    monkeypatch.setattr(heading, "MAX_HEADER_BYTES", 1000)
    assert "section" in str(refusal(tmp_path, b"# again\n" * 1000 + TINY))


# ---------------------------------------------------------------------------- truncation


@pytest.mark.parametrize(
    "text", [TINY, TINY.replace(b"\n", b"\r\n"), MIXED], ids=["unix", "dos", "mixed"]
)
def test_truncation_at_every_byte_is_noticed(tmp_path: Path, text: bytes) -> None:
    """A cut file is refused, or is whole but for its \\end\\, and then a warning says so."""
    whole = read(saved(tmp_path, text))
    warned = 0
    for length in range(len(text)):
        path = saved(tmp_path, text[:length])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = read(path)
            except ArpaError as error:
                assert error.path == str(path)
                assert length == 0 or error.byte_offset is not None
                continue
        assert same(result, whole)
        if b"\\end\\" not in text[:length]:
            assert [w.category for w in caught] == [ArpaWarning]
            warned += 1
    assert warned > 0


def test_missing_end_warns_at_the_caller(tmp_path: Path) -> None:
    """A model complete but for \\end\\ is read, with a warning."""
    path = saved(tmp_path, TINY.replace(b"\\end\\\n", b""))
    with pytest.warns(ArpaWarning, match=r"\\end\\") as caught:
        read(path)
    assert caught[0].filename == __file__


def test_truncation_inside_a_section_says_what_was_found(tmp_path: Path) -> None:
    """The message gives the promised and the found count, and the place of the cut."""
    text = TINY[: TINY.index(b"b </s>\t0")]
    error = refusal(tmp_path, text)
    assert "promises 4 n-grams, found 2" in str(error)
    assert "row" in str(error)
    assert (error.order, error.line, error.byte_offset) == (2, 19, text.rindex(b"\n") + 1)


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_truncated_compressed_file_is_an_arpa_error(tmp_path: Path, kind: str) -> None:
    """A compressed stream cut at any byte is refused; never an EOFError or OSError."""
    packed = COMPRESSORS[kind](TINY)
    for length in range(1, len(packed)):
        error = refusal(tmp_path, packed[:length])
        if length >= 8:
            assert "damaged" in str(error)
            assert error.line is not None
            assert error.byte_offset is not None
            assert kind in str(error.advice)


# --------------------------------------------------------------------------- compression


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_compression_is_recognised_by_content(tmp_path: Path, kind: str, parts: int) -> None:
    """One stream or several in a row, under any name."""
    size = -(-len(TINY) // parts)
    pieces = [TINY[i : i + size] for i in range(0, len(TINY), size)]
    packed = b"".join(map(COMPRESSORS[kind], pieces))
    path = saved(tmp_path, packed, "plain.arpa")
    assert same(read(path), read(saved(tmp_path, TINY)))
    with ArpaReader(path) as reader:
        assert reader.compression == kind


HALF = len(TINY) // 2
ZSTD_PADDING = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # a skippable frame
SAME = {
    "carriage returns": TINY.replace(b"\n", b"\r\n"),
    # A backoff column of zeros at the highest order says nothing, and is legal, as in KenLM.
    **{
        f"backoff {zero!r}": TINY.replace(b"<s> a b\n", b"<s> a b\t" + zero + b"\n")
        for zero in (b"0", b"-0.0", b"0e5")
    },
    "xz padding": lzma.compress(TINY[:HALF]) + bytes(8) + lzma.compress(TINY[HALF:]) + bytes(4),
    "gzip padding": gzip.compress(TINY) + bytes(512),
    "zstd padding": ZSTD_PADDING + zstd(TINY),
}


@pytest.mark.parametrize("how", SAME)
def test_what_says_nothing_changes_nothing(tmp_path: Path, how: str) -> None:
    """In the text, and between the streams of a compressed file."""
    assert same(read(saved(tmp_path, SAME[how])), read(saved(tmp_path, TINY)))


def with_wrong_checksum(packed: bytes, at: int) -> bytes:
    """A compressed stream with a bit of its checksum flipped, `at` from its end."""
    return packed[:-at] + bytes([packed[-at] ^ 1]) + packed[len(packed) - at + 1 :]


DAMAGED = {
    **{f"garbage after {kind}": pack(TINY) + b"garbage" for kind, pack in COMPRESSORS.items()},
    "checksum of gzip": with_wrong_checksum(gzip.compress(TINY), 6),
    "checksum of xz": with_wrong_checksum(lzma.compress(TINY), 14),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_what_is_wrong_after_the_last_byte_of_the_text_is_refused(tmp_path: Path, how: str) -> None:
    """Bytes that are no further stream, and the checksum of a stream, looked at after \\end\\."""
    assert "damaged" in str(refusal(tmp_path, DAMAGED[how]))


# --------------------------------------------------------------------- what is not ARPA

NOT_ARPA: dict[str, tuple[bytes, str, str]] = {
    "gzip in gzip": (gzip.compress(gzip.compress(TINY)), "twice", "gzip -dc {} | gzip -dc >"),
    "zstd in xz": (lzma.compress(zstd(TINY)), "twice", "xz -dc {} | zstd -dc >"),
    "xz in zstd": (zstd(lzma.compress(TINY)), "twice", "zstd -dc {} | xz -dc >"),
    "bzip2": (bz2.compress(TINY), "bzip2", "cat {} | bzip2 -dc >"),
    "lz4": (b"\x04\x22\x4d\x18rest", "lz4", "lz4 -dc"),
    "compress": (b"\x1f\x9d\x90rest", "compress", "uncompress -c"),
    "zip": (b"PK\x03\x04rest", "zip archive", "unzip -p {}"),
    "7z": (b"7z\xbc\xaf\x27\x1crest", "7z archive", "7z x -so {}"),
    "tar in gzip": (gzip.compress(b"lm.arpa".ljust(257, b"\0") + b"ustar\0"), "tar", "| tar -xO"),
    "KenLM": (
        b"mmap lm http://kheafield.com/code format version 5\n\0rest",
        "KenLM binary",
        "dlm export OUT.binary",
    ),
    "IRSTLM binary": (b"blmt 3 1 2 3\n", "IRSTLM", "compile-lm --text yes {} OUT.arpa"),
    "IRSTLM quantised": (b"Qblmt 3 1 2 3\n", "IRSTLM", "compile-lm --text yes {} OUT.arpa"),
    "IRSTLM text": (b"iARPA\n\n\\data\\\n", "iARPA", "compile-lm --text yes {} OUT.arpa"),
    "IRSTLM quantised text": (b"qARPA 3\n", "qARPA", "compile-lm --text yes {} OUT.arpa"),
    "UTF-8 mark": (b"\xef\xbb\xbf" + TINY, "UTF-8", "cat {} | tail -c +4 >"),
    "UTF-8 mark in gzip": (gzip.compress(b"\xef\xbb\xbf" + TINY), "mark", "gzip -dc {} | tail"),
    "UTF-16": (TINY.decode().encode("utf-16"), "UTF-16", "iconv -f UTF-16 -t UTF-8"),
    "UTF-16 big": (b"\xfe\xff" + TINY.decode().encode("utf-16-be"), "UTF-16", "-f UTF-16 -t"),
    "UTF-16 no mark": ("\\data\\\n".encode("utf-16-le"), "UTF-16", "iconv -f UTF-16LE"),
    "UTF-16BE no mark": ("\\data\\\n".encode("utf-16-be"), "UTF-16", "iconv -f UTF-16BE"),
    "UTF-32": (TINY.decode().encode("utf-32"), "UTF-32", "iconv -f UTF-32 -t UTF-8"),
    "tongrams index": (b"\x05\x03\0\0\0\0\0\0\0\x10\0", "tongrams index", "built from"),
    "binary": (b"\x7fELF\0\0\0", "binary", "built from"),
    "counts": (b"3\na\t1\nb\t2\n", "n-gram counts", "Estimate"),
    "nothing in gzip": (gzip.compress(b""), "empty", "rebuild"),
    "nothing": (b"", "empty", "rebuild"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_ARPA)
def test_what_is_not_arpa_is_recognised(tmp_path: Path, kind: str) -> None:
    """The error says what the file looks like, and the command that helps, fit for a shell."""
    content, what, advice = NOT_ARPA[kind]
    path = saved(tmp_path, content, "my model.arpa")
    with pytest.raises(ArpaError) as caught:
        ArpaReader(path)
    error = caught.value
    assert what in str(error)
    assert error.advice is not None
    assert advice.format(f"'{path}'") in error.advice
    if what != "empty":
        assert (error.line, error.byte_offset) == (1, 0)


def test_directory_is_refused(tmp_path: Path) -> None:
    """A directory is named as one."""
    with pytest.raises(ArpaError, match="directory") as caught:
        ArpaReader(tmp_path)
    assert caught.value.line is None


# --------------------------------------------------------------------------- random damage


def test_flipped_bytes_never_end_in_another_exception(tmp_path: Path) -> None:
    """Damaged text is refused or is another model; nothing else is ever raised."""
    rng = random.Random(4)
    for text, pack in itertools.product((TINY, MIXED), (bytes, gzip.compress, zstd, lzma.compress)):
        packed = pack(text)
        for _ in range(60):
            damaged = bytearray(packed)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] = rng.choice(
                    [rng.randrange(256), *b"\n\t \\-1"]
                )
            path = saved(tmp_path, bytes(damaged))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ArpaWarning)
                try:
                    read(path)
                except ArpaError as error:
                    assert error.path == str(path)
                    assert error.line is not None
                    assert error.byte_offset is not None


ROWS = st.lists(
    st.tuples(
        st.sampled_from([b"-1", b"-0.5", b"0", b"-1.5e-3", b"-inf", b"1", b"x", b"-16777217"]),
        st.lists(
            st.sampled_from([b"a", b"b", b"<s>", b"</s>", b"<unk>", b"<UNK>", b"\v", b"zz", b"-2"]),
            min_size=1,
            max_size=3,
        ),
        st.sampled_from([b"", b"\t-0.5", b" 0", b"\t-0", b" nan", b"\r", b"\t "]),
        st.sampled_from([b"\t", b" ", b" \t "]),
    ),
    max_size=6,
)


def outcome(path: Path, batch: int) -> tuple[Any, Any]:
    """What reading comes to: the content, or the text of the error."""
    try:
        return read(path, batch_ngrams=batch), None
    except ArpaError as error:
        return None, str(error)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rows=ROWS, batch=st.sampled_from([1, 2, 100]))
def test_bulk_and_careful_reading_agree(
    tmp_path: Path, rows: list[tuple[bytes, list[bytes], bytes, bytes]], batch: int
) -> None:
    """Both ways through the rows give the same content, or the same error at the same place."""
    lines: dict[int, list[bytes]] = {1: [], 2: [], 3: []}
    for prob, words, tail, gap in rows:
        lines[len(words)].append(prob + gap + b" ".join(words) + tail + b"\n")
    for word in (b"<s>", b"</s>", b"a", b"b", b"\v"):
        if not any(word in line for line in lines[1]):
            lines[1].append(b"-1\t%s\t-2\n" % word)
    text = b"\\data\\\n" + b"".join(b"ngram %d=%d\n" % (k, len(v)) for k, v in lines.items())
    for k, v in lines.items():
        text += b"\\%d-grams:\n" % k + b"".join(v) + b"\n"
    path = saved(tmp_path, text + b"\\end\\\n")
    quick = outcome(path, batch)
    with pytest.MonkeyPatch.context() as patch:
        one_by_one(patch)
        careful = outcome(path, batch)
    assert quick[1] == careful[1]
    if quick[0] is not None:
        assert same(quick[0], careful[0])


def test_regular_rows_take_the_bulk_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed back-off columns, -inf and the unknown word need no look at single lines."""
    monkeypatch.setattr(ArpaReader, "_one_by_one", None)
    text = TINY.replace(b"-99\t", b"-inf\t").replace(b"a <unk>", b"a <UNK>")
    read(saved(tmp_path, text), batch_ngrams=2)
    read(saved(tmp_path, text.replace(b"\n", b"\r\n")))


# -------------------------------------------------------------------------------- threads


@cache
def many_rows(seed: int, odd: bool) -> bytes:
    """A model of some thousand rows; where `odd`, every tenth is one to be read by itself."""
    rng = random.Random(seed)
    words = [b"<s>", b"</s>", b"<unk>", *(b"w%d" % i for i in range(700))]
    words += [b"word-of-a-length-%d" % i for i in range(300)]
    unusual = [*midpoint_texts(seed, 20), "-1e-40", "-0.00000000000000000000000000001e-20"]

    def number() -> bytes:
        if odd and rng.random() < 0.1:
            return rng.choice(unusual).encode()
        return b"%.*g" % (rng.randint(1, 12), -rng.random() * 10)

    rows = {1: [b"%b\t%b\t%b" % (number(), w, number()) for w in words]}
    for k in (2, 3, 4):
        rows[k] = []
        for _ in range(1500):
            row = number() + b"\t" + b" ".join(rng.choices(words, k=k))
            if k < 4 and rng.random() < 0.6:
                row += b"\t" + number()
            rows[k].append(row)
    text = b"\\data\\\n" + b"".join(b"ngram %d=%d\n" % (k, len(v)) for k, v in rows.items())
    for k, v in rows.items():
        text += b"\n\\%d-grams:\n" % k + b"\n".join(v) + b"\n"
    return text + b"\n\\end\\\n"


def reading_threads() -> int:
    """Threads that a reader started and that are still there."""
    return sum(thread.name.startswith("dlm-arpa") for thread in threading.enumerate())


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("chunk", [500, 40_000])
def test_blocks_parsed_ahead_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, odd: bool
) -> None:
    """Sections end inside blocks, and odd rows stand in them, while later blocks are parsed."""
    path = saved(tmp_path, many_rows(7, odd))
    with monkeypatch.context() as patch:
        one_by_one(patch)
        careful = read(path)
    monkeypatch.setattr(line_reader, "CHUNK_BYTES", chunk)
    quick = read(path, batch_ngrams=150)
    assert same(quick, careful)
    assert reading_threads() == 0


@pytest.mark.parametrize("order", [1, 4])
def test_fault_in_a_late_block_is_raised_once_after_the_rows_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    """Blocks parsed ahead of it, and faults in them, do not matter."""
    monkeypatch.setattr(line_reader, "CHUNK_BYTES", 1000)
    text = many_rows(7, False)
    lines = text.split(b"\n")
    first = lines.index(b"\\%d-grams:" % order) + 1
    for fault in (600, 650):
        lines[first + fault] = b"-x" + lines[first + fault]
    path = saved(tmp_path, b"\n".join(lines))
    rows = 0
    with ArpaReader(path, batch_ngrams=7) as reader:
        batches = reader.batches()
        with pytest.raises(ArpaError, match="log10 probability") as caught:
            for batch in batches:
                rows += len(batch) if batch.order == order else 0
        assert list(batches) == []
    assert (caught.value.order, caught.value.line) == (order, first + 600 + 1)
    assert caught.value.byte_offset == sum(len(line) + 1 for line in lines[: first + 600])
    assert 500 < rows <= 600
    assert reading_threads() == 0


@pytest.mark.parametrize("how", ["close", "drop", "leave"])
def test_reader_left_early_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whether it is closed, forgotten, or left by an exception of the caller."""
    monkeypatch.setattr(line_reader, "CHUNK_BYTES", 1000)
    for pack in (bytes, *COMPRESSORS.values()):
        path = saved(tmp_path, pack(many_rows(7, False)))
        reader = ArpaReader(path)
        batches = reader.batches()
        while next(batches).order < 2:
            pass
        assert reading_threads() > 0
        if how == "close":
            reader.close()
            with pytest.raises(ValueError, match="closed"):
                list(batches)
        elif how == "drop":
            del batches
        else:
            with pytest.raises(KeyboardInterrupt), reader:
                raise KeyboardInterrupt
        assert reading_threads() == 0
        reader.close()


def test_pipe_that_stalls_holds_up_no_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread waits for a pipe: a reader is closed while the writer keeps it open."""
    monkeypatch.setattr(line_reader, "CHUNK_BYTES", 100)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    text = many_rows(7, False)
    written, closed = threading.Event(), threading.Event()

    def write() -> None:
        with path.open("wb") as file:
            file.write(text[:20_000])
            file.flush()
            written.set()
            closed.wait()

    writer = threading.Thread(target=write)
    writer.start()
    reader = ArpaReader(path)
    batches = reader.batches()
    assert len(next(batches)) > 0
    written.wait()
    reader.close()
    assert reading_threads() == 0
    closed.set()
    writer.join()


class FailingDisk(io.FileIO):
    """A file whose disk fails after `good` bytes."""

    good = 0

    def readinto(self, buffer: Any) -> int:
        left = self.good - self.tell()
        if left <= 0:
            raise OSError(5, "Input/output error")
        return super().readinto(memoryview(buffer)[:left])


@pytest.mark.parametrize("kind", ["plain", *COMPRESSORS])
def test_disk_error_comes_after_the_rows_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Reading ahead meets the error early; it is raised in its place, as it is: a failing disk is
    not called a damaged file."""
    monkeypatch.setattr(line_reader, "CHUNK_BYTES", 1000)
    text = many_rows(7, False)
    packed = COMPRESSORS.get(kind, bytes)(text)
    path = saved(tmp_path, packed)
    # A compressed block is read whole before any of it is told.
    good = text.index(b"\\3-grams:") if kind == "plain" else len(packed) - 5
    monkeypatch.setattr(FailingDisk, "good", good)

    class FailingPath(type(path)):  # type: ignore[misc]
        def open(self, *_: Any) -> io.BufferedReader:
            return io.BufferedReader(FailingDisk(self), 16)

    monkeypatch.setattr(source, "Path", FailingPath)
    rows = 0
    with pytest.raises(OSError, match="Input/output error"), ArpaReader(path) as reader:
        for batch in reader.batches():
            rows += len(batch) if batch.order == 2 else 0
    assert rows > 1300 or kind != "plain"
    assert reading_threads() == 0


def test_text_in_flight_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who takes one batch and waits has the file read no further than some blocks."""
    monkeypatch.setattr(line_reader, "CHUNK_BYTES", 1000)
    text = many_rows(7, False)
    with ArpaReader(saved(tmp_path, text)) as reader:
        batches = reader.batches()
        while next(batches).order < 2:
            pass
        assert reader._text._ahead is not None
        reader._text._ahead.exception()
        start = text.index(b"\\2-grams:")
        assert start < reader._text.text_bytes < start + (reading._BLOCKS + 5) * 1000


# --------------------------------------------------------------------------------- writer

WORD = st.binary(min_size=1, max_size=6).filter(
    lambda w: not any(c in w for c in b" \t\n\r") and w not in (b"<unk>", b"<UNK>", b"<s>", b"</s>")
)
FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def models(draw: st.DrawFn) -> tuple[Vocabulary, list[tuple[Any, Any, Any]]]:
    """A vocabulary and sections whose row order and numbers are arbitrary."""
    words = draw(st.lists(WORD, unique=True, max_size=6))
    words += draw(st.sets(st.sampled_from([NBSP, IDEOGRAPHIC_SPACE, b"\v", b"\xff"]))) - set(words)
    unk = draw(st.sampled_from([b"<unk>", b"<UNK>"]))
    unk_in_model = draw(st.booleans())
    vocabulary = Vocabulary(
        [unk if unk_in_model else b"<unk>", b"<s>", *words, b"</s>"], unk_in_model=unk_in_model
    )
    order = draw(st.integers(1, 4))
    sections = []
    for k in range(1, order + 1):
        if k == 1:
            ids = np.arange(0 if unk_in_model else 1, len(vocabulary), dtype=np.uint32)[:, None]
        else:
            row = st.lists(
                st.integers(0 if unk_in_model else 1, len(vocabulary) - 1), min_size=k, max_size=k
            )
            ids = np.array(draw(st.lists(row, max_size=5)), np.uint32).reshape(-1, k)
        n = len(ids)
        probs = draw(st.lists(FLOAT | st.just(-np.inf), min_size=n, max_size=n))
        backoffs = draw(st.lists(FLOAT, min_size=n, max_size=n)) if k < order else [0.0] * n
        sections.append((ids, -np.abs(np.array(probs, np.float32)), np.array(backoffs, np.float32)))
    return vocabulary, sections


def with_positive_zeros(sections: list[tuple[Any, Any, Any]]) -> list[tuple[Any, Any, Any]]:
    return [(ids, p + np.float32(0), b + np.float32(0)) for ids, p, b in sections]


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(model=models(), suffix=st.sampled_from(["", ".gz", ".zst", ".xz"]))
def test_what_is_written_is_read_back(tmp_path: Path, model: Any, suffix: str) -> None:
    """Words of any bytes and numbers of any bits survive writing and reading, compressed or not."""
    path = tmp_path / f"model.arpa{suffix}"
    write_arpa(path, model[0], model[1], comments=["made here", "\udcff"])
    with ArpaReader(path) as reader:
        assert reader.comments == ["made here", "\udcff"]
        assert (reader.compression != "plain") == bool(suffix)
        assert same(read_all(reader), (model[0], with_positive_zeros(model[1])))


def test_reading_and_writing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    """The writer's own output is a fixed point, whatever the slices it writes in; a model of one
    batch for each order goes straight back to a file."""
    path = saved(tmp_path, TINY)
    with ArpaReader(path) as reader:
        batches = list(reader.batches())
    one, two = tmp_path / "one", io.BytesIO()
    write_arpa(one, reader.vocabulary, batches)
    again = read(one)
    assert same(again, read(path))
    with pytest.raises(ValueError, match="order"):
        write_arpa(one, reader.vocabulary, batches[::-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_WRITE_ROWS", 2)
        write_arpa(two, *again)
    assert two.getvalue() == one.read_bytes()
    assert not two.closed


def test_written_text_is_plain_to_see(tmp_path: Path) -> None:
    """The layout and the shortest numbers, byte for byte."""
    vocabulary = Vocabulary([b"<unk>", b"<s>", b"</s>"], unk_in_model=False)
    one = (
        np.array([[0], [1], [2]], np.uint32),
        np.array([-5, -0.0, -0.1], np.float32),
        np.array([1, -1e-7, -16777216], np.float32),
    )
    two = (np.array([[1, 2]], np.uint32), np.array([-1 / 3], np.float32), None)
    file = io.BytesIO()
    write_arpa(file, vocabulary, [one, two], comments=["a", "b\nc"])
    assert file.getvalue() == (
        b"# a\n# b\n# c\n\\data\\\nngram 1=2\nngram 2=1\n\n\\1-grams:\n"
        b"0\t<s>\t-1e-7\n-0.1\t</s>\t-16777216\n\n\\2-grams:\n-0.33333334\t<s> </s>\n\n\\end\\\n"
    )


def good_model() -> tuple[Vocabulary, list[tuple[Any, Any, Any]]]:
    vocabulary = Vocabulary([b"<unk>", b"<s>", b"</s>"], unk_in_model=False)
    one = (np.array([[1], [2]], np.uint32), np.full(2, -1, np.float32), np.zeros(2, np.float32))
    two = (np.array([[1, 2]], np.uint32), np.full(1, -1, np.float32), np.zeros(1, np.float32))
    return vocabulary, [one, two]


@pytest.mark.parametrize(
    ("order", "column", "values", "named"),
    [
        (2, 1, [np.nan, 0.5, np.inf], "probability"),
        (1, 2, [np.nan, np.inf, -np.inf], "weight"),
        (2, 2, [np.nan, np.inf, -np.inf], "weight"),  # at the highest order, 0
        (2, 0, [3, 0], "vocabulary"),  # too large, and the unknown word of a model without one
    ],
)
def test_what_the_reader_would_refuse_is_not_written(
    tmp_path: Path, order: int, column: int, values: list[float], named: str
) -> None:
    """No file appears."""
    for value in values:
        vocabulary, sections = good_model()
        sections[order - 1][column].flat[0] = value
        with pytest.raises(ArpaError, match=named):
            write_arpa(tmp_path / "x.arpa", vocabulary, sections)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", [b"", b"a b", b"a\t", b"\n", b"a\r", None])
def test_words_that_cannot_be_read_back_are_not_written(tmp_path: Path, word: bytes | None) -> None:
    """A word with a separator in it would become two; a model without </s> (None) is refused."""
    words = [b"<unk>", b"<s>"] if word is None else [b"<unk>", b"<s>", b"</s>", word]
    one = (np.array([[1]], np.uint32), np.full(1, -1, np.float32), None)
    with pytest.raises(ArpaError, match="</s>" if word is None else "word"):
        write_arpa(tmp_path / "x.arpa", Vocabulary(words, unk_in_model=False), [one])


def test_arrays_of_the_wrong_shape_are_not_written(tmp_path: Path) -> None:
    """Shapes and types are checked before anything is written."""
    vocabulary, (one, two) = good_model()
    for sections in (
        [],
        [two],
        [one, one],
        [(one[0].astype(np.int64), *one[1:])],
        [(one[0], one[1].astype(np.float64), one[2])],
        [(one[0], one[1], one[2][:1])],
    ):
        with pytest.raises(ValueError):
            write_arpa(tmp_path / "x.arpa", vocabulary, sections)


def test_a_row_that_no_reader_takes_is_not_written(tmp_path: Path) -> None:
    """A line has a longest length, whatever it is made of; the length itself is written."""
    vocabulary = Vocabulary(
        [b"<unk>", b"<s>", b"</s>", b"x" * (MAX_LINE_BYTES - 3)], unk_in_model=False
    )
    one = (np.array([[1], [2], [3]], np.uint32), np.full(3, -1, np.float32), None)
    path = tmp_path / "x.arpa"
    write_arpa(path, vocabulary, [one])
    assert same(read(path), (vocabulary, [(one[0], one[1], np.zeros(3, np.float32))]))
    one[1][2] = -1.5
    with pytest.raises(ArpaError, match="row is longer"):
        write_arpa(path, vocabulary, [one])


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_what_the_disk_refuses_meanwhile_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """The system tells it once: the last sync would know nothing of it."""
    monkeypatch.setattr(writer, "SYNC_BYTES", 1)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        write_arpa(tmp_path / f"x.arpa{suffix}", *good_model())
    assert raised.value.filename == str(tmp_path / f"x.arpa{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_after_what_cannot_be(tmp_path: Path) -> None:
    """To an open file there goes what comes before, and no later rows, though they are made."""
    vocabulary, (one, two) = good_model()
    rows = writer.RowColumns(*one)
    entered = threading.Event()

    def fails() -> writer.RowColumns:
        entered.wait()
        raise RuntimeError("these rows are lost")

    def later() -> writer.RowColumns:
        entered.set()
        return rows

    file = io.BytesIO()
    words = writer.WordBytes.of(vocabulary)
    counts = [8, len(two[0])]
    with (
        pytest.raises(RuntimeError, match="lost"),
        writer.ArpaWriter(file, words, counts) as out,
    ):
        out.section([lambda: rows, fails, later, later])
    assert file.getvalue().endswith(b"\\1-grams:\n-1\t<s>\t0\n-1\t</s>\t0\n")


def test_the_size_of_a_file_is_known_without_it(tmp_path: Path) -> None:
    """To the byte, comments included."""
    path = tmp_path / "x.arpa"
    model = read(saved(tmp_path, TINY))
    written = write_arpa(path, *model, comments=["caf\xe9", "a\nb"])
    assert arpa_bytes(*model, comments=["caf\xe9", "a\nb"]) == written == path.stat().st_size


def test_compressed_output_is_reproducible(tmp_path: Path) -> None:
    """The same model gives the same bytes, whenever and under whatever name it is written."""
    for suffix in (".gz", ".zst", ".xz"):
        one, two = tmp_path / f"one{suffix}", tmp_path / f"two{suffix}"
        write_arpa(one, *good_model())
        write_arpa(two, *good_model())
        assert one.read_bytes() == two.read_bytes()


def test_kenlm_reads_what_is_written(tmp_path: Path) -> None:
    """Another toolkit scores the written model with the numbers that were given."""
    kenlm = pytest.importorskip("kenlm")
    path = tmp_path / "model.arpa"
    write_arpa(path, *read(saved(tmp_path, TINY)))
    model = kenlm.Model(str(path))
    assert [round(p, 6) for p, _, _ in model.full_scores("a b")] == [-0.5, -0.25, -0.125]
