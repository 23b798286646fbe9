"""ARPA files: a strict streaming reader, and a writer of files that it accepts.

ARPA is text, read as bytes. `\\data\\` opens a file, with a line `ngram K=COUNT` for each order; a
section `\\K-grams:` for each order follows, and `\\end\\` closes it. A row of a section holds a
log10 probability, K words, and, below the highest order, a log10 backoff weight that may be left
out. Only space and tab separate the fields.
"""

from dlm.ngram.arpa.header import provenance_line
from dlm.ngram.arpa.lines import (
    INDEX as PARTS_INDEX,
    index_text as parts_index,
    is_parts_folder,
    is_reopenable,
)
from dlm.ngram.arpa.reader import ArpaReader, ArpaWarning
from dlm.ngram.arpa.rows import NgramBatch, SectionColumns, by_order, joined
from dlm.ngram.arpa.writer import arpa_bytes, write_arpa

__all__ = [
    "PARTS_INDEX",
    "ArpaReader",
    "ArpaWarning",
    "NgramBatch",
    "SectionColumns",
    "arpa_bytes",
    "by_order",
    "is_parts_folder",
    "is_reopenable",
    "joined",
    "parts_index",
    "provenance_line",
    "write_arpa",
]
