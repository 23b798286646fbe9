"""KenLM's lmplz, which lies outside the project: DLM_LMPLZ names the binary."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

LMPLZ = os.environ.get("DLM_LMPLZ", "")

needs_lmplz = pytest.mark.skipif(
    not LMPLZ, reason="no lmplz to compare with; name KenLM's binary in DLM_LMPLZ"
)

Values = dict[tuple[bytes, ...], tuple[float, float]]


class LmplzError(Exception):
    """lmplz gave no model."""


def lmplz(text: bytes, order: int, folder: Path, *options: str, vocabulary: bytes = b"") -> Values:
    """Log10 probability and backoff weight of every n-gram of the model that lmplz makes."""
    command = [LMPLZ, "-o", str(order), "-S", "10M", "--vocab_estimate", "1000", *options]
    command += ["-T", str(folder / "lmplz-")]
    if vocabulary:
        (folder / "vocabulary.txt").write_bytes(vocabulary)
        command += ["--limit_vocab_file", str(folder / "vocabulary.txt")]
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    if done.returncode:
        raise LmplzError(done.stderr.decode(errors="replace")[-2000:])
    return parsed(done.stdout)


def parsed(arpa: bytes) -> Values:
    """The n-grams of ARPA text, by their words."""
    values: Values = {}
    for line in arpa.split(b"\n"):
        fields = line.split(b"\t")
        if len(fields) >= 2:
            backoff = float(fields[2]) if len(fields) > 2 else 0.0
            values[tuple(fields[1].split(b" "))] = (float(fields[0]), backoff)
    return values
