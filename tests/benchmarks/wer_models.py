"""The language models of `wer.py`: all text of the shared data, and what smaller models keep of it.

Every step leaves a file, and is not done again where that file is. 5 minutes of processor time and
12 GB of disk.

    full            5-grams of all text, nothing left out (74 M n-grams)
    small_4         the same pruned by relative entropy to a quarter of the n-grams; small_10, _30
    partial         its 1- and 2-grams: what a client answers from where a shard fails
    unigram         its 1-grams
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from dlm.files import replacing, write_whole
from dlm.ngram.arpa import ArpaReader

GRAM = 8  # an utterance that shares so many words in a row with the text is left out
SMALL = (4, 10, 30)
MODELS = ("full", *(f"small_{share}" for share in SMALL), "bigram_fallback", "unigram")

_PLAIN = str.maketrans({"’": "'", "‘": "'", "“": " ", "”": " ", "—": " ", "–": " ", "-": " "})
_OTHERS = re.compile(r"[^a-z' ]+")


@dataclass(frozen=True, slots=True)
class Spoken:
    """An utterance of the shared data.

    words  its reference, as the models' text is normalised
    """

    name: str
    path: Path
    seconds: float
    speaker: str
    words: tuple[str, ...]


def normalised(line: str) -> list[str]:
    """Lower case, letters and apostrophes: what the references of speech look like."""
    words = (word.strip("'") for word in _OTHERS.sub(" ", line.translate(_PLAIN).lower()).split())
    return [word for word in words if word]


def read_speech(folder: Path) -> list[Spoken]:
    """The utterances of `transcripts.tsv`."""
    with (folder / "transcripts.tsv").open(encoding="utf-8") as file:
        return [
            Spoken(
                Path(row["file"]).stem,
                folder / row["file"],
                float(row["seconds"]),
                row["speaker"],
                tuple(normalised(row["text"])),
            )
            for row in csv.DictReader(file, delimiter="\t")
        ]


def write_text(sources: Iterable[Path], spoken: list[Spoken], work: Path) -> tuple[Path, set[str]]:
    """All text, normalised, and which utterances share `GRAM` words in a row with it."""
    text, shared = work / "text.txt", work / "shared.json"
    if not shared.exists():
        grams: dict[tuple[str, ...], set[str]] = {}
        for one in spoken:
            for i in range(len(one.words) - GRAM + 1):
                grams.setdefault(one.words[i : i + GRAM], set()).add(one.name)
        firsts = {gram[0] for gram in grams}
        found: set[str] = set()
        with replacing(text) as file:
            for words in (words for source in sources for words in _sentences(source)):
                for i in range(len(words) - GRAM + 1):
                    if words[i] in firsts:
                        found |= grams.get(tuple(words[i : i + GRAM]), set())
                file.write((" ".join(words) + "\n").encode())
        write_whole(shared, json.dumps(sorted(found)).encode())
    return text, set(json.loads(shared.read_bytes()))


def _sentences(source: Path) -> Iterator[list[str]]:
    with pa.input_stream(str(source), compression="zstd") as stream:
        rest = b""
        while block := stream.read(1 << 22):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if words := normalised(line.decode()):
                    yield words
        if words := normalised(rest.decode()):
            yield words


def make_models(text: Path, work: Path) -> dict[str, Path]:
    """The ARPA file of each of `MODELS`."""
    arpas = {name: work / f"{name}.arpa" for name in MODELS}
    full = arpas["full"]
    _once(full, "estimate", text, "--order", 5, "--output")
    with ArpaReader(full) as reader:
        count = sum(reader.counts)
    for share in SMALL:
        _once(arpas[f"small_{share}"], "prune", full, "--ngrams", count // share, "--output")
    _once(arpas["bigram_fallback"], "reduce", full, "--order", 2, "--output")
    _once(arpas["unigram"], "reduce", full, "--order", 1, "--output")
    return arpas


def make_shards(arpa: Path, shards: int) -> Path:
    """A shard set beside an ARPA file."""
    folder = arpa.with_suffix(f".{shards}")
    _once(folder, "shard", arpa, "--shards", shards, "--output")
    return folder


def _once(output: Path, *command: object) -> None:
    """Runs `dlm` with this command unless its output is there."""
    if not output.exists():
        arguments = [str(part) for part in (*command, output)]
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        subprocess.run([sys.executable, "-m", "dlm", *arguments], check=True, env=environ)
