"""The page's adapter for causal language models of Hugging Face, as it stands there.

The model is a small one in numpy that is called as those of `transformers` are: it sees all tokens
before, those that the mask leaves out excepted.
"""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dlm.cli.main import app
from dlm.distill.sources.source import SourceReader
from dlm.ngram.backoff import DictModel
from estimate.merge_models import worst_sum

PAGE = Path(__file__).parents[2] / "dlm/distill/README.md"
SAMPLES = 60
WORDS = ["<|end|>", "<unk>", "alpha", "beta", "gamma", "delta"]


class NumpyCausal:
    """Logits after each token: of a sum over those before it, the nearer the heavier."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._key = rng.normal(size=(len(WORDS), 4))
        self._out = rng.normal(size=(4, len(WORDS)))

    def __call__(self, input_ids: Any, attention_mask: Any) -> types.SimpleNamespace:
        """As a model of transformers."""
        ids, seen = np.asarray(input_ids), np.asarray(attention_mask, np.float64)
        length = ids.shape[1]
        near = np.tril(0.5 ** (np.arange(length)[:, None] - np.arange(length)[None, :]))
        state = np.einsum("ij,bj,bjk->bik", near, seen, self._key[ids])
        return types.SimpleNamespace(logits=(np.tanh(state) @ self._out).astype(np.float32))


@pytest.mark.slow
def test_a_causal_model_is_distilled_by_the_pages_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What begins a sentence, and what follows each first word, is as likely as the model says;
    what stands behind a prefix does not count."""
    (code,) = re.findall(r"```python\n(# causal\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    causal: Any = types.ModuleType("causal")
    exec(compile(code, str(PAGE), "exec"), causal.__dict__)
    monkeypatch.setitem(sys.modules, "causal", causal)
    model = NumpyCausal()
    causal.load = lambda: causal.CausalModel(model, WORDS, 0, 0)
    source = causal.load()
    padded = np.array([[0, 2, 3, 5, 5], [0, 4, 2, 3, 2]], np.int32)
    given = np.asarray(source.log_probs(padded, np.array([3, 5], np.int32)))
    alone = np.asarray(source.log_probs(padded[:1, :3], np.array([3], np.int32)))
    np.testing.assert_allclose(given[0], alone[0], atol=1e-5)
    other = padded.copy()
    other[0, 3:] = 1
    same = np.asarray(source.log_probs(other, np.array([3, 5], np.int32)))
    np.testing.assert_allclose(same, given, atol=1e-5)

    out = tmp_path / "out.arpa"
    args = ["distill", "causal:load", "--topology", "self", "--samples", SAMPLES, "-o", out]
    done = CliRunner().invoke(app, [*map(str, args), "--json", "-q"])
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["source_perplexity"] > 1
    found = DictModel.from_arpa(out)
    assert worst_sum(found) < 3e-6
    reader = SourceReader(source, "it")
    begin, words = found.vocabulary.begin_id, found.vocabulary.words
    compared = 0
    for ngram, (log10_prob, _) in found.ngrams.items():
        if len(ngram) > 1 and ngram[0] == begin:
            ids = reader.vocabulary.ids_of([words[i] for i in ngram])
            prefix = ids[None, :-1].astype(np.uint32)
            expected = reader.distributions(prefix, np.array([prefix.shape[1]], np.int32))
            assert 10.0**log10_prob == pytest.approx(float(expected[0, ids[-1]]), abs=1e-4)
            compared += 1
    assert compared >= 5
