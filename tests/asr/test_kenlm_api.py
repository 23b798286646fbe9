"""`dlm.asr.kenlm` by itself: every answer is the oracle's, here and from servers.

None of these needs the package kenlm; `test_kenlm_peer.py` compares with it.
Above 600 lines: one interface, on models that all of its tests share.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlm.asr.kenlm as kenlm
import forked
from cluster import ROOT, WAIT_S, Cluster, ModelFiles, ProcessServer, build
from dlm.asr.kenlm import table as tables
from dlm.client import ClientConfig
from dlm.errors import ModelMismatch, QueryError
from models import HAND_MADE, random_model

MODEL = random_model(5, order=4, words=30, per_order=300)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model, suffixes missing, in two shards."""
    return build(MODEL, tmp_path_factory.mktemp("model"), 2)


@pytest.fixture(scope="module")
def cluster(files: ModelFiles) -> Iterator[Cluster]:
    """Its servers."""
    with Cluster(files, kind=ProcessServer) as running:  # a process with servers cannot fork
        yield running


def mapped(folder: Path) -> kenlm.Model:
    """A model whose files are mapped."""
    config = kenlm.Config()
    config.load_method = kenlm.LoadMethod.LAZY
    return kenlm.Model(os.fspath(folder), config)


PLACES = ["unpacked", "one shard mapped", "two shards mapped", "servers"]


@pytest.fixture(scope="module", params=PLACES)
def model(
    request: pytest.FixtureRequest,
    files: ModelFiles,
    cluster: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> kenlm.Model:
    """The same model in each place."""
    if request.param == "unpacked":
        return kenlm.Model(os.fsencode(files.directory))
    if request.param == "one shard mapped":
        return mapped(files.again(1).directory)
    if request.param == "two shards mapped":
        return mapped(files.directory)
    return served(cluster, tmp_path_factory.mktemp("served"))


def served(cluster: Cluster, folder: Path, **settings: Any) -> kenlm.Model:
    """A model behind servers."""
    config = kenlm.Config()
    settings = {"deadline_s": 60.0, "bigram_fallback": True, **settings}
    config.client = ClientConfig(cache_dir=folder / "cache", **settings)
    return kenlm.Model(os.fspath(cluster.write(folder / "cluster.toml")), config)


def sentences(count: int, seed: int = 1) -> list[str]:
    """Random ones; some words the model lacks."""
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(30)] + ["never", "<unk>", "</s>"]
    return [" ".join(rng.choices(words, k=rng.randrange(9))) for _ in range(count)]


def expected(files: ModelFiles, text: str, bos: bool, eos: bool) -> list[tuple[float, int, bool]]:
    """What the oracle says of each token."""
    vocabulary = files.oracle.vocabulary
    ids = [vocabulary.id_of(word) for word in text.split()]
    context = [vocabulary.begin_id] * bos
    out = []
    for number, word in enumerate([*ids, *[vocabulary.end_id] * eos]):
        score = files.oracle.score(context, word)
        is_end = number == len(ids)
        out.append((float(score.log10_prob), score.ngram_length, word == 0 and not is_end))
        context.append(word)
    return out


def begun(model: kenlm.Model) -> kenlm.State:
    """The state at the beginning of a sentence."""
    state = kenlm.State()
    model.BeginSentenceWrite(state)
    return state


def after(model: kenlm.Model, text: str, state: kenlm.State | None = None) -> kenlm.State:
    """The state after some words."""
    state = begun(model) if state is None else state
    for word in text.split():
        state, before = kenlm.State(), state
        model.BaseScore(before, word, state)
    return state


# -- sentences ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_sentences_score_as_by_the_oracle(
    model: kenlm.Model, files: ModelFiles, bos: bool, eos: bool
) -> None:
    """Whole, by token, many at once, and with a perplexity."""
    texts = sentences(25)
    whole = [sum(prob for prob, _, _ in expected(files, t, bos, eos)) for t in texts]
    for text, total in zip(texts, whole, strict=True):
        assert list(model.full_scores(text, bos, eos)) == expected(files, text, bos, eos)
        assert model.score(text, bos=bos, eos=eos) == total
        assert model.score(text.encode(), bos, eos) == total
    assert model.score_many(texts, bos, eos).tolist() == whole
    assert model.score_many([], bos, eos).tolist() == []
    with pytest.raises(TypeError, match=r"pass \[sentence\]"):
        model.score_many("one string")
    if bos and eos:
        words = len(texts[3].split())
        assert model.perplexity(texts[3]) == pytest.approx(10 ** (-whole[3] / (words + 1)))


def test_a_sentence_is_split_at_white_space_of_ascii_alone(model: kenlm.Model) -> None:
    """However it is scored; what else Unicode calls a space is part of a word."""
    for text in ("w1\tw2\nw3", " w1  w2\x0bw3\x0c", "w1\r\nw2 w3"):
        assert model.score(text) == model.score("w1 w2 w3")
        assert model.score_many([text, "w4"]).tolist() == [model.score(text), model.score("w4")]
    assert len(list(model.full_scores("w1\u00a0w2\u3000w3\x1cw4", eos=False))) == 1
    assert model.score("w1\u00a0w2") == model.score("unknown")


def test_a_sentence_longer_than_any_buffer_scores_the_same(model: kenlm.Model) -> None:
    """4,096 bytes are scored in another way."""
    text = "w1 w2 never " * 700
    assert model.score(text) == pytest.approx(sum(p for p, _, _ in model.full_scores(text)))


# -- states -------------------------------------------------------------------------------------


def test_states_are_equal_exactly_where_the_oracle_s_are(
    model: kenlm.Model, files: ModelFiles
) -> None:
    """And each word after them scores as by the oracle, also where `in` and `out` are one."""
    vocabulary = files.oracle.vocabulary
    seen: list[tuple[kenlm.State, tuple[int, ...]]] = []
    for text in sentences(30, seed=2):
        state, context = begun(model), [vocabulary.begin_id]
        for word in text.split():
            found, same = kenlm.State(), copy.copy(state)
            full = model.BaseFullScore(state, word, found)
            assert model.BaseScore(same, word, same) == full.log_prob
            assert same == found
            score = files.oracle.score(context, vocabulary.id_of(word))
            assert full.log_prob == float(score.log10_prob)
            assert full.ngram_length == score.ngram_length
            assert full.oov == (vocabulary.id_of(word) == 0)
            context.append(vocabulary.id_of(word))
            seen.append((found, files.oracle.state(context)))
            state = found
    for one, words in seen[::3]:
        for other, other_words in seen:
            assert (one == other) == (words == other_words)
            assert (one != other) == (words != other_words)
            assert words != other_words or hash(one) == hash(other)


def test_states_are_ordered_copied_hashed_and_pickled(model: kenlm.Model) -> None:
    """As KenLM's, and beyond: with `deepcopy`'s argument, by pickle."""
    one, two = after(model, "w1"), after(model, "w2 w3")
    assert (one < two) != (one > two) or one == two
    assert (one <= two) == (one < two or one == two)
    assert (one >= two) == (one > two or one == two)
    for same in (
        copy.copy(one),
        copy.deepcopy(one),
        one.__deepcopy__(),
        pickle.loads(pickle.dumps(one)),
    ):
        assert same is not one
        assert same == one
        assert hash(same) == hash(one)
        out, again = kenlm.State(), kenlm.State()
        assert model.BaseScore(same, "w2", out) == model.BaseScore(one, "w2", again)
        assert out == again
    assert {one: 1}[copy.copy(one)] == 1
    assert one.__eq__(3) is NotImplemented
    with pytest.raises(TypeError):
        assert one < 3  # type: ignore[operator]


def test_a_state_is_no_sequence(model: kenlm.Model) -> None:
    """An array of objects holds it whole."""
    assert np.array([begun(model)] * 3).shape == (3,)
    with pytest.raises(TypeError):
        iter(begun(model))  # type: ignore[call-overload]


def test_a_new_state_and_the_one_after_a_sentence_know_nothing(model: kenlm.Model) -> None:
    """And <s> as a word leads to the beginning, whatever its own score."""
    null, out = kenlm.State(), kenlm.State()
    model.NullContextWrite(null)
    assert kenlm.State() == null
    assert hash(kenlm.State()) == hash(null)
    assert model.BaseScore(kenlm.State(), "w1", out) == model.BaseScore(null, "w1", out)
    model.BaseScore(null, "<s>", out)
    assert out == begun(model)


def test_words_and_states_of_a_wrong_type_are_type_errors(model: kenlm.Model) -> None:
    """What was found stands in the message."""
    state, out = begun(model), kenlm.State()
    for word in (b"w1", None, 3):
        with pytest.raises(TypeError):
            model.BaseScore(state, word, out)  # type: ignore[arg-type]
    for call in (
        lambda: model.BaseScore(3, "w1", out),  # type: ignore[arg-type]
        lambda: model.BaseScore(state, "w1", object()),  # type: ignore[arg-type]
        lambda: model.BaseFullScore(None, "w1", out),  # type: ignore[arg-type]
        lambda: model.BeginSentenceWrite("x"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"kenlm\.State"):
            call()
    for call in (lambda: model.score(3), lambda: 3 in model, lambda: kenlm.Model(None)):  # type: ignore[arg-type,operator]
        with pytest.raises(TypeError, match="Cannot convert"):
            call()
    with pytest.raises(TypeError, match="config"):
        kenlm.Model("x", 3)  # type: ignore[arg-type]


def test_a_state_of_another_model_is_refused(model: kenlm.Model, tmp_path: Path) -> None:
    """Also one that was pickled; scores of two models never meet in a sentence."""
    other = kenlm.Model(
        os.fspath(build(HAND_MADE["blank_pair_with_weight"], tmp_path, 1).directory)
    )
    state = after(other, "a b")
    for foreign in (state, pickle.loads(pickle.dumps(state))):
        with pytest.raises(ModelMismatch):
            model.BaseScore(foreign, "w1", kenlm.State())


def test_a_state_of_another_shard_set_is_refused_by_name(
    model: kenlm.Model, files: ModelFiles
) -> None:
    """The models are equal, so the message names both shard sets."""
    other = mapped(files.again(3).directory)
    with pytest.raises(ModelMismatch) as caught:
        model.BaseScore(after(other, "w1"), "w2", kenlm.State())
    sets = [one._opened.table.model_info.shard_set for one in (model, other)]
    assert all(shard_set in str(caught.value) for shard_set in sets)


def test_a_table_that_is_full_is_replaced(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States that are held go on, and equal those of the new table."""
    monkeypatch.setitem(tables.StepTable.__init__.__kwdefaults__, "states", 12)
    model = mapped(files.again(1, seed=1).directory)  # which nobody else has open
    first = after(model, "w1 w2")
    held = [after(model, text) for text in sentences(40)]
    again = [after(model, text) for text in sentences(40)]
    assert held == again
    assert [hash(state) for state in held] == [hash(state) for state in again]
    assert first == after(model, "w1 w2")
    words = [f"w{i}" for i in range(12)]
    scores, following = model.base_score_batch([first, held[0]], words)
    for w, word in enumerate(words):
        out = kenlm.State()
        assert scores[0, w] == model.BaseScore(first, word, out)
        assert following[0, w] == out
    for state, text in zip(held, sentences(40), strict=True):
        prob = model.BaseScore(state, "w3", kenlm.State())
        assert prob == expected(files, f"{text} w3", True, False)[-1][0]


# -- the model ----------------------------------------------------------------------------------


def test_a_model_too_large_for_memory_stays_in_its_files(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default a model is unpacked; where memory is short it is mapped, and answers the same."""
    copies = [files.again(1, seed=seed).directory for seed in (2, 3)]  # that nobody has open
    small = kenlm.Model(os.fspath(copies[0]))
    monkeypatch.setattr(tables, "available_bytes", lambda: 100_000)
    large = kenlm.Model(os.fspath(copies[1]))
    kinds = [type(m._opened.table) for m in (small, large)]
    assert kinds == [tables.UnpackedTable, tables.StepTable]
    for text in sentences(20):
        assert large.score(text) == small.score(text)
        states = [begun(large), after(large, text)], [begun(small), after(small, text)]
        found, expected = (
            m.base_score_batch(s, text.split()) for m, s in zip((large, small), states, strict=True)
        )
        assert np.array_equal(found[0], expected[0])
        assert states[0][1]._words() == states[1][1]._words()


def test_a_model_says_what_it_is(model: kenlm.Model, files: ModelFiles) -> None:
    """Its order, its path in bytes, its words; and it is a `LanguageModel` by its older name."""
    assert model.order == 4
    assert isinstance(model.path, bytes)
    assert Path(os.fsdecode(model.path)).is_absolute()
    assert repr(model) == f"<Model from {os.fsencode(Path(os.fsdecode(model.path)).name)!r}>"
    assert [word in model for word in ("w1", b"w1", "<s>", "</s>")] == [True] * 4
    assert [word in model for word in ("never", "", "<unk>", b"<UNK>")] == [False] * 4
    assert issubclass(kenlm.LanguageModel, kenlm.Model)
    assert list(model.vocab) == files.words()
    assert model.vocab[1:3] == files.words()[1:3]
    assert len(model.vocab) == len(files.words())
    assert "w1" in model.vocab
    assert "never" not in model.vocab


def test_settings_are_those_of_kenlm() -> None:
    """Names, numbers and defaults."""
    config = kenlm.Config()
    assert (config.load_method, config.show_progress, config.arpa_complain) == (2, True, 0)
    load, complain = kenlm.LoadMethod, kenlm.ARPALoadComplain
    methods = ("LAZY", "POPULATE_OR_LAZY", "POPULATE_OR_READ", "READ", "PARALLEL_READ")
    assert [getattr(load, name) for name in methods] == list(range(5))
    assert [complain.ALL, complain.EXPENSIVE, complain.NONE] == [0, 1, 2]


def test_a_full_score_is_read_only() -> None:
    """Its three values, and how it prints."""
    score = kenlm.FullScoreReturn(-1.5, 2, True)
    assert (score.log_prob, score.ngram_length, score.oov) == (-1.5, 2, True)
    assert repr(score) == "FullScoreReturn(-1.5, 2, True)"
    with pytest.raises(AttributeError):
        score.oov = False  # type: ignore[misc]


def test_a_model_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    """With the words of KenLM, and dlm's reason."""
    (tmp_path / "empty.arpa").touch()
    for name, reason in (("none.arpa", "none.arpa"), ("empty.arpa", "empty")):
        with pytest.raises(OSError, match=rf"Cannot read model .*{reason}") as caught:
            kenlm.Model(os.fspath(tmp_path / name))
        assert caught.value.__cause__ is not None


def test_an_arpa_file_and_a_pointer_to_it_are_models(
    files: ModelFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is sharded once, and says so unless that is not wanted."""
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path / "cache"))
    arpa = files.directory.with_name("model.arpa")
    (tmp_path / "remote.bin").write_text(f"dlm://{arpa}\n")
    model = kenlm.Model(str(arpa))
    assert "sharding" in capsys.readouterr().err
    pointed = kenlm.LanguageModel(str(tmp_path / "remote.bin"))
    assert capsys.readouterr().err == ""
    assert pointed.path == os.fsencode(tmp_path / "remote.bin")
    assert Path(os.fsdecode(pointed.path)).is_file()  # frameworks copy it
    for text in sentences(10):
        total = sum(prob for prob, _, _ in expected(files, text, True, True))
        assert model.score(text) == pointed.score(text) == total


def test_a_pickled_model_is_opened_by_its_path_and_not_twice(model: kenlm.Model) -> None:
    """States of a copy are states of the model."""
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin) is kenlm.Model
    assert twin.path == model.path
    assert twin._opened is model._opened
    assert model.BaseScore(after(twin, "w1 w2"), "w3", kenlm.State()) == model.BaseScore(
        after(model, "w1 w2"), "w3", kenlm.State()
    )
    path = copy.copy(model).__reduce__()[1][0]
    assert path == model.path


# -- beyond KenLM -------------------------------------------------------------------------------


def test_a_batch_is_the_loop_of_its_steps(model: kenlm.Model) -> None:
    """The same words for every state, or words of its own for each."""
    states = [after(model, text) for text in sentences(8)] + [kenlm.State()]
    words = [f"w{i}" for i in range(12)] + ["never", "</s>", "<unk>"]
    rng = random.Random(3)
    rows = [rng.sample(words, 4) for _ in states]
    for asked in (words, rows):
        scores, following = model.base_score_batch(states, asked)
        assert scores.dtype == np.float32
        assert (
            following.shape
            == scores.shape
            == (len(states), len(rows[0] if asked is rows else words))
        )
        for k, state in enumerate(states):
            for w, word in enumerate(rows[k] if asked is rows else words):
                out = kenlm.State()
                assert float(scores[k, w]) == model.BaseScore(state, word, out)
                assert following[k, w] == out
    assert model.base_score_batch(states, [])[0].shape == (len(states), 0)
    assert model.base_score_batch([], words)[0].shape == (0, len(words))


def test_a_batch_of_a_wrong_shape_is_refused(model: kenlm.Model) -> None:
    """A string is no list of words, a state no list of states."""
    state = begun(model)
    for states, words in (
        (state, ["w1"]), ([state], "w1"), ([state, state], [["w1"]]),
        ([state, state], [["w1"], ["w1", "w2"]]),
    ):  # fmt: skip
        with pytest.raises(QueryError):
            model.base_score_batch(states, words)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        model.base_score_batch([3], ["w1"])  # type: ignore[list-item]


def test_the_next_words_are_those_that_score_best(model: kenlm.Model) -> None:
    """Every word has the score it has alone; <s> follows nothing."""
    state = after(model, "w1 w2")
    every = model.next_distribution(state)
    assert every.dtype == np.float32
    words = list(model.vocab)
    alone = [model.BaseScore(state, word, kenlm.State()) for word in words]
    assert every.tolist() == alone
    best = sorted((i for i in range(len(words)) if words[i] != "<s>"), key=lambda i: (-alone[i], i))
    assert model.top_k(state, 7) == [(words[i], alone[i]) for i in best[:7]]
    assert len(model.top_k(state, 10**6)) == len(words)
    assert model.top_k(state, 0) == []
    with pytest.raises(ValueError, match="k is -1"):
        model.top_k(state, -1)


def test_a_sentence_is_asked_once(files: ModelFiles, tmp_path: Path, cluster: Cluster) -> None:
    """Its words are remembered from `score` to `score`, and by `full_scores` and states."""
    model = served(cluster, tmp_path)
    texts = sentences(20)
    totals = [model.score(text) for text in texts]
    assert totals == [sum(p for p, _, _ in expected(files, t, True, True)) for t in texts]
    first = model.stats()
    words = sum(len(text.split()) + 1 for text in texts)
    assert first["queries"] == words
    assert 0 < first["cache_misses"] < words  # sentences begin alike
    assert [model.score(text) for text in texts] == totals
    for text in texts:
        assert list(model.full_scores(text)) == expected(files, text, True, True)
        after(model, text)
    again = model.stats()
    assert (again["cache_misses"], again["contexts_fetched"]) == (first["cache_misses"], 0)
    assert again["queries"] == 4 * words - len(texts)
    assert model.score("w1 w2", bos=False) == sum(
        prob for prob, _, _ in expected(files, "w1 w2", False, True)
    )


# -- processes, threads, servers that fail --------------------------------------------------------


def _totals(model: kenlm.Model, results: Any) -> None:
    results.put([model.score(text) for text in sentences(20)])


def _in_child(model: kenlm.Model, method: str) -> list[float]:
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=_totals, args=(model, results))
    child.start()
    found: list[float] = results.get(timeout=WAIT_S)
    child.join()
    return found


def test_a_forked_child_scores_the_same(model: kenlm.Model) -> None:
    """A pool of processes needs nothing special, and the parent goes on."""
    totals = [model.score(text) for text in sentences(20)]
    assert _in_child(model, "fork") == totals
    assert [model.score(text) for text in sentences(20)] == totals


def test_threads_share_a_model(model: kenlm.Model, files: ModelFiles) -> None:
    """Each gets its own sentences' scores."""
    wrong: list[str] = []

    def work(seed: int) -> None:
        for text in sentences(30, seed):
            state, total = begun(model), 0.0
            for word in text.split():
                total += model.BaseScore(state, word, state)
            if total != sum(prob for prob, _, _ in expected(files, text, True, False)):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.promise("beam_goes_on")
def test_a_beam_search_goes_on_where_servers_die(files: ModelFiles, tmp_path: Path) -> None:
    """2-grams answer, which is counted and not remembered."""
    with Cluster(files) as cluster:
        model = served(cluster, tmp_path, heartbeats=False)
        texts = sentences(30)
        whole = [model.score(text) for text in texts]
    assert [model.score(text) for text in texts] == whole  # remembered
    others = sentences(30, seed=9)
    totals = [sum(p for p, _, _ in expected(files, t, True, True)) for t in others]
    counted = 0
    for _ in range(2):
        assert [model.score(text) for text in others] != totals
        assert model.stats()["bigram_fallback"] > counted
        counted = model.stats()["bigram_fallback"]
    state = after(model, "w1 w2")
    for _ in range(2):
        for word in ("w3", "w4", "w5", "w6"):
            assert model.BaseScore(state, word, kenlm.State()) <= 0.5
    assert model.base_score_batch([state], ["w3", "w7"])[0].shape == (1, 2)
    assert model.next_distribution(state).shape == (len(model.vocab),)
    for text in others:
        assert len(list(model.full_scores(text))) == len(text.split()) + 1
    assert model.stats()["bigram_fallback"] > counted


# -- frameworks that import kenlm ------------------------------------------------------------------

PROGRAM = """
import sys
from importlib.util import find_spec
assert find_spec("kenlm") and find_spec("pyctcdecode")
import kenlm
from pyctcdecode import build_ctcdecoder
from pyctcdecode.alphabet import BLANK_TOKEN_PTN, UNK_TOKEN_PTN
from pyctcdecode.constants import DEFAULT_BEAM_WIDTH
assert build_ctcdecoder(["<pad>", "a"]).decode_beams([[-9.0, 0.0]], DEFAULT_BEAM_WIDTH)[0][0] == "a"
assert kenlm.__name__ == "dlm.asr.kenlm", kenlm
model = kenlm.LanguageModel(sys.argv[1])
state, out = kenlm.State(), kenlm.State()
model.BeginSentenceWrite(state)
print(repr(model.BaseScore(state, "w1", out)), sys.argv[2:], __name__)
"""


@pytest.mark.promise("kenlm_api")
@pytest.mark.slow
def test_a_program_that_imports_kenlm_runs_unchanged(files: ModelFiles, tmp_path: Path) -> None:
    """`python -m dlm.asr.kenlm` before its name, as a file or as a module."""
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = os.fspath(files.again(1).directory)
    prob = expected(files, "w1", True, False)[0][0]
    runs: list[tuple[list[str], int]] = [
        (["program.py", folder, "-x"], 0), (["-m", "program", folder, "-x"], 0), ([], 2),
        (["programme.py"], 2),
    ]  # fmt: skip
    for arguments, status in runs:
        done = subprocess.run(
            [sys.executable, "-m", "dlm.asr.kenlm", *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        assert done.stdout == (f"{prob!r} ['-x'] __main__\n" if not status else "")
        assert ("usage" in done.stderr) == bool(status)


def test_the_example_of_the_page_runs(files: ModelFiles, cluster: Cluster, tmp_path: Path) -> None:
    """As written, beside a cluster.toml."""
    page = (ROOT / "dlm/asr/README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    cluster.write(tmp_path / "cluster.toml")
    environ = {**os.environ, "DLM_CACHE_DIR": str(tmp_path / "cache")}
    done = forked.script(code, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    total = sum(prob for prob, _, _ in expected(files, "the man is there", True, True))
    assert float(done.stdout.splitlines()[0]) == total


def test_the_hook_comes_before_the_package_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has imported the package already would go on with it."""
    monkeypatch.delitem(sys.modules, "kenlm", raising=False)
    assert kenlm.install("kenlm") is kenlm
    assert kenlm.install("kenlm") is sys.modules["kenlm"]
    monkeypatch.setitem(sys.modules, "kenlm", os)
    with pytest.raises(ImportError, match="already imported"):
        kenlm.install()
