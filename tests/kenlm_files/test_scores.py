"""Scores of KenLM's files, equal to those of the package kenlm in every bit.

`golden/expected.json` has what the package answered; golden/README.md says how.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlm.asr.kenlm as kenlm
from dlm.asr.open import open_model
from dlm.client import Client
from dlm.errors import ConfigError, KenlmFormatError, QueryError
from dlm.index.search.text.score import score_lines
from dlm.kenlm.layout import read_layout
from dlm.kenlm.model import KenlmFile
from dlm.ngram.query import QueryGroups

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(path.name for path in GOLDEN.glob("*.binary"))
EXPECTED: dict[str, dict[str, Any]] = json.loads((GOLDEN / "expected.json").read_text())
LINES = (GOLDEN / "sentences.txt").read_bytes().split(b"\n")[:-1]
ENDS = np.cumsum([0, *(len(line.split()) + 1 for line in LINES)])
ONE_OF_EACH = [f"demo.{kind}.binary" for kind in ("probing", "rest", "trie", "quant-array")]


def expected_of(name: str) -> dict[str, Any]:
    """What the package answered for a file."""
    return EXPECTED[name.split(".")[0] + (".quantised" if "quant" in name else ".exact")]


@pytest.mark.promise("kenlm_api")
@pytest.mark.parametrize(
    "name",
    [n if n in ONE_OF_EACH else pytest.param(n, marks=pytest.mark.slow) for n in FILES],
)
def test_the_kenlm_api_gives_kenlms_scores_lengths_and_states(name: str) -> None:
    """Sums too, which KenLM adds in float32; and states are equal where KenLM's are."""
    model, expected = kenlm.Model(str(GOLDEN / name)), expected_of(name)
    assert [model.score(line) for line in LINES] == expected["score"]
    assert model.score_many(LINES).tolist() == expected["score"]
    found = [[list(token) for token in model.full_scores(line)] for line in LINES]
    assert found == expected["full_scores"]
    states: list[kenlm.State] = []
    numbers = []
    for line, tokens in zip(LINES, expected["full_scores"], strict=True):
        before = kenlm.State()
        model.BeginSentenceWrite(before)
        for word, token in zip(line.decode("latin-1").split(), tokens, strict=False):
            after = kenlm.State()
            if line.isascii():
                full = model.BaseFullScore(before, word, after)
                assert [full.log_prob, full.ngram_length, full.oov] == token
                assert model.BaseScore(before, word, after) == token[0]
                states.append(after)
                numbers.append(states.index(after))
            before = after
    assert numbers == expected["states"]


@pytest.mark.promise("kenlm_api")
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_client_of_a_file_gives_the_same_scores(name: str) -> None:
    """Sentences, extended states, blocks, distributions, and after it was pickled."""
    expected = expected_of(name)
    with open_model(GOLDEN / name) as client:
        utterance = pickle.loads(pickle.dumps(client)).utterance()
        found = utterance.score_sentences(LINES)
        tokens = [[t[0] for t in tokens] for tokens in expected["full_scores"]]
        assert [s.token_log10_prob.tolist() for s in found] == tokens
        words = ["the", "zebra", "sea", b"</s>", "of"]
        states = utterance.extend([utterance.begin(), utterance.null()], words).states.reshape(-1)
        one = utterance.extend(states, words)
        blocks = utterance.context_blocks(states)
        every = blocks.extend(words)
        assert every.log10_prob.tolist() == one.log10_prob.tolist()
        assert every.ngram_length.tolist() == one.ngram_length.tolist()
        assert every.states.keys() == one.states.keys()
        row = blocks.distribution()[3]
        ids = [utterance.vocabulary.id_of(word) for word in words]
        assert row[ids].tolist() == one.log10_prob[3].tolist()
        assert blocks.score(3, "the") == (float(row[ids[0]]), one.states[3, 0])
        best = utterance.next_words(states[3], 3)
        begin = utterance.vocabulary.begin_id
        assert [prob for _, prob in best] == sorted(np.delete(row, begin), reverse=True)[:3]
        model = kenlm.Model(str(GOLDEN / name))
        batch, after = model.base_score_batch([kenlm.State()], ["the", "sea"])
        null = utterance.extend([utterance.null()], ["the", "sea"])
        assert batch.tolist() == null.log10_prob.tolist()
        assert after[0, 0]._words() == null.states[0, 0]._words[::-1]


@pytest.mark.parametrize("name", FILES)
def test_lines_of_text_are_summed_as_kenlm_does(name: str) -> None:
    """With the tokens' lengths, and one count of unknown words."""
    expected = expected_of(name)
    lines = score_lines(KenlmFile.open(GOLDEN / name), b"\n".join(LINES))
    assert lines.totals.tolist() == expected["score"]
    oovs = [sum(t[2] for t in tokens) for tokens in expected["full_scores"]]
    assert lines.counts.oovs.tolist() == oovs
    found = np.delete(lines.answers.ngram_length, ENDS[:-1] + np.arange(len(LINES)))
    assert found.tolist() == [t[1] for tokens in expected["full_scores"] for t in tokens]


def test_a_file_without_words_scores_and_lists_words_with_a_list(tmp_path: Path) -> None:
    """Without one, what needs words says how to pass them."""
    path = GOLDEN / "demo.probing-v.binary"
    stored = kenlm.Model(str(GOLDEN / "demo.probing.binary"))
    with pytest.raises(ConfigError, match="vocab=FILE"):
        _ = kenlm.Model(str(path)).vocab[1]
    listed = tmp_path / "words.txt"
    listed.write_text("\n".join(stored.vocab))
    config = kenlm.Config()
    config.vocab = str(listed)
    model = kenlm.Model(str(path), config)
    assert list(model.vocab) == list(stored.vocab)
    assert model.top_k(kenlm.State(), 5) == stored.top_k(kenlm.State(), 5)
    with Client.local(path, vocab=listed) as client:
        assert client.vocabulary.words[3] == stored.vocab[3].encode()
    with pytest.raises(ConfigError, match="not a KenLM binary"):
        open_model("shards/tiny/exact-2", vocab=listed)


def test_states_of_another_file_and_ids_out_of_range_are_refused() -> None:
    """Two files have two model ids."""
    probing, trie = (open_model(GOLDEN / f"demo.{kind}.binary") for kind in ("probing", "trie"))
    with pytest.raises(TypeError, match="model"):
        probing.utterance().extend([trie.utterance().begin()], ["the"])
    with pytest.raises(QueryError, match="175"):
        probing.utterance().score([[]], [175])


class Guarded:
    """A file's bytes in memory, between pages that cannot be read."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self._room = -(-size // page) * page
        self._map = mmap.mmap(-1, self._room + 2 * page)
        self._all = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        for at in (0, self._room + page):
            address = ctypes.c_void_p(self._all.ctypes.data + at)
            assert libc.mprotect(address, ctypes.c_size_t(page), 0) == 0

    def place(self, data: np.ndarray) -> np.ndarray:
        """`data` copied to the end; of a whole number of eight bytes, as a map is aligned."""
        end = mmap.PAGESIZE + self._room
        found: np.ndarray = self._all[end - len(data) : end]
        found[:] = data
        return found


def damage(data: np.ndarray, rng: random.Random) -> np.ndarray:
    """A copy with one of: a bit flipped, numbers that lie, a stretch of ones or noise, a cut."""
    data = data.copy()
    for _ in range(rng.choice((1, 1, 3, 20))):
        at = rng.randrange(88, len(data) - 8)
        kind = rng.randrange(5)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            number = rng.choice(
                (0, 1, 7, 175, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
            )
            data[at : at + 8] = list(number.to_bytes(8, "little"))
        elif kind == 2:
            data[at : at + rng.randrange(1, 400)] = rng.choice((0, 255))
        elif kind == 3:
            part = data[at : at + rng.randrange(1, 200)]
            part[:] = list(rng.randbytes(len(part)))
        elif rng.random() < 0.1:
            return data[:at]
    return data


def ask_everything(file: KenlmFile, rng: random.Random) -> None:
    """Text, groups, and states, with any of the file's ids."""
    lines = score_lines(file, b"\n".join(LINES))
    assert len(lines.totals) == len(LINES)
    lengths = [rng.randrange(file.order) for _ in range(8)]
    words = np.array(rng.sample(range(file.vocabulary_size), 6), np.uint32)
    contexts = [rng.randrange(file.vocabulary_size) for _ in range(sum(lengths))]
    answers = file.score_groups(
        QueryGroups(
            np.array(lengths, np.uint8),
            np.array(contexts, np.uint32),
            np.full(8, 6, np.uint32),
            np.tile(words, 8),
        )
    )
    assert answers.ngram_length.min() >= 1
    assert answers.state_length.max() < file.order


@pytest.mark.promise("kenlm_api")
@pytest.mark.parametrize("name", [name for name in FILES if "-v" not in name])
def test_damaged_files_are_refused_or_score_without_a_read_outside(name: str) -> None:
    """No crash and no endless probe: pages around the file cannot be read."""
    rng = random.Random(name)
    whole = np.fromfile(GOLDEN / name, np.uint8)
    memory = Guarded(len(whole) + 8)
    refused = 0
    for _ in range(150):
        data = damage(whole, rng)
        # As a map is: from an aligned address. The rest of its last page is not guarded.
        placed = memory.place(np.concatenate([data, np.zeros(-len(data) % 8, np.uint8)]))
        try:
            layout = read_layout(placed[: len(data)], name)
        except KenlmFormatError:
            refused += 1
            continue
        ask_everything(KenlmFile(placed[: len(data)], layout), rng)
    assert refused < 150


def test_a_sentence_too_long_for_one_call_scores_the_same() -> None:
    """As float32 sums of its tokens, added one after another."""
    model = kenlm.Model(str(GOLDEN / "demo.trie.binary"))
    text = b" ".join(LINES * 40)
    total = np.float32(0)
    for log10_prob, _, _ in model.full_scores(text):
        total += np.float32(log10_prob)
    assert model.score(text) == total
