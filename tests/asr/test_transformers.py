"""transformers' processor decodes with dlm, as the page has it.

Needs transformers, which no extra brings: it is large, and torch is not needed here.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import forked
from asr.decoding import TOKENS, posteriors, spelled, spoken_model
from cluster import build
from dlm.asr.ctc import build_ctcdecoder

PAGE = Path(__file__).parents[2] / "dlm/asr/DECODERS.md"
LABELS = ["<pad>", "<unk>", "|", *TOKENS[2:]]
# What an engineer has: a folder with a decoder of pyctcdecode's; and logits.
BEFORE = """
import dlm.asr.kenlm, numpy
dlm.asr.kenlm.install()
from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2ProcessorWithLM
from pyctcdecode import build_ctcdecoder
tokenizer = Wav2Vec2CTCTokenizer("vocab.json", bos_token="<pad>", eos_token="<pad>")
labels = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
decoder = build_ctcdecoder(labels, "model.bin")
Wav2Vec2ProcessorWithLM(Wav2Vec2FeatureExtractor(), tokenizer, decoder).save_pretrained("processor")
logits = numpy.load("logits.npy")
"""
AFTER = """
print([[one["word"], one["start_offset"], one["end_offset"]] for one in found.word_offsets])
again = Wav2Vec2ProcessorWithLM.from_pretrained("processor", alpha=2.0, score_boundary=False)
print(again.language_model.alpha, again.language_model.score_boundary)
with __import__("multiprocessing").get_context("fork").Pool(1) as pool:
    batch = again.batch_decode(numpy.stack([logits, logits]), pool, hotwords=["fad"])
print(*batch.text, sep="\\n")
import pathlib, shutil
snapshot = pathlib.Path("hub/models--me--speech/snapshots/0")
shutil.copytree("processor", snapshot)
(snapshot.parents[1] / "refs").mkdir()
(snapshot.parents[1] / "refs/main").write_text("0")
there = {"cache_dir": "hub", "local_files_only": True}
print(type(decoder).load_from_hf_hub("me/speech", **there).decode(logits))
"""


def test_the_processor_of_the_page_decodes(tmp_path: Path) -> None:
    """It is saved, opened with another weight, and decodes one utterance, and two in a pool; and it
    is opened as a model of the hub."""
    pytest.importorskip("transformers", "5", reason="pip install 'transformers>=5'")
    words = spelled(20)
    files = build(spoken_model(words), tmp_path / "model", 1)
    (tmp_path / "model.bin").write_text(f"dlm://{files.directory}\n")
    (tmp_path / "vocab.json").write_text(json.dumps({label: i for i, label in enumerate(LABELS)}))
    said = [words[i] for i in (3, 1, 4, 1, 5)]
    logits = posteriors(said, 1, flat=1.0)
    logits = np.insert(logits, 1, -30.0, axis=1)
    np.save(tmp_path / "logits.npy", logits)
    code = next(
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
        if "Wav2Vec2ProcessorWithLM" in code
    )  # fmt: skip
    done = forked.script(BEFORE + code + AFTER, cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    text, offsets, changed, *batch, of_hub = done.stdout.splitlines()
    decoder = build_ctcdecoder(LABELS, os.fspath(files.directory))
    assert text == of_hub == decoder.decode(logits) == " ".join(said)
    assert json.loads(offsets.replace("'", '"')) == [
        [word, *frames] for word, frames in decoder.decode_beams(logits)[0][2]
    ]
    assert changed == "2.0 False"
    decoder.reset_params(alpha=2.0, lm_score_boundary=False)
    assert batch == [decoder.decode(logits, hotwords=["fad"])] * 2
