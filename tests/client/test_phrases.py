"""Phrases of one utterance, their automaton beside a count of what is said, and PHRASES.md."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster import ModelFiles, build
from dlm.cli.main import app
from dlm.client import AsyncClient, Client, Phrases, Utterance
from dlm.client.phrases import UNIT, PhraseAutomaton
from dlm.errors import ModelMismatch, QueryError
from dlm.index.making import build_shard_set
from dlm.ngram.vocab import as_text, is_mark
from models import PlainModel, random_model

NEW = ["strangelove", "kubrick"]  # words that the model lacks
PHRASES = {
    "w1 w2 w3": 2.5, "w2 w3": 1.1, "w1": 0.3, "w1 w2 w1 w2": 4.0, "w4 strangelove": 2.0,
    "strangelove w4 strangelove": 1.7, "kubrick": 3.0, "w5 w5": -1.3, "w3 w4 w5 w1 w2 w3": 9.0,
}  # fmt: skip
SAID = ["w1", "w2", "w3", "w4", "w5", "w6", *NEW, "never-seen"]


def expected(said: tuple[str, ...], phrases: dict[str, float] = PHRASES) -> float:
    """What the phrases in some words add, overlaps included, each rounded to 2^-10."""
    total = 0
    for phrase, bonus in phrases.items():
        words = tuple(phrase.split())
        found = sum(said[i : i + len(words)] == words for i in range(len(said)))
        total += found * round(bonus * 1024)
    return total / 1024


def paths(
    utterance: Utterance, seed: int, beam: int = 40, steps: int = 9
) -> Iterator[tuple[list[tuple[str, ...]], Any, Any]]:
    """Beams of random paths: at each step the words so far, the states, and their bonuses."""
    rng = np.random.default_rng(seed)
    said: list[tuple[str, ...]] = [()]
    states: Any = utterance.states([utterance.begin()])
    bonus = np.zeros(1)
    for _ in range(steps):
        words = rng.choice(SAID, 4).tolist()
        found = utterance.extend(states, words)
        assert found.bonus is not None
        every = [(*one, word) for one in said for word in words]
        totals = (bonus[:, None] + found.bonus).reshape(-1)
        kept = rng.permutation(len(every))[:beam]
        said, bonus = [every[at] for at in kept.tolist()], totals[kept]
        states = found.states.reshape(-1)[kept]
        yield said, states, bonus


@pytest.mark.promise("phrases")
@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_bonuses_are_the_phrases_that_a_path_has(local: Client, count: int) -> None:
    """At every length, however the words were asked; equal states have one future."""
    utterance = local.utterance(phrases=PHRASES)
    checked = seed = 0
    while checked < count:
        for said, states, bonus in paths(utterance, seed):
            after = utterance.extend(states, ["</s>"])
            ends = (bonus + after.bonus[:, 0]).tolist()
            assert ends == [expected(one) for one in said]
            finished = [b + utterance.finish(s) for b, s in zip(bonus, states, strict=True)]
            assert finished == ends
            futures = {}
            for key, one in zip(states.keys(), states, strict=True):
                assert futures.setdefault(key, one) == one
            assert len(futures) == len(set(states))
            checked += len(said)
        seed += 1


@pytest.mark.promise("phrases")
def test_the_models_scores_and_messages_are_those_without_phrases(
    files: ModelFiles, client: Client
) -> None:
    """Bit for bit, beside the bonus; servers are asked the same, and never of a new word."""
    phrases = Phrases(PHRASES)
    ours, plain = client.utterance(phrases=phrases), client.utterance()
    words = [*SAID, "w7", 3, 4, b"w8"]
    states: Any = [ours.begin(), ours.null()]
    others: Any = [plain.begin(), plain.null()]
    for _ in range(3):
        sent = client.stats.messages
        found = ours.extend(states, words)
        middle = client.stats.messages
        expected_ = plain.extend(others, words)
        assert middle - sent == client.stats.messages - middle
        for name in ("log10_prob", "matched_order", "ngram_length", "source", "oov"):
            assert np.array_equal(getattr(found, name), getattr(expected_, name)), name
        assert found.states.contexts() == expected_.states.contexts()
        assert expected_.bonus is None
        assert np.array_equal(found.biased, found.log10_prob.astype(np.float64) + found.bonus)
        states = found.states.reshape(-1)[:200]  # one part of a call
        others = expected_.states.reshape(-1)[:200]
        blocks = ours.context_blocks(states[:5])
        direct, block = ours.extend(states[:5], words), blocks.extend(words)
        for name in ("log10_prob", "bonus", "oov"):
            assert np.array_equal(getattr(direct, name), getattr(block, name)), name
        assert direct.states.keys() == block.states.keys()
        for at, word in enumerate(words):
            log10_prob, after = blocks.score(2, word)
            assert (log10_prob, after) == (direct.log10_prob[2, at], direct.states[2, at])
            assert ours.bonus(states[2], after) == direct.bonus[2, at]
    contexts, asked = [["w1", "strangelove"], [3]], ["w2", "kubrick"]
    assert np.array_equal(
        ours.score(contexts, asked).log10_prob, plain.score(contexts, asked).log10_prob
    )
    assert ours.next_words(states[3], 4) == plain.next_words(others[3], 4)


def test_sentences_have_the_bonus_of_their_phrases(local: Client) -> None:
    """With and without an end, of strings or of ids; the probability is the model's own."""
    utterance, plain = local.utterance(phrases=PHRASES), local.utterance()
    said = [("w1", "w2", "w3", "w4", "w5", "w1", "w2", "w3"), ("w4", "strangelove"), (), ("w6",)]
    for eos in (True, False):
        found = utterance.score_sentences([" ".join(one) for one in said], eos=eos)
        ids = utterance.score_sentences([utterance.ids_of(one) for one in said], eos=eos)
        for one, same, words in zip(found, ids, said, strict=True):
            (own,) = plain.score_sentences([words], eos=eos)
            assert (one.log10_prob, one.oovs, own.bonus) == (own.log10_prob, own.oovs, 0.0)
            assert one.bonus == same.bonus == expected(words)
            assert one.biased == one.log10_prob + one.bonus


def test_a_model_of_single_words_takes_phrases(tmp_path: Path) -> None:
    """Its states keep no words, only what was said of a phrase."""
    files = build(random_model(1, order=1), tmp_path, 1)
    with Client.local(files.directory) as client:
        utterance = client.utterance(phrases=PHRASES)
        said = ("w1", "w2", "w3", "strangelove")
        (whole,) = utterance.score_sentences([said])
        steps = utterance.extend([utterance.begin()], [*said, "w4"])
        assert (whole.bonus, steps.states.contexts()) == (expected(said), [()] * 5)
        assert steps.states[0, 0] != steps.states[0, 1]


def test_new_words_are_told_apart_in_states(local: Client) -> None:
    """By what they may lead to; each is the model's unknown word, and has an id of its own."""
    utterance = local.utterance(phrases=PHRASES)
    found = utterance.extend([utterance.begin()], [*NEW, "never-seen"])
    assert found.oov.all() and len(set(found.log10_prob[0])) == 1
    assert found.bonus.tolist() == [[np.float32(round(1.7 * 1024) // 3 / 1024), 3.0, 0.0]]
    first, second, unknown = found.states[0]
    assert len({first, second, unknown}) == 3
    size, known = utterance.vocabulary_size, utterance.vocabulary.id_of("w1")
    ids = utterance.ids_of([*NEW, "never-seen", "w1"])
    assert ids.tolist() == [size + 1, size, 0, known]
    again = utterance.states_after([["never-seen", "strangelove"], ["kubrick"], []])
    assert [state._node for state in again] == [first._node, second._node, 0]
    with pytest.raises(QueryError, match=str(utterance.vocabulary_size + 2)):
        utterance.extend([first], np.array([utterance.vocabulary_size + 2], np.uint32))


def test_states_keep_their_phrases(local: Client, files: ModelFiles) -> None:
    """Pickled, on another client, with the same phrases in another order; no others."""
    utterance = local.utterance(phrases=PHRASES)
    (state,) = utterance.extend([utterance.begin()], ["w1"]).states[0]
    again = local.utterance(phrases=dict(reversed(PHRASES.items())))
    phrases = pickle.loads(pickle.dumps(Phrases(PHRASES)))
    assert phrases == Phrases(PHRASES) and hash(phrases) == hash(Phrases(PHRASES))
    third = local.utterance(phrases=phrases)
    for other in (again, third):
        (copy,) = other.extend([other.begin()], ["w1"]).states[0]
        assert copy == state == pickle.loads(pickle.dumps(state))
        assert hash(copy) == hash(state)
    plain = utterance.without_phrases()
    assert plain.phrases is None
    for other in (plain, local.utterance(phrases={**PHRASES, "w9": 1.0})):
        with pytest.raises(ModelMismatch, match="phrases"):
            other.extend([state], ["w2"])
        with pytest.raises(ModelMismatch, match="phrases"):
            utterance.extend(other.states([other.begin()]), ["w2"])
        with pytest.raises(ModelMismatch, match="phrases"):
            other.finish(state)
        for before, after in ((state, other.begin()), (other.begin(), state)):
            with pytest.raises(ModelMismatch, match="phrases"):
                other.bonus(before, after)


def test_an_asyncio_utterance_has_phrases(local: Client, files: ModelFiles) -> None:
    """The same, awaited; none are none."""

    async def ask() -> tuple[Any, Any]:
        async with AsyncClient.local(files.directory) as client:
            none = client.utterance(phrases={})
            assert none.phrases is None
            utterance = client.utterance(phrases=PHRASES)
            found = await utterance.extend([utterance.begin()], SAID)
            return found, none.bonus(none.begin(), none.begin())

    found, nothing = asyncio.run(ask())
    utterance = local.utterance(phrases=PHRASES)
    same = utterance.extend([utterance.begin()], SAID)
    assert np.array_equal(found.bonus, same.bonus)
    assert found.states.keys() == same.states.keys()
    assert nothing == local.utterance().finish(local.utterance().begin()) == 0.0


@pytest.mark.parametrize(
    ("phrases", "fact"),
    [
        ({"": 1.0}, "phrase 1 has 0 words"),
        ({"w1": 1.0, " \t": 1.0}, "phrase 2 has 0 words"),
        ({"w1": float("nan")}, "nan"),
        ({"w1": float("-inf")}, "inf"),
        ({"w1": 1e9}, "1000000000"),
        ({"w1": 10**5000}, "very large"),
        ({"w1": "2"}, "'2'"),
        ({"w1": None}, "None"),
        ({"w1": True}, "True"),
        ({"w " * 50: 1.0}, "50 words"),
        (dict.fromkeys(map(str, range(100_001)), 1.0), "100,001 phrases"),
        ({"w1 w2": 1.0, "w1  w2": 2.0}, "phrase 2 "),
        ({"w1 </s>": 1.0}, "phrase 1 "),
        ({3: 1.0}, "type int"),
        (["w1"], "type list"),
    ],
)
def test_phrases_that_cannot_be_are_refused(local: Client, phrases: Any, fact: str) -> None:
    """By their number: they may be names, which errors and logs do not show."""
    with pytest.raises(QueryError) as caught:
        local.utterance(phrases=phrases)
    assert fact in str(caught.value)
    assert "w1" not in str(caught.value)


@pytest.mark.promise("phrases")
def test_nothing_shows_a_phrase(local: Client) -> None:
    """Neither the phrases nor what has them."""
    phrases = Phrases({"doctor strangelove": 1.0})
    utterance = local.utterance(phrases=phrases)
    shown = repr([phrases, utterance, utterance.begin(), utterance.phrases])
    assert "strangelove" not in shown and phrases.digest not in shown


@pytest.mark.parametrize("kind", ["probing", "trie", "quant-array"])
def test_a_kenlm_file_has_phrases_as_a_shard_set_has(kind: str) -> None:
    """In calls, in blocks and in sentences; the scores beside them are those without."""
    path = Path(__file__).parents[1] / f"kenlm_files/golden/demo.{kind}.binary"
    with Client.local(path) as client:
        known = [as_text(w) for w in client.vocabulary.words if not is_mark(w)][:3]
        first, second, third = known
        phrases = {f"{first} {second}": 1.5, f"{second} {NEW[0]}": 2.25, first: -0.5, third: 0.75}
        ours, plain = client.utterance(phrases=phrases), client.utterance()
        words = [*known, *NEW]
        said: list[tuple[str, ...]] = [()]
        states, others, total = [ours.begin()], [plain.begin()], np.zeros(1)
        for _ in range(3):
            found, alone = ours.extend(states, words), plain.extend(others, words)
            blocks = ours.context_blocks(states).extend(words)
            assert found.bonus is not None
            for one in (alone, blocks):
                assert np.array_equal(found.log10_prob, one.log10_prob)
                assert np.array_equal(found.oov, one.oov)
            assert np.array_equal(found.bonus, blocks.bonus)
            assert found.states.keys() == blocks.states.keys()
            said = [(*one, word) for one in said for word in words]
            total = (total[:, None] + found.bonus).reshape(-1)
            states, others = list(found.states.reshape(-1)), list(alone.states.reshape(-1))
            ended = [t + ours.finish(s) for t, s in zip(total, states, strict=True)]
            assert ended == [expected(one, phrases) for one in said]
        assert [(one.log10_prob, one.bonus) for one in ours.score_sentences(said)] == [
            (one.log10_prob, expected(words, phrases))
            for one, words in zip(plain.score_sentences(said), said, strict=True)
        ]


SYMBOLS = 4


def spelled(text: str) -> tuple[int, ...]:
    """A phrase of letters as symbols: "a" is 1; any other letter than a to d is no symbol."""
    return tuple("abcd".find(letter) + 1 for letter in text)


def occurrences(phrase: tuple[int, ...], said: tuple[int, ...]) -> int:
    """How often a phrase is in what is said, overlaps included."""
    size = len(phrase)
    return sum(said[i : i + size] == phrase for i in range(len(said) - size + 1))


def random_phrases(rng: np.random.Generator, count: int) -> dict[tuple[int, ...], int]:
    """Short ones of few symbols: prefixes, suffixes and repeats of each other; some unwanted."""
    found = {}
    while len(found) < count:
        phrase = tuple(rng.integers(1, SYMBOLS + 1, rng.integers(1, 6)).tolist())
        found[phrase] = int(rng.integers(-500, 3000))
    return found


def units_of(phrases: dict[tuple[int, ...], int], said: tuple[int, ...]) -> int:
    """The units of all phrases in what is said."""
    return sum(units * occurrences(phrase, said) for phrase, units in phrases.items())


@pytest.mark.parametrize("count", [1, 5, 40])
def test_the_steps_of_a_path_add_up_to_the_phrases_it_completes(count: int) -> None:
    """Word by word, in batches and for whole sentences; every step is that of the kernels."""
    rng = np.random.default_rng(count)
    symbol_of = np.arange(SYMBOLS + 1, dtype=np.int32)
    for _ in range(40):
        phrases = random_phrases(rng, count)
        automaton = PhraseAutomaton.of(list(phrases), list(phrases.values()))
        said = rng.integers(0, SYMBOLS + 1, (25, 12)).astype(np.uint32)
        counts = np.full(len(said), said.shape[1], np.uint32)
        totals, ends = automaton.walk(counts, said.reshape(-1), symbol_of)
        assert totals.tolist() == [units_of(phrases, tuple(row)) for row in said.tolist()]
        nodes, added = np.zeros(len(said), np.int32), np.zeros(len(said), np.int64)
        summed = np.zeros(len(said))
        for column in said.T:
            ones = np.ones(len(said), np.uint32)
            after, bonus = automaton.advance(nodes, ones, np.ascontiguousarray(column), symbol_of)
            steps = zip(nodes.tolist(), column.tolist(), strict=True)
            assert after.tolist() == [automaton.step(*step) for step in steps]
            added += automaton.completed[after] + automaton.held[after] - automaton.held[nodes]
            summed += bonus
            nodes = after
        assert nodes.tolist() == ends.tolist()
        assert (summed == added * UNIT).all()
        assert (added - automaton.held[nodes] == totals).all()  # shares are given back
        assert (automaton.held >= 0).all() and automaton.held[0] == 0


@pytest.mark.parametrize(
    ("phrases", "said", "bonuses"),
    [
        ({"ab": 10}, "xabx", [0, 5, 5, 0]),  # half of it with each word
        ({"abc": 9}, "abx", [3, 3, -6]),  # leaving gives back
        ({"ab": 10}, "aab", [5, 0, 5]),  # beginning anew keeps the share
        ({"aa": 4}, "aaaa", [2, 4, 4, 4]),  # overlaps; the last a holds a share again
        ({"abcd": 8, "bc": 6}, "abcx", [2, 2, 8, -6]),  # one within another, which is left
        ({"a": 5, "ab": -4}, "ab", [5, -4]),  # what is unwanted costs when it is complete
        ({"a": 0}, "a", [0]),
        ({}, "ab", [0, 0]),
    ],
)
def test_a_bonus_is_handed_out_word_by_word(
    phrases: dict[str, int], said: str, bonuses: list[int]
) -> None:
    """In shares of a phrase, rounded down; the last word brings the rest."""
    automaton = PhraseAutomaton.of([spelled(phrase) for phrase in phrases], list(phrases.values()))
    nodes = list(
        itertools.accumulate(spelled(said), lambda node, one: automaton.step(node, one), initial=0)
    )
    found = [
        int(automaton.completed[after] + automaton.held[after] - automaton.held[before])
        for before, after in itertools.pairwise(nodes)
    ]
    assert found == bonuses


TEXT = (Path(__file__).parents[2] / "dlm/client/PHRASES.md").read_text(encoding="utf-8")


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a general model and a domain's."""
    monkeypatch.chdir(tmp_path)
    words = {
        "model": ["the", "a", "there", "man", "is", "house", "peter", "doctor"],
        "radiology": ["the", "thorax", "is", "there"],
    }
    for name, listed in words.items():
        marks = ["<s>", "</s>", "<unk>"]
        ngrams: dict[tuple[str, ...], Any] = {(w,): (-1.0, -0.5) for w in [*listed, *marks]}
        ngrams |= {("<s>", "the"): (-0.5, -0.25), ("the", "is"): (-0.25, None)}
        PlainModel(2, ngrams).write(tmp_path / "model.arpa")
        build_shard_set(tmp_path / "model.arpa", tmp_path / "shards" / name, 1)


@pytest.mark.usefixtures("_folder")
def test_the_python_of_the_page_prints_what_its_comments_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Names per utterance, and a mixture."""
    names, mixture = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    exec(names, {})
    printed = " ".join(capsys.readouterr().out.split())
    for said in re.findall(r"# (\[\[.*?\]\])", names):
        assert said in printed
    assert printed.endswith(" 3.0")
    found: dict[str, Any] = {}
    exec(mixture, found)
    assert sum(found["tuned"].weights) == pytest.approx(1.0)
    assert found["first"].log10_prob.shape == (1, 3)


@pytest.mark.usefixtures("_folder")
def test_the_command_of_the_page_rescores_with_its_file() -> None:
    """The hypothesis with a name of the list is the best."""
    (listed,) = [b for kind, b in re.findall(r"```(\w*)\n(.*?)```", TEXT, re.S) if not kind]
    Path("names.tsv").write_text(listed, encoding="utf-8")
    hyps = [{"words": f"doctor {name} is there"} for name in ("house", "strangelove")]
    Path("nbest.jsonl").write_text(json.dumps({"id": "a", "hyps": hyps}), encoding="utf-8")
    (line,) = re.findall(r"^\$ dlm (rescore .*)$", TEXT, re.M)
    plain = line.replace(" --phrases names.tsv", "").replace("rescored.jsonl", "plain.jsonl")
    for one in (plain, line):
        done = CliRunner().invoke(app, shlex.split(one))
        assert done.exit_code == 0, done.output
    best = [
        json.loads(Path(name).read_text())["hyps"][0]["words"].split()[1]
        for name in ("plain.jsonl", "rescored.jsonl")
    ]
    assert best == ["house", "strangelove"]
