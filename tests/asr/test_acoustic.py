"""The packaged acoustic model gives posteriors of phonemes; others are run, too, and checked."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hama", reason="pip install -e '.[asr]'")
pytest.importorskip("flashlight.lib.text", reason="pip install -e '.[asr]'")

import soundfile
from typer.testing import CliRunner

from asr.test_lexicon import model_of
from cluster import build
from dlm.asr.speech.acoustic import AcousticModel, load_acoustic
from dlm.asr.speech.audio import SAMPLE_RATE
from dlm.cli.main import app
from dlm.errors import ConfigError, QueryError

PAGE = Path(__file__).parents[2] / "dlm/asr/SPEECH.md"


def test_each_frame_of_20_ms_has_a_distribution() -> None:
    """Whatever is heard, however short; of samples of another kind, native code would read more."""
    model = AcousticModel()
    for count in (1, 320, 1_600, 16_000, 16_001):
        noise = np.random.default_rng(1).normal(0.0, 0.1, count).astype(np.float32)
        log_probs = model.log_probs(noise)
        assert log_probs.dtype == np.float32
        assert log_probs.shape == (count // int(0.02 * SAMPLE_RATE) + 1, len(model.labels))
        assert np.allclose(np.exp(log_probs).sum(axis=1), 1.0, atol=1e-4)
    for samples in (np.zeros(0), np.zeros((2, 5)), np.zeros(5, np.int16), np.zeros(5)):
        with pytest.raises(QueryError, match="float32"):
            model.log_probs(samples)


class Heard:
    """A model of audio in which the level of each frame says which label it is."""

    frame_s = 0.08
    labels = ("<pad>", "|", "A", "B", "C")

    def log_probs(self, samples: Any) -> Any:
        levels = np.asarray(samples).reshape(-1, int(self.frame_s * SAMPLE_RATE)).mean(axis=1)
        logits = -50.0 * (64.0 * levels[:, None] - np.arange(len(self.labels))) ** 2
        return logits - np.logaddexp.reduce(logits, axis=1)[:, None]


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"labels": ("|", "a", "b", "c", "d")}, ConfigError, "labels is .*blank"),
        ({"frame_s": 80}, ConfigError, "frame_s is 80; expected seconds"),
        ({"log_probs": lambda *_: np.zeros((7, 4))}, QueryError, r"\(7, 4\); expected \(frames, 5"),
        ({"log_probs": lambda *_: np.zeros(5)}, QueryError, r"\(5,\)"),
        ({"log_probs": lambda *_: np.full((2, 5), np.nan)}, QueryError, "frame 0 sum to nan"),
        ({"log_probs": lambda *_: np.zeros((2, 5))}, QueryError, "sum to 5; .*log_softmax"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(
    changed: dict[str, Any], error: type[Exception], says: str
) -> None:
    """Before or after it listens."""
    with pytest.raises(error, match=says):
        AcousticModel(type("Model", (Heard,), changed)()).log_probs(np.ones(5, np.float32))


def test_a_function_that_makes_no_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what lacks."""
    (tmp_path / "mine.py").write_text(
        "class Model:\n    labels = ()\nnone = print\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for named, says in (
        ("mine", "'mine', which .* expected module:function"),
        ("mine:model", "no attribute 'model'"),
        ("nowhere_at_all:model", "No module named 'nowhere_at_all'"),
        (":", "cannot be imported"),
        ("mine:none", "of the type NoneType, which lacks labels"),
        ("mine:Model", "of the type Model, which lacks frame_s, log_probs"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_acoustic(named)


class Tensor(np.ndarray):  # type: ignore[type-arg]
    """An array with what the page's examples call of torch's tensors."""

    def log_softmax(self, axis: int) -> Any:
        return self - np.logaddexp.reduce(self, axis=axis, keepdims=True)

    def numpy(self) -> Any:
        return np.asarray(self)


class Stand(Heard):
    """A tiny model with the calls of transformers, NeMo and onnx-asr that the page uses."""

    def __init__(self, labels: tuple[str, ...], frame_s: float) -> None:
        self.labels, self.vocabulary, self.frame_s = labels, labels[:-1], frame_s
        self._vocab = {i: label.replace("▁", " ") for i, label in enumerate(labels)}
        self.asr = self.decoder = self.tokenizer = self
        self.eval = self._preprocessor = lambda *given: given or self
        self.get_vocab = lambda: {one: i for i, one in reversed([*enumerate(labels)])}

    def _encode(self, features: Any, lengths: Any) -> Any:
        found = self.log_probs(features[0, : lengths[0]])[None]
        return np.concatenate([found, found], axis=1).view(Tensor), [found.shape[1]]  # padded

    def __call__(self, samples: Any = None, **given: Any) -> Any:
        if samples is not None:
            assert (given["sampling_rate"], given["return_tensors"]) == (16_000, "pt")
            return {"input_values": samples[None]}
        if "input_values" in given:
            logits = 3.0 + self.log_probs(given["input_values"][0])[None]
            return SimpleNamespace(logits=logits.view(Tensor))
        return *self._encode(given["input_signal"], given["input_signal_length"]), None


@pytest.mark.parametrize("example", ["transformers", "nemo.collections.asr.models", "onnx_asr"])
def test_the_examples_of_the_page_transcribe(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for the packages: of capital letters, and of pieces that go on for a frame."""
    pytest.importorskip("sentencepiece", reason="pip install -e '.[train]'")
    from cli.test_pieces import trained

    said = ["cab", "abba", "c", "c", "bac"]
    letters, frame_s = example == "transformers", 0.02 if example == "transformers" else 0.08
    pieces = trained([word.upper() for word in said] * 9, 9, tmp_path / "spm.model")
    labels, path = Heard.labels, " | ".join(" ".join(word.upper()) for word in said).split()
    if not letters:
        labels = ("<blk>", *map(pieces.id_to_piece, range(pieces.vocab_size())))[::-1]
        path = pieces.encode(" ".join(said).upper(), out_type=str)
    blank = labels.index("<pad>" if letters else "<blk>")
    frames = np.array([[*[labels.index(label)] * 2, blank] for label in path], np.float32).ravel()
    level = np.repeat(frames / 64, int(frame_s * SAMPLE_RATE))
    soundfile.write(tmp_path / "a.wav", level, SAMPLE_RATE, subtype="FLOAT")
    build(model_of([*dict.fromkeys(said), "a"]), tmp_path, 1)

    stand = Stand(labels, frame_s)
    auto = SimpleNamespace(from_pretrained=lambda name, **given: stand)
    package = SimpleNamespace(AutoModelForCTC=auto, AutoProcessor=auto, ASRModel=auto)
    package.load_model = auto.from_pretrained
    monkeypatch.setitem(sys.modules, example, package)
    arrays = {"device": str, "tensor": np.array, "from_numpy": np.asarray}
    torch = SimpleNamespace(inference_mode=nullcontext, **arrays)
    monkeypatch.setitem(sys.modules, "torch", torch)
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (mine,) = (one for one in code if example in one and "class Model" in one)
    (tmp_path / "mine.py").write_text(mine, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "mine", None)
    del sys.modules["mine"]
    options = ["transcribe", "a.wav", "--lm", "1-None", "--acoustic", "mine:Model", "--json"]
    cut = ["--pieces", "spm.model"]
    done = CliRunner().invoke(app, [*options, *([] if letters else cut)])
    assert done.exit_code == 0, done.exception
    (found,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found["text"].split() == said
    assert len(frames) * frame_s - found["words"][-1]["end_s"] < 2.1 * frame_s
    done = CliRunner().invoke(app, [*options, *(cut if letters else [])])
    assert "--pieces" in str(done.exception)
