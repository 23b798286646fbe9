"""Which words of a model can be recognised, and how they sound."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flashlight.lib.text", reason="pip install -e '.[asr]'")
pytest.importorskip("hama", reason="pip install -e '.[asr]'")
pytest.importorskip("pocketsphinx", reason="pip install -e '.[asr]'")

from cluster import build
from dlm.asr.speech import lexicon
from dlm.asr.speech.acoustic import AcousticModel
from dlm.asr.speech.lexicon import HOMOPHONES, model_lexicon, read_dictionary, read_table
from dlm.client import Client
from dlm.errors import ConfigError
from models import PlainModel

LABELS = AcousticModel().labels
# Known; of the same sound; only the dictionary has it; only letters; none that sounds at all.
WORDS = ["of", "Their", "there", "zwick", "blorptacular", "1942", "<tag>", "слово"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path / "cache"))


def model_of(words: list[str]) -> PlainModel:
    """Unigrams, each a little less likely than the one before."""
    ngrams: dict[tuple[str, ...], tuple[float, float | None]] = {
        ("<unk>",): (-3.0, None),
        ("<s>",): (-99.0, None),
        ("</s>",): (-0.5, None),
    }
    ngrams |= {(word,): (-1.0 - i / 16, None) for i, word in enumerate(words)}
    return PlainModel(1, ngrams)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """Of `WORDS`."""
    with Client.local(build(model_of(WORDS), tmp_path / "model", 1).directory) as client:
        yield client


def sounds(client: Client, **options: int) -> dict[str, set[str]]:
    """The words of a lexicon and their spellings."""
    found = model_lexicon(client.utterance(), LABELS, **options)
    spelled: dict[str, set[str]] = {word: set() for word in found.words}
    for place, labels in found.spellings:
        spelled[found.words[place]].add(" ".join(LABELS[label] for label in labels))
    return spelled


def test_words_have_the_sounds_of_the_table_the_dictionary_or_their_letters(
    client: Client,
) -> None:
    """What cannot be pronounced is not in the lexicon."""
    found = sounds(client)
    assert list(found) == ["of", "Their", "there", "zwick", "blorptacular"]
    assert found["of"] == {"ɔ f", "ə v"}
    assert found["Their"] & found["there"]
    assert "zwick" not in read_table()
    assert found["zwick"] == {"z w ɪ k"}
    assert "blorptacular" not in {*read_table(), *read_dictionary()}
    assert next(iter(found["blorptacular"])).startswith("b l ɔ ɹ")


def test_the_likeliest_words_come_in_with_their_ids_and_unigrams(client: Client) -> None:
    """At most as many as asked for."""
    utterance = client.utterance()
    found = model_lexicon(utterance, LABELS, limit=2)
    assert found.words == ("of", "Their")
    assert [utterance.vocabulary.words[i].decode() for i in found.ids.tolist()] == ["of", "Their"]
    assert found.log10_unigram.tolist() == [-1.0, -1.0625]
    with pytest.raises(ConfigError, match="1 or more"):
        model_lexicon(utterance, LABELS, limit=0)


def test_a_model_without_any_word_that_sounds_is_refused(tmp_path: Path) -> None:
    """With some of its words, so that its user sees what kind of words they are."""
    files = build(model_of(["▁the", "ing", "слово"][::2]), tmp_path / "model", 1)
    with (
        Client.local(files.directory) as client,
        pytest.raises(ConfigError, match=r"2 words .*'▁the', 'слово'.*language"),
    ):
        model_lexicon(client.utterance(), LABELS)


def test_a_letters_to_sounds_word_is_pronounced_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time, the cache knows; and says nothing."""
    told: list[str] = []
    first = model_lexicon(client.utterance(), LABELS, tell=told.append)
    assert told == ["pronouncing 1 word, once"]
    monkeypatch.setattr(lexicon, "letters_to_sounds", None)
    again = model_lexicon(client.utterance(), LABELS, tell=told.append)
    assert again.spellings == first.spellings
    assert len(told) == 1


def test_a_cache_that_is_damaged_or_cannot_be_written_costs_time_only(
    client: Client,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lexicon is the same; a folder that cannot be made is logged, without any word."""
    first = sounds(client)
    (kept,) = (tmp_path / "cache").glob("pronunciations-*")
    kept.write_text("no tab here\n")
    assert sounds(client) == first
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    monkeypatch.setenv("DLM_CACHE_DIR", str(blocked))
    with caplog.at_level(logging.WARNING, "dlm.asr"):
        assert sounds(client) == first
    assert "asr.pronunciations.not_written" in caplog.text
    assert "blorptacular" not in caplog.text


def test_only_so_many_words_of_the_same_sound_are_kept(tmp_path: Path) -> None:
    """flashlight's trie holds no more; the likeliest stay."""
    ways = ["there", "There", "THERE", "tHere", "thEre", "theRe", "therE", "ThERe"]
    files = build(model_of(ways), tmp_path / "model", 1)
    with Client.local(files.directory) as client:
        found = sounds(client)
    assert [word for word, sounding in found.items() if sounding] == ways[:HOMOPHONES]


def test_words_of_phrases_are_in_the_lexicon_with_their_bonus(client: Client) -> None:
    """Whatever its size; with the sounds that are given, or as others, or else reported."""
    told: list[str] = []
    phrases = {"blorptacular zork": 3.0, "there": 1.0, "1942": 1.0, "Zork": 0.5}
    found = model_lexicon(
        client.utterance(phrases=phrases),
        LABELS,
        limit=1,
        tell=told.append,
        sounds={
            "zork": [("z", "ɔ", "ɹ", "k"), ("s", "ɔ", "ɹ", "k")],
            "Zork": [("t", "s", "ɔ", "k")],  # another word
        },
    )
    assert set(found.words) == {"blorptacular", "zork", "there", "of", "Zork"}
    place = found.words.index("zork")
    ways = [" ".join(LABELS[at] for at in way) for word, way in found.spellings if word == place]
    assert ways == ["z ɔ ɹ k", "s ɔ ɹ k"]
    assert found.ids[place] == client.utterance().vocabulary_size + 1
    assert found.log10_unigram[place] == -3.0  # of the unknown word
    bonus = dict(zip(found.words, found.log10_bonus.tolist(), strict=True))
    assert bonus == {"blorptacular": 1.5, "zork": 1.5, "there": 1.0, "of": 0.0, "Zork": 0.5}
    assert "1 word " in told[-1]
    with pytest.raises(ConfigError, match="'ZZ'"):
        model_lexicon(client.utterance(phrases=phrases), LABELS, sounds={"zork": [("ZZ",)]})


def test_a_phrase_whose_word_sounds_like_a_likelier_one_is_told(tmp_path: Path) -> None:
    """Spelled otherwise than the model does, it would hardly be heard; no word is named."""
    model = model_of(["mr", "there", "their"])
    model.ngrams["<unk>",] = (-6.0, None)
    with Client.local(build(model, tmp_path / "titles", 1).directory) as client:
        lines: list[str] = []
        for phrases in ({"mister": 2.0, "their": 2.0}, {"mr": 2.0}):
            model_lexicon(client.utterance(phrases=phrases), LABELS, tell=lines.append)
    (line,) = lines
    assert line.startswith("1 word of the phrases")
