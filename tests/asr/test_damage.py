"""Damaged files: an error that says where, or something that can be scored; nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from asr.plain import random_lattice
from asr.test_kaldi import ARCHIVE
from asr.test_slf import ON_LINKS, ON_NODES
from dlm.asr.rescoring.kaldi import SymbolTable
from dlm.asr.rescoring.lattice import Lattice
from dlm.asr.rescoring.lattice_files import KALDI, NBEST, SLF, LatticeFiles
from dlm.asr.rescoring.nbest import Hypothesis, NbestList, best_paths, nbest_json, nbest_text
from dlm.asr.rescoring.slf import slf_text
from dlm.errors import ConfigError, LatticeError

LISTED = NbestList("a", (Hypothesis(("the", "man"), -1.5, -2.5), Hypothesis((), 0.0, 1e-3)))
FILES = [
    (SLF, ON_LINKS),
    (SLF, ON_NODES),
    (SLF, slf_text(random_lattice(3))),
    (KALDI, ARCHIVE),
    (NBEST, nbest_json(LISTED)),
    (NBEST, nbest_text(LISTED)),
]
PIECES = [b"nan", b"-", b"\xff", b"\0", b"9" * 5000, b"1e308", b"\n", b" ", b"=", b",", b'"', b"\\"]


@pytest.mark.parametrize("place", range(len(FILES)))
def test_a_damaged_file_is_an_error_that_names_it_or_can_be_used(
    tmp_path: Path, place: int
) -> None:
    """Bytes changed, cut and put in, in every format."""
    for seed in range(place, 180, len(FILES)):
        try_damaged(tmp_path / "damaged", *FILES[place], random.Random(seed))


def try_damaged(path: Path, kind: Any, text: str, rng: random.Random) -> None:
    """Damages a text and reads it."""
    content = bytearray(text.encode())
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(content))
        match rng.randrange(4):
            case 0:
                content[at] = rng.randrange(256)
            case 1:
                del content[at : at + rng.randrange(20)]
            case 2:
                content[at:at] = rng.choice(PIECES)
            case _:
                del content[at:]
        content = content or bytearray(b" ")
    path.write_bytes(content)
    table = SymbolTable({"0": "<eps>", "1": "the", "2": "a", "3": "man"}, {})
    try:
        for found in LatticeFiles.find(path, kind, table if kind == KALDI else None).read():
            if isinstance(found, Lattice):
                assert best_paths(found, 3).hypotheses
    except (LatticeError, ConfigError) as error:
        assert str(path) in str(error)
