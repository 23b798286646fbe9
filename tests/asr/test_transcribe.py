"""Speech becomes words through a real cluster, and goes on where its servers fail."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flashlight.lib.text", reason="pip install -e '.[asr]'")
pytest.importorskip("hama", reason="pip install -e '.[asr]'")
pytest.importorskip("pocketsphinx", reason="pip install -e '.[asr]'")
pytest.importorskip("soundfile", reason="pip install -e '.[asr]'")
pytest.importorskip("soxr", reason="pip install -e '.[asr]'")

import soundfile
from typer.testing import CliRunner

import forked
from cluster import WAIT_S, Cluster, ModelFiles, command, until
from dlm.asr.phrase_file import read_phrases
from dlm.asr.rescoring.nbest import read_nbest
from dlm.asr.settings import BeamSettings
from dlm.asr.speech.audio import SAMPLE_RATE, read_audio
from dlm.asr.speech.transcribe import Transcriber
from dlm.asr.speech.wer import word_errors
from dlm.cli.main import app
from dlm.client import Client, ClientConfig
from dlm.client.cluster_file import Endpoint, write_cluster_file
from dlm.errors import ConfigError, UnavailableError
from dlm.index.making import build_shard_set
from dlm.units import LN_10

SPEECH = (
    Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
    / "speech"
    / "flac"
)
SPOKEN = SPEECH / "19-198-0034.flac"
SAID = (
    "there was not one family among their acquaintance who had reared and supported a boy "
    "accidentally found at their door not one young man whose origin was unknown her father had no "
    "ward and the squire of the parish no children"
)
pytestmark = pytest.mark.skipif(
    not SPOKEN.exists(), reason=f"no {SPOKEN}; name the folder of shared data in DLM_SHARED_DATA"
)
WORDS = 10_000
# Silence after it: room for a second segment.
TWO_SEGMENTS_S = 24.0


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """The model of dlm's own data, in two shards."""
    folder = tmp_path_factory.mktemp("model") / "shards"
    with as_file(files("dlm") / "data" / "books20k.arpa.zst") as arpa:
        build_shard_set(arpa, folder, 2)
    return ModelFiles(folder, None)  # type: ignore[arg-type]


@pytest.fixture
def cluster(model: ModelFiles) -> Iterator[Cluster]:
    with Cluster(model) as servers:
        yield servers


def connect(cluster: Cluster, **settings: Any) -> Client:
    return Client.connect(cluster.addresses, ClientConfig(**{"deadline_s": 20.0, **settings}))


def long_audio() -> np.ndarray:
    """The utterance twice, with a pause between."""
    samples = read_audio(SPOKEN)
    pause = np.zeros(SAMPLE_RATE, np.float32)
    return np.concatenate([samples, pause, samples])[: int(TWO_SEGMENTS_S * SAMPLE_RATE)]


def test_a_real_utterance_becomes_its_words_through_a_real_cluster(cluster: Cluster) -> None:
    """With times, scores and sources; as a shard set in this process has them."""
    settings = BeamSettings(nbest=5)
    with connect(cluster) as client, Client.local(cluster.files.directory) as local:
        (found,) = Transcriber(client, settings, words=WORDS).transcribe(read_audio(SPOKEN))
        (same,) = Transcriber(local, settings, words=WORDS).transcribe(read_audio(SPOKEN))
        (score,) = local.utterance().score_sentences([found.text])
    assert found == same
    errors = word_errors(SAID.split(), found.text.split())
    assert errors.errors <= 6
    assert (found.mode, found.bigram_fallback) == ("full", 0)
    best = found.sentences[0]
    assert len(found.sentences) == 5
    assert set(found.sources) == {"full"}
    assert best.log10_prob == pytest.approx(score.log10_prob, abs=1e-3)
    assert found.log10_probs == tuple(score.token_log10_prob[:-1].tolist())
    times = [second for word in best.words for second in (word.start_s, word.end_s)]
    assert times == sorted(times)
    assert 0.3 < times[0] < 0.7
    assert 15.5 < times[-1] < found.end_s


@pytest.mark.slow
def test_words_of_phrases_are_heard_whatever_the_lexicon_has(
    model: ModelFiles, tmp_path: Path
) -> None:
    """Their bonus stands beside the model's own score."""
    names = tmp_path / "names.tsv"
    names.write_text("squire\t3.0\nreared\t3.0\n", encoding="utf-8")
    listed = read_phrases(names)
    with Client.local(model.directory) as local:
        transcriber = Transcriber(local, words=1000, phrases=listed.phrases, sounds=listed.sounds)
        (found,) = transcriber.transcribe(read_audio(SPOKEN))
        (score,) = local.utterance(phrases=listed.phrases).score_sentences([found.text])
        with pytest.raises(ConfigError, match="lm_weight"):
            Transcriber(local, BeamSettings(lm_weight=0.0), phrases=listed.phrases)
    best = found.sentences[0]
    assert best.bonus == score.bonus == 6.0
    assert best.log10_prob == pytest.approx(score.log10_prob, abs=1e-3)
    options = ["--lm", str(model.directory), "--max-words", "1000", "--phrases", str(names)]
    done = CliRunner().invoke(app, ["transcribe", str(SPOKEN), *options, "--json"])
    assert done.exit_code == 0, done.output
    (printed,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert (printed["text"], printed["hyps"][0]["bonus"]) == (found.text, round(6 * LN_10, 4))


@pytest.mark.promise("no_utterance_lost")
def test_where_servers_die_in_the_middle_the_rest_is_on_the_2_grams(cluster: Cluster) -> None:
    """And each segment says so; times go on from the first."""
    with connect(cluster, bigram_fallback=True, deadline_s=6.0) as client:
        segments = Transcriber(client, words=WORDS).transcribe(long_audio())
        first = next(segments)
        cluster.end()
        (second,) = segments
    assert (first.mode, first.bigram_fallback) == ("full", 0)
    assert second.mode == "bigram_fallback"
    assert second.bigram_fallback > 0
    assert "bigram_fallback" in second.sources
    assert second.start_s == first.end_s
    assert second.sentences[0].words[0].start_s >= second.start_s
    assert "there was not one family" in second.text or "model_info" in first.text + second.text


def test_where_servers_are_down_at_the_start_the_small_model_recognises(
    model: ModelFiles, tmp_path: Path
) -> None:
    """cluster.toml names it; every word says that it is from there."""
    endpoints = [Endpoint("127.0.0.1:1", shard) for shard in range(2)]
    path = tmp_path / "cluster.toml"
    write_cluster_file(path, endpoints, local_fallback=model.directory)
    with Client.connect(path, ClientConfig(bigram_fallback=True, connect_s=0.5)) as client:
        (found,) = Transcriber(client, words=WORDS).transcribe(read_audio(SPOKEN))
    assert (found.mode, set(found.sources)) == ("local_fallback", {"local_fallback"})
    assert word_errors(SAID.split(), found.text.split()).errors <= 6


def test_without_a_fallback_it_raises_and_what_came_before_stands(cluster: Cluster) -> None:
    """A typed error; nothing of what was said is in it."""
    with connect(cluster) as client:
        segments = Transcriber(client, words=WORDS).transcribe(long_audio())
        first = next(segments)
        cluster.end()
        with pytest.raises(UnavailableError) as caught:
            next(segments)
    assert len(first.text.split()) > 20
    assert "model_info" not in str(caught.value)


@pytest.mark.promise("words_unlogged")
def test_nothing_that_was_said_is_logged_or_shown(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the level, and while servers fail; a transcript shown in a debugger has no words."""
    settings = {"bigram_fallback": True, "deadline_s": 6.0}
    with caplog.at_level(logging.DEBUG), connect(cluster, **settings) as client:
        transcriber = Transcriber(client, words=WORDS)
        heard = read_audio(SPOKEN)[: 5 * SAMPLE_RATE]
        (found,) = transcriber.transcribe(heard)
        cluster.end()
        (failing,) = transcriber.transcribe(heard)
    assert failing.mode == "bigram_fallback"
    until(lambda: "client.bigram_fallback.started" in caplog.text)
    assert "acquaintance" in found.text
    assert "acquaintance" not in caplog.text + repr(found) + repr(found.sentences)


def test_silence_and_noise_give_few_words_or_none(
    model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no error; digital silence is not listened to: an hour of it takes no time."""
    noise = np.random.default_rng(1).normal(0.0, 1e-3, SAMPLE_RATE).astype(np.float32)
    with Client.local(model.directory) as client:
        transcriber = Transcriber(client, words=1_000)
        (found,) = transcriber.transcribe(noise)
        monkeypatch.setattr(transcriber, "_acoustic", None)
        silent = list(transcriber.transcribe(np.zeros(3600 * SAMPLE_RATE, np.float32)))
    assert len(found.text.split()) == len(found.log10_probs) <= 2
    assert {one.text for one in silent} == {""}
    assert silent[-1].end_s == 3600.0


Dlm = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def dlm(tmp_path: Path) -> Dlm:
    def call(*arguments: object, stdin: Any = None) -> subprocess.CompletedProcess[str]:
        return forked.run(
            command(*arguments),
            cwd=tmp_path,
            stdin=stdin,
            env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=WAIT_S,
        )

    return call


def test_the_command_prints_words_and_its_json_is_an_nbest_list(
    cluster: Cluster, tmp_path: Path, dlm: Dlm
) -> None:
    """A bad file is reported; the others are done all the same, whatever bytes their names have."""
    cluster.write(tmp_path / "cluster.toml")
    named = tmp_path / os.fsdecode(b"caf\xe9.flac")
    named.symlink_to(SPOKEN)
    (tmp_path / "bad.flac").write_text("no audio")
    options = ("--deadline", 20, "--max-words", WORDS)
    done = dlm("transcribe", "bad.flac", named, *options)
    assert done.returncode == 1, done.stderr
    assert "bad.flac could not be read as audio" in done.stderr
    name, text = done.stdout.rstrip("\n").split("\t")
    assert name == str(named)
    assert "acquaintance" not in done.stderr
    done = dlm("transcribe", SPOKEN, "--json", "--nbest", 4, "-q", *options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["text"] == text == " ".join(word["word"] for word in found["words"])
    assert (found["mode"], found["bigram_fallback"], found["file"]) == ("full", 0, str(SPOKEN))
    assert {word["source"] for word in found["words"]} == {"full"}
    (tmp_path / "heard.jsonl").write_text(done.stdout)
    (nbest,) = read_nbest(tmp_path / "heard.jsonl")
    assert len(nbest.hypotheses) == 4
    assert " ".join(nbest.hypotheses[0].words) == text
    soundfile.write(tmp_path / "a.wav", *soundfile.read(SPOKEN))
    with (
        (tmp_path / "a.wav").open("rb") as wav,
        subprocess.Popen("cat", stdin=wav, stdout=-1) as cat,
    ):
        done = dlm("transcribe", "-", *options, stdin=cat.stdout)
    *parts, last = done.stdout.splitlines()
    assert last == text
    assert len(parts) > 5
    assert all(part.endswith(" ...") for part in parts)
    (tmp_path / "said.tsv").write_text(f"file\tspeaker\ttext\n{SPOKEN.name}\t19\t{SAID}\n")
    done = dlm("wer", "said.tsv", "heard.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["wer"] == word_errors(SAID.split(), text.split()).rate


def test_the_command_says_what_is_wrong_before_it_listens(tmp_path: Path, dlm: Dlm) -> None:
    """A cluster that is down at the start; a model that is not there; without a trace."""
    soundfile.write(tmp_path / "a.wav", np.zeros(SAMPLE_RATE), SAMPLE_RATE)
    (tmp_path / "down.toml").write_text('[[server]]\naddress = "127.0.0.1:1"\nshard = 0\n')
    for audio, named, says in (
        ("a.wav", "down.toml", "127.0.0.1:1"),
        ("a.wav", "none.arpa", "none.arpa"),
        ("b.wav", "down.toml", "AUDIO: no such file or folder: b.wav"),
        (".", "down.toml", "AUDIO: . is a folder"),
    ):
        done = dlm("transcribe", "a.wav", audio, "--lm", named)
        assert done.returncode == 1
        assert done.stdout == ""
        assert says in done.stderr
        assert "Traceback" not in done.stderr
