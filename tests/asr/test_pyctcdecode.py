"""pyctcdecode decodes with dlm what it decodes with KenLM in its own process.

Needs `pip install --no-deps pyctcdecode` and `pip install pygtrie`, which no extra brings.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyctcdecode", reason="pip install --no-deps pyctcdecode; pip install pygtrie")

from asr.decoding import TOKENS, posteriors, spelled, spoken_model
from cluster import Cluster, ModelFiles, build
from dlm.asr.decoders import pyctcdecode as ours
from dlm.client import Client
from dlm.errors import ConfigError, ModelMismatch, QueryError
from dlm.units import LN_10

LEXICON = spelled(40)
LABELS = ["", " ", *TOKENS[2:]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A 4-gram model of the lexicon in two shards."""
    return build(spoken_model(LEXICON), tmp_path_factory.mktemp("spoken"), 2)


@pytest.fixture(scope="module")
def cluster(files: ModelFiles) -> Iterator[Cluster]:
    """Its servers."""
    with Cluster(files) as running:
        yield running


def sentences(count: int) -> list[list[str]]:
    """Random words of the lexicon."""
    rng = np.random.default_rng(1)
    return [[LEXICON[i] for i in rng.integers(0, len(LEXICON), 6)] for _ in range(count)]


def hypotheses(decoder: Any, logits: Any, **more: Any) -> list[tuple[str, float, float]]:
    """Text and scores of each beam."""
    beams = decoder.decode_beams(logits, beam_width=40, token_min_logp=-8.0, **more)
    return [(beam[0], beam[-2], beam[-1]) for beam in beams]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """The same texts in the same order; scores but for KenLM's last bit."""
    assert [one[0] for one in found] == [one[0] for one in expected]
    assert [one[1:] for one in found] == [pytest.approx(one[1:], rel=1e-6) for one in expected]


@pytest.mark.promise("same_hypotheses")
@pytest.mark.parametrize("boundary", [True, False])
def test_hypotheses_are_those_of_kenlm(files: ModelFiles, cluster: Cluster, boundary: bool) -> None:
    """By both decoders, with servers and without; sharp and flattened, cut off in a word."""
    pytest.importorskip("kenlm", reason="pip install -e '.[peers]'")
    from pyctcdecode import build_ctcdecoder
    from pyctcdecode.decoder import BeamSearchDecoderCTC

    path = str(files.directory.with_name("model.arpa"))
    theirs = build_ctcdecoder(LABELS, path, LEXICON, lm_score_boundary=boundary)
    with Client.connect(cluster.addresses) as client, Client.local(files.directory) as local:
        settings = {"unigrams": LEXICON, "lm_score_boundary": boundary}
        decoder = ours.build_decoder(LABELS, client.utterance(), **settings)
        plain = BeamSearchDecoderCTC(decoder._alphabet, decoder._language_model)
        alone = ours.build_decoder(LABELS, local.utterance(), **settings)
        for seed, said in enumerate(sentences(3)):
            logits = posteriors(said, seed, flat=2.0 + seed % 2)[: -1 - 2 * seed]
            expected = hypotheses(theirs, logits)
            assert len(expected) > 5
            for one in (decoder, alone, plain):
                assert_same(hypotheses(one, logits), expected)


def spelled_labels(kind: str) -> list[str]:
    """Letters; some of which are written together, too; or pieces of words."""
    if kind == "pieces":
        return ["", *(f"\u2581{token}" for token in TOKENS[2:]), *TOKENS[2:]]
    return [*LABELS, "ab", "</s>"] if kind == "together" else LABELS


@pytest.mark.promise("same_hypotheses")
@pytest.mark.parametrize("kind", ["letters", "together", "pieces"])
@pytest.mark.parametrize("bonus", [0.0, 2.0])
def test_the_compiled_search_finds_what_pyctcdecodes_own_does(
    files: ModelFiles, kind: str, bonus: float
) -> None:
    """Texts, frames, states and scores, to the bit; words that nobody knows, one utterance after
    another, hotwords of pyctcdecode."""
    phrases = {"fadeg": bonus, f"{LEXICON[3]} fadeg": bonus, LEXICON[5]: bonus}
    labels = spelled_labels(kind)
    rng = np.random.default_rng(2)
    with Client.local(files.directory) as local:
        utterance = local.utterance(phrases=phrases if bonus else None)
        ours_ = ours.build_decoder(labels, utterance, LEXICON, alpha=0.6)
        assert (ours_._labels is None) == (kind == "pieces")
        own = ours.BeamSearchDecoderCTC(ours_._alphabet, ours_._language_model)
        for seed, said in enumerate(sentences(4)):
            logits = posteriors([*said, "fadeg"], seed, flat=1.5 + seed / 2)
            more = rng.normal(-6.0, 2.0, (len(logits), len(labels))).astype(np.float32)
            more[:, : logits.shape[1]] += logits[:, : len(labels)]
            for options in (
                {},
                {"prune_history": False, "beam_width": 9},
                {"token_min_logp": -9.0, "beam_prune_logp": -30.0},
                {"hotwords": [LEXICON[1]]},
            ):
                found = ours_.decode_beams(more, **options)
                assert found == own.decode_beams(more, **options)
                assert len(found[0][2]) == len(found[0][0].split())
            ours_.reset_params(alpha=0.5 + seed / 4, unk_score_offset=-5.0 - seed)
            start = found[0][1]
            options = {"lm_start_state": start}
            assert ours_.decode_beams(more, **options) == own.decode_beams(more, **options)


def test_a_frame_waits_for_servers_once(files: ModelFiles, cluster: Cluster) -> None:
    """For all of its beams; and never for contexts that it has seen."""
    logits = [posteriors(said, seed) for seed, said in enumerate(sentences(3))]
    with Client.connect(cluster.addresses) as client:
        trips, found = [], []
        for kind in (ours.DlmDecoder, ours.BeamSearchDecoderCTC):
            model = ours.DlmLanguageModel(client.utterance(), LEXICON)
            decoder = kind(ours.Alphabet.build_alphabet(LABELS), model)
            found.append([hypotheses(decoder, one) for one in logits])
            trips.append(model.counts.round_trips)
            assert [hypotheses(decoder, one) for one in logits] == found[-1]
            assert model.counts.round_trips == trips[-1]
        assert found[0] == found[1]
        frames = sum(len(one) for one in logits)
        assert 0 < trips[0] < min(trips[1], frames)


def test_beams_may_be_tuples_or_objects() -> None:
    """Those of 0.5.0, and those of later sources, with the same names."""
    cached = {("", False): (0.0, 0.0, "start"), ("a", False): (0.0, 0.0, "after a")}
    tuples = [("a", "b", "", None, [], (-1, -1), 0.0), ("", "a", "", None, [], (-1, -1), 0.0)]
    tuples.append(("a", "", "c", None, [], (-1, -1), 0.0))
    objects = [SimpleNamespace(text=beam[0], next_word=beam[1]) for beam in tuples]
    for beams in (tuples, objects):
        assert ours._unscored(beams, cached, False) == [("after a", "b")]
        # At the end none has a score yet; texts that are spelled alike are asked once.
        assert ours._unscored(beams, cached, True) == [("after a", "b"), ("start", "a")]


def test_words_default_to_those_of_the_model(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """And unknown ones are told from known ones here, not by servers."""
    with Client.local(files.directory) as local, caplog.at_level(logging.ERROR):
        model = ours.DlmLanguageModel(local.utterance())
        assert model._unigram_set >= set(LEXICON)
        assert model.order == 4
        state = model.get_start_state()
        known, after = model.score(state, LEXICON[0])
        unknown, _ = model.score(state, "never-seen")
        assert unknown < known - 5
        assert pickle.loads(pickle.dumps(after)) == after
        assert after.get_mp_safe_state() is after
        assert hash(after) == hash(model.score(state, LEXICON[0])[1])
        with pytest.raises(ConfigError, match="build_decoder"):
            model.save_to_dir("somewhere")


def test_what_cannot_be_decoded_with_is_refused(files: ModelFiles, tmp_path: Path) -> None:
    """A client, a string of words, words that the model lacks; a decoder is not saved, not half."""
    with Client.local(files.directory) as local:
        with pytest.raises(QueryError, match=r"Client.*utterance"):
            ours.build_decoder(LABELS, local)
        with pytest.raises(QueryError, match="unigrams"):
            ours.build_decoder(LABELS, local.utterance(), "words.txt")
        with pytest.raises(ConfigError, match=r"1 words .*'THE'"):
            ours.build_decoder(LABELS, local.utterance(), ["THE"])
        decoder = ours.build_decoder(LABELS, local.utterance(), LEXICON)
        with pytest.raises(ConfigError, match="build_decoder"):
            decoder.save_to_dir(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_bonuses_of_phrases_are_added_outside_of_alpha(files: ModelFiles) -> None:
    """A word that the model lacks is heard, without the offset of unknown words; hypotheses differ
    by the phrases that they have."""
    phrases = {"fadeg": 3.0, f"{LEXICON[3]} fadeg {LEXICON[2]}": 1.5}
    said = [LEXICON[1], LEXICON[3], "fadeg", LEXICON[2]]
    logits = posteriors(said, 1, flat=1.6)
    with Client.local(files.directory) as local:
        for boundary in (True, False):
            settings = {"lm_score_boundary": boundary, "alpha": 0.7}
            utterance = local.utterance(phrases=phrases)
            decoder = ours.build_decoder(LABELS, utterance, LEXICON, **settings)
            found = hypotheses(decoder, logits)
            assert " ".join(said[1:3]) in found[0][0]
            listed = [*LEXICON, "fadeg"]
            nothing = local.utterance(phrases={"fadeg": 0.0})  # known, and no likelier
            plain = ours.build_decoder(LABELS, nothing, listed, **settings)
            before = {one[0]: one[2] - one[1] for one in hypotheses(plain, logits)}
            compared = [one for one in found if one[0] in before]
            assert len(compared) > 1
            for text, heard, whole in compared:
                bonus = LN_10 * utterance.phrases.of_words(text.split())
                assert whole - heard - before[text] == pytest.approx(bonus, abs=1e-4)
        # Beams are not merged by the last words that the model keeps, if a phrase is longer.
        assert [decoder._language_model.order, local.utterance().order] == [4, 4]
        longer = local.utterance(phrases={" ".join(LEXICON[:7]): 1.0})
        assert ours.DlmLanguageModel(longer, LEXICON).order == 7
        state = decoder._language_model.get_start_state()
        _, after = decoder._language_model.score(state, LEXICON[3])
        assert after != ours.DlmState(after.state)
        # At its end a sentence gives shares back, so no phrase goes on from there.
        _, ended = decoder._language_model.score(state, LEXICON[3], is_last_word=True)
        assert ended == ours.DlmState(after.state)
        for other in ({"fadeg": 2.0}, None):
            unlike = ours.build_decoder(LABELS, local.utterance(phrases=other), LEXICON)
            with pytest.raises(ModelMismatch):
                unlike.decode_beams(logits, lm_start_state=after)
        with pytest.raises(QueryError, match="int"):
            decoder.decode_beams(logits, lm_start_state=3)
        assert pickle.loads(pickle.dumps(after)) == after
