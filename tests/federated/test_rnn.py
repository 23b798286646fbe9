"""The network against a cell written out in loops, and the papers' models by their counts."""

from __future__ import annotations

import dataclasses
import math
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")

from dlm.errors import ConfigError  # noqa: E402
from dlm.federated.training import metrics, rnn  # noqa: E402
from dlm.federated.training.presets import PRESETS, preset  # noqa: E402
from dlm.federated.training.rnn import RnnConfig  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compiling")

SMALL = RnnConfig(11, 6, 8)
VARIANTS = {
    "plain cifg": dataclasses.replace(SMALL, residual=False, layer_norm="none"),
    "residual, normalised": SMALL,
    "normalised gates": dataclasses.replace(SMALL, layer_norm="gates"),
    "two layers": dataclasses.replace(SMALL, layers=2),
    "groups": dataclasses.replace(SMALL, groups=2, layers=2, layer_norm="gates"),
    "grouped lstm": dataclasses.replace(SMALL, cell="lstm", groups=2),
    "separate embeddings": dataclasses.replace(SMALL, tied=False),
    "recurrent in the hidden units": dataclasses.replace(SMALL, cell="lstm", recurrence="hidden"),
    "groups, hidden": dataclasses.replace(SMALL, recurrence="hidden", groups=2),
    "dpf": dataclasses.replace(
        PRESETS["dpf"].config, vocab_size=11, embedding_size=6, hidden_size=8
    ),
}


# Compiled whole: a primitive at a time, each would be compiled on its own.
apply = jax.jit(rnn.apply, static_argnums=1)
run = jax.jit(rnn.run, static_argnums=1)


@partial(jax.jit, static_argnums=1)
def slope_of(params: Any, config: RnnConfig, batch: Any) -> tuple[Any, Any]:
    """The loss of a batch from a zero state, and its gradient."""
    state = rnn.initial_state(config, len(batch))
    loss, slope = jax.value_and_grad(lambda p: rnn.batch_loss(p, config, state, batch)[0])(params)
    return loss, slope


def sigmoid(x: float) -> float:
    """Logistic function of one number."""
    return 1.0 / (1.0 + math.exp(-x))


def normalised(values: list[float], scale: Any, bias: Any) -> list[float]:
    """Layer normalisation, number by number."""
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    root = math.sqrt(variance + rnn.NORM_EPSILON)
    unit = [(v - mean) / root for v in values]
    return [v * float(s) + float(b) for v, s, b in zip(unit, scale, bias, strict=True)]


def added(values: list[float], more: Any) -> list[float]:
    """Two vectors, number by number."""
    return [v + float(m) for v, m in zip(values, more, strict=True)]


def slow_logits(params: Any, config: RnnConfig, sentence: list[int]) -> list[list[float]]:
    """Logits of one sequence, a unit, a gate and a step at a time, in Python's own floats."""
    size, hidden, k = config.embedding_size, config.hidden_size, config.groups
    p = jax.tree.map(lambda leaf: np.asarray(leaf, float), params)

    def row(table: Any, word: int) -> list[float]:
        values = [float(v) for v in table[word]]
        length = math.sqrt(sum(v * v for v in values)) if config.unit_norm else 1.0
        return [v / length for v in values]

    recurrent = [[0.0] * config.recurrent_size for _ in range(config.layers)]
    cells = [[0.0] * hidden for _ in range(config.layers)]
    out = []
    for word in sentence:
        x = row(p["embedding"], word)
        for index in range(config.layers):
            layer = p[f"layer_{index}"]
            sums = {}
            for gate in config.gates:
                values = []
                for unit in range(hidden):
                    group, place = divmod(unit, hidden // k)
                    part = len(recurrent[index]) // k
                    seen = x[group * size // k : (group + 1) * size // k]
                    seen = seen + recurrent[index][group * part : (group + 1) * part]
                    weights = layer[gate]["kernel"][group][:, place]
                    values.append(sum(a * float(w) for a, w in zip(seen, weights, strict=True)))
                if config.layer_norm == "gates":
                    values = normalised(values, layer[gate]["scale"], layer[gate]["bias"])
                else:
                    values = added(values, layer[gate]["bias"])
                sums[gate] = values
            for unit in range(hidden):
                forget = sigmoid(sums["forget"][unit])
                accept = 1 - forget if config.cell == "cifg" else sigmoid(sums["input"][unit])
                cells[index][unit] = forget * cells[index][unit] + accept * math.tanh(
                    sums["candidate"][unit]
                )
            shown = cells[index]
            if config.layer_norm == "gates":
                shown = normalised(shown, layer["cell"]["scale"], layer["cell"]["bias"])
            h = [sigmoid(o) * math.tanh(c) for o, c in zip(sums["output"], shown, strict=True)]
            kernel = layer["projection"]["kernel"]
            projected = [
                sum(h[u] * float(kernel[u, e]) for u in range(hidden)) for e in range(size)
            ]
            if config.projection_bias:
                projected = added(projected, layer["projection"]["bias"])
            recurrent[index] = projected if config.recurrence == "projected" else h
            y = added(projected, x) if config.residual else projected
            if config.layer_norm == "output":
                y = normalised(y, layer["norm"]["scale"], layer["norm"]["bias"])
            x = y
        table = p["embedding"] if config.tied else p["output_embedding"]
        logits = [float(np.dot(x, row(table, word))) for word in range(config.vocab_size)]
        if config.output_bias:
            logits = added(logits, p["output_bias"])
        out.append(logits)
    return out


@cache
def perturbed(config: RnnConfig) -> Any:
    """Parameters none of which is 0 or 1, so that no term of the network can be left out unseen."""
    shapes = jax.eval_shape(lambda key: rnn.init(key, config), jax.random.key(1))
    leaves, shape = jax.tree.flatten(shapes)
    rng = np.random.default_rng(2)
    return jax.tree.unflatten(
        shape, [rng.normal(0.1, 0.4, leaf.shape).astype(np.float32) for leaf in leaves]
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_the_network_is_the_cell_written_out_in_loops(name: str) -> None:
    """Every option, three sequences side by side, against Python's own floats."""
    config = VARIANTS[name]
    params = perturbed(config)
    tokens = np.random.default_rng(3).integers(0, config.vocab_size, (3, 4))
    fast = np.asarray(apply(params, config, tokens))
    slow = np.asarray([slow_logits(params, config, [int(t) for t in row]) for row in tokens])
    assert np.abs(slow).max() > 0.1
    np.testing.assert_allclose(fast, slow, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_sequence_fed_in_parts_gives_the_same_logits(name: str) -> None:
    """With the state handed on, cut after any token."""
    config = VARIANTS[name]
    params = perturbed(config)
    tokens = np.random.default_rng(3).integers(0, config.vocab_size, (3, 4))
    whole = apply(params, config, tokens)
    first, state = run(params, config, rnn.initial_state(config, 3), tokens[:, :2])
    second, _ = run(params, config, state, tokens[:, 2:])
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, rtol=1e-5, atol=1e-5)


def test_the_loss_is_the_mean_over_tokens_that_are_there() -> None:
    """Filling up changes neither the loss nor its gradient; nothing at all costs nothing."""
    params = perturbed(SMALL)
    short = np.asarray([[1, 4, 5, 2]])
    filled = np.asarray([[1, 4, 5, 2, -1, -1], [-1] * 6, [-1] * 6])
    logits = np.asarray(apply(params, SMALL, np.repeat([[1, 4, 5, 0]], 3, 0)), float)[0]
    by_hand = np.mean(
        [np.log(np.exp(logits[i]).sum()) - logits[i, w] for i, w in enumerate([4, 5, 2])]
    )
    (loss, slope), (_, of_filled) = (slope_of(params, SMALL, batch) for batch in (short, filled))
    assert float(loss) == pytest.approx(by_hand, rel=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (slope, of_filled)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    nothing, of_nothing = slope_of(params, SMALL, np.full((3, 6), -1))
    assert float(nothing) == 0.0
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(of_nothing))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_papers_count_or_says_why_not(name: str) -> None:
    """Rounded to the digits that were printed; the one that cannot be met is named here."""
    shapes = jax.eval_shape(lambda key: rnn.init(key, preset(name)), jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    printed = PRESETS[name].printed
    ours = f"{count / 1e6:.{len(printed.partition('.')[2])}f}"
    if name == "fng-p4ks":
        assert (ours, printed) == ("0.84", "0.85")
        assert "0.85" in PRESETS[name].note
    else:
        assert ours == printed


def test_the_model_of_dpf_has_eleven_parameter_vectors() -> None:
    """As the paper says where it shares the clip norm among them."""
    shapes = jax.eval_shape(lambda key: rnn.init(key, preset("dpf")), jax.random.key(0))
    assert len(jax.tree.leaves(shapes)) == 11


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"groups": 4}, "groups is 4; .*embedding_size = 6"),
        ({"vocab_size": 3}, "vocab_size is 3; expected 4 or more"),
        ({"layers": 0}, "layers is 0"),
        ({"cell": "gru"}, "cell is 'gru'"),
        ({"layer_norm": "on"}, "layer_norm is 'on'"),
    ],
)
def test_an_impossible_network_is_refused(changed: dict[str, Any], message: str) -> None:
    """With what was found and what is possible."""
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SMALL, **changed)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    """So that a typing mistake is seen at once."""
    with pytest.raises(ConfigError, match=r"'fng'.*fng-p16kl"):
        preset("fng")


def test_metrics_are_those_counted_by_hand() -> None:
    """Accuracy in both definitions, SLL with and without unknown words, perplexity."""
    params = perturbed(SMALL)
    text = [np.asarray(ids, np.int32) for ids in ([4, 0, 5], [7], [3, 3, 0, 0, 9, 8], [])]
    words = known = right = 0
    ln = {"word": 0.0, "known": 0.0, "end": 0.0}
    for ids in text:
        whole = [1, *map(int, ids), 2]
        # Filled up to one length: what comes after has no part in what came before.
        given = np.asarray([whole[:-1] + [0] * (8 - len(whole))])
        logits = np.asarray(apply(params, SMALL, given), float)[0, : len(whole) - 1]
        for row, target in zip(logits, whole[1:], strict=True):
            ln_prob = row[target] - np.log(np.exp(row).sum())
            if target == 2:
                ln["end"] += ln_prob
                continue
            words += 1
            ln["word"] += ln_prob
            if target != 0:
                known += 1
                ln["known"] += ln_prob
                right += int(row.argmax()) == target
    got = metrics.evaluate(params, SMALL, text, batch_size=3)
    assert (got.sentences, got.words, got.known, got.correct) == (4, words, known, right)
    assert got.top1_in_vocabulary == right / known
    assert got.top1 == right / words
    assert got.sll_excluding_oov == pytest.approx(ln["known"] / 4, rel=1e-5)
    assert got.perplexity == pytest.approx(
        math.exp(-(ln["word"] + ln["end"]) / (words + 4)), rel=1e-5
    )
    assert got.perplexity_excluding_oov == pytest.approx(
        math.exp(-(ln["known"] + ln["end"]) / (known + 4)), rel=1e-5
    )


def test_pieces_of_unknown_words_are_left_out_where_they_are_marked() -> None:
    """FNG 7.1: with pieces no id is 0, but a word's pieces may count as out of vocabulary."""
    params = perturbed(SMALL)
    text = [np.asarray([4, 5, 6], np.int32)]
    marks = [np.asarray([False, True, True])]
    plain = metrics.evaluate(params, SMALL, text)
    marked = metrics.evaluate(params, SMALL, text, oov=marks)
    assert (plain.known, marked.known) == (3, 1)
    assert marked.sll_excluding_oov > plain.sll_excluding_oov
