"""What `record` decodes: lattices and texts, into traces that hold what was asked and when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster import ModelFiles
from dlm.asr.open import open_model
from dlm.asr.rescoring.lattice import Scales
from dlm.asr.rescoring.rescore import PositionBatch, Search, rescore
from dlm.asr.rescoring.slf import read_slf
from dlm.client import Client
from dlm.errors import TextError
from loadtest.traces.decoders import files_of, lattices_of, speech_of, transcripts_of
from loadtest.traces.recorder import Recorder
from loadtest.traces.trace import trace_of

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("DLM_SHARED_DATA", ROOT.parent / "shared/data"))
AUDIO = DATA / "speech/flac/LJ001-0002.flac"
SLF = """VERSION=1.0
UTTERANCE=19-1-0
N=5 L=6
I=0 t=0.00
I=1 t=0.30
I=2 t=0.35
I=3 t=0.70
I=4 t=0.90
J=0 S=0 E=1 W={a} a=-1.0
J=1 S=0 E=2 W={b} a=-1.5
J=2 S=1 E=3 W={c} a=-1.0
J=3 S=2 E=3 W={d} a=-1.2
J=4 S=3 E=4 W={a} a=-0.5
J=5 S=3 E=4 W=</s> a=-0.4
"""


def test_a_lattice_is_recorded_as_dlm_rescore_asks_it(files: ModelFiles, tmp_path: Path) -> None:
    """Each position's states and words, at its audio time, whatever the file's ending."""
    a, b, c, d = files.words()[5:9]
    path = tmp_path / "19-1-0.slf"
    path.write_text(SLF.format(a=a, b=b, c=c, d=d))
    asked: list[PositionBatch] = []
    with Client.local(files.directory) as client:
        search = Search(Scales(lm=12.0))
        rescore(read_slf(path), client.utterance(), search, asked.append)
        recorder = Recorder(client)
        decoding = lattices_of(recorder, files_of(tmp_path)[0], 12.0)
        for step in decoding.steps:
            step()
        words = client.vocabulary.words
    (one,) = recorder.utterances
    assert (one.name, one.speaker, one.seconds) == ("19-1-0", "19", pytest.approx(0.9))
    assert len(one.requests) == len(asked) > 2
    for request, batch in zip(one.requests, asked, strict=True):
        assert request.at_s == (0.0 if batch.time_s != batch.time_s else batch.time_s)
        expected = [tuple(words[w] for w in context) for context in batch.states.contexts()]
        assert list(request.contexts) == expected
        assert list(request.words) == [tuple(words[w] for w in row) for row in batch.words]
        assert request.kind == "lattice"


def test_files_that_are_lattices_or_audio_are_found(tmp_path: Path) -> None:
    """By their endings, compressed or not; a folder without any, or with both, is refused."""
    with pytest.raises(TextError, match="0 lattices"):
        files_of(tmp_path)
    for name in ("b.slf.gz", "a.lat", "c.txt"):
        (tmp_path / name).write_text("")
    assert files_of(tmp_path) == ([tmp_path / "a.lat", tmp_path / "b.slf.gz"], [])
    assert files_of(tmp_path / "c.txt") == ([], [])
    assert files_of(tmp_path / "b.slf.gz") == ([tmp_path / "b.slf.gz"], [])
    (tmp_path / "d.flac").write_text("")
    assert files_of(tmp_path / "d.flac") == ([], [tmp_path / "d.flac"])
    with pytest.raises(TextError, match=r"2 lattices .*1 audio"):
        files_of(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not AUDIO.exists(), reason=f"no {AUDIO}; see DLM_SHARED_DATA")
def test_speech_is_recorded_as_dlm_transcribe_asks_it(tmp_path: Path) -> None:
    """Blocks of contexts, in order, within the audio; then the sentence's scores."""
    for package in ("flashlight", "hama", "soundfile"):
        pytest.importorskip(package)
    with open_model(ROOT / "dlm/data/books20k.arpa.zst") as client:
        recorder = Recorder(client)
        decoding = speech_of(recorder, [AUDIO], lambda line: None)
        decoding.steps[0]()
    (one,) = recorder.utterances
    assert one.seconds == pytest.approx(1.9, abs=0.01)
    times = [request.at_s for request in one.requests]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] == pytest.approx(one.seconds, abs=0.01)
    blocks = [request for request in one.requests if request.call == "context_blocks"]
    assert sum(len(request.contexts) for request in blocks) > 10
    assert {request.kind for request in one.requests} == {"frame"}
    trace = trace_of(recorder.utterances)
    assert trace.asks.all()


def test_texts_are_recorded_line_by_line(files: ModelFiles, tmp_path: Path) -> None:
    """At most as many as asked for."""
    path = tmp_path / "t.txt"
    path.write_text("\n".join(files.words()[5:9]) + "\n")
    with Client.local(files.directory) as client:
        recorder = Recorder(client)
        decoding = transcripts_of(recorder, path, False, 3, 4, 5)
        for step in decoding.steps:
            step()
    assert [one.name for one in recorder.utterances] == ["line-1", "line-2", "line-3"]
    assert decoding.name == "rescoring of known text, 4 contexts x 5 words"
