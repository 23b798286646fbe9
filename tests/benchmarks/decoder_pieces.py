"""flashlight-text over word pieces: a model in Python beside KenLM's in C++, by CPU time per frame.

    python tests/benchmarks/decoder_pieces.py [--pieces 1000 --sentences 4 --rounds 11]

A 5-gram model of pieces is estimated from the text of `settings.py`, and held-out sentences of 40
pieces are said unclearly, three frames a piece. flashlight calls its model once for each pair of a
hypothesis and a piece: from C++ into Python, where the model is dlm. *callbacks alone* is a model
that only returns the next state and one score, so it is the floor of all models in Python. *first*
is the first decoding of the sentences, *again* each one after. Rows take turns; hypotheses of KenLM
and dlm must be equal. Needs the extras `asr` and `train`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import sentencepiece
from flashlight.lib.text.decoder import (
    LM,
    CriterionType,
    LexiconFreeDecoder,
    LexiconFreeDecoderOptions,
    LMState,
)
from flashlight.lib.text.decoder.kenlm import KenLM
from flashlight.lib.text.dictionary import Dictionary

from benchmarks.settings import DLM, TEXT, cache_folder
from benchmarks.workload import lines_of
from dlm.asr.decoders.flashlight import DlmLM
from dlm.client import Client

LINES, HELD_OUT_LINES, LENGTH = 300_000, 500, 40
BEAM, PIECES_PER_FRAME, THRESHOLD, LM_WEIGHT = 50, 20, 25.0, 1.0


class Callbacks(LM):  # type: ignore[misc]
    """What flashlight requires of a model in Python, and nothing else."""

    def start(self, start_with_nothing: bool) -> LMState:
        """A state."""
        return LMState()

    def score(self, state: LMState, usr_token_idx: int) -> tuple[LMState, float]:
        """The next state, and one score for all."""
        return state.child(usr_token_idx), -1.0

    def finish(self, state: LMState) -> tuple[LMState, float]:
        """The same state."""
        return state, 0.0


def made(count: int) -> tuple[Path, list[str], list[list[str]]]:
    """An ARPA file over so many pieces, the pieces, and held-out sentences in them."""
    folder = cache_folder() / f"pieces-{count}"
    folder.mkdir(parents=True, exist_ok=True)
    text, arpa = folder / "text.txt", folder / "model.arpa"
    words = (" ".join(re.findall(r"[a-z']+", line.lower())) for line in lines_of(TEXT))
    lines = list(islice((line for line in words if len(line) > 20), LINES))
    text.write_text("\n".join(lines[:20_000]), "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "bpe"), vocab_size=count, model_type="bpe",
        minloglevel=2,
    )  # fmt: skip
    cut = sentencepiece.SentencePieceProcessor(model_file=str(folder / "bpe.model"))
    said: list[list[str]] = cut.encode(lines, out_type=str)
    text.write_text("\n".join(" ".join(one) for one in said[:-HELD_OUT_LINES]), "utf-8")
    options = ["--order", "5", "--prune", "0,0,1,2,2", "--discount-fallback"]
    subprocess.run([*DLM, "estimate", str(text), *options, "--output", str(arpa)], check=True)
    for shards in (1, 2):
        if (folder / str(shards)).exists():  # kept from a run before
            continue
        shard = ["--shards", str(shards), "--output", str(folder / str(shards))]
        subprocess.run([*DLM, "shard", str(arpa), *shard], check=True)
    return folder, [cut.id_to_piece(i) for i in range(3, count)], said[-HELD_OUT_LINES:]


def emissions(indices: list[int], pieces: int, rng: np.random.Generator) -> Any:
    """(frames, pieces + 1) float32: each piece in one frame of three, the others blank."""
    rows = rng.normal(0.0, 1.5, (3 * len(indices), pieces + 1))
    rows[np.arange(0, len(rows), 3), indices] += 6.0
    rows[1::3, pieces] += 6.0
    rows[2::3, pieces] += 6.0
    return (rows - np.log(np.exp(rows).sum(1, keepdims=True))).astype(np.float32)


def main() -> None:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pieces", type=int, default=1000)
    parser.add_argument("--sentences", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    folder, pieces, held_out = made(given.pieces)
    index = {piece: i for i, piece in enumerate(pieces)}
    rng = np.random.default_rng(0)
    said = [[index[one] for one in line if one in index][:LENGTH] for line in held_out]
    said = [one for one in said if len(one) == LENGTH][: given.sentences]
    heard = [emissions(one, len(pieces), rng) for one in said]
    frames = sum(map(len, heard))
    options = LexiconFreeDecoderOptions(
        BEAM, PIECES_PER_FRAME, THRESHOLD, LM_WEIGHT, 0.0, False, CriterionType.CTC
    )

    def decode(lm: Any) -> tuple[float, Any]:
        decoder = LexiconFreeDecoder(options, lm, -1, len(pieces), [])
        begin = time.thread_time()
        found = [[one.tokens for one in decoder.decode(e.ctypes.data, *e.shape)] for e in heard]
        return (time.thread_time() - begin) / frames * 1e6, found

    dictionary = Dictionary([*pieces, "<blank>"])
    rows: dict[str, Callable[[], Any]] = {
        "KenLM in C++": lambda: KenLM(str(folder / "model.arpa"), dictionary),
        "callbacks alone": Callbacks,
    }
    for shards in (1, 2):
        utterance = Client.local(folder / str(shards)).utterance()
        rows[f"dlm, local shards: {shards}"] = lambda utterance=utterance: DlmLM(utterance, pieces)
    kept = {name: make() for name, make in rows.items()}
    for lm in kept.values():
        decode(lm)
    times: dict[str, list[float]] = {}
    expected = None
    for _ in range(given.rounds):
        for name, make in rows.items():
            for when, lm in (("first", make()), ("again", kept[name])):
                spent, found = decode(lm)
                times.setdefault(f"{name}, {when}", []).append(spent)
                if "KenLM" in name:
                    expected = found
                elif "dlm" in name and found != expected:
                    raise AssertionError(f"{name}: other hypotheses than KenLM's")
    print("| | CPU per frame, µs | of callbacks alone |\n| --- | ---: | ---: |")
    floor = times["callbacks alone, again"]
    for name, spent in times.items():
        ratio = median(a / b for a, b in zip(spent, floor, strict=True))
        print(f"| {name} | {median(spent):,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
