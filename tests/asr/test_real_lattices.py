"""Lattices of real speech, as pocketsphinx writes them.

The speech lies outside the project: DLM_SHARED_DATA, by default ../shared/data beside the checkout.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlm.asr.open import open_model
from dlm.asr.rescoring.lattice import Lattice, Scales
from dlm.asr.rescoring.nbest import Hypothesis, NbestList, best_paths
from dlm.asr.rescoring.rescore import Search, rescore
from dlm.asr.rescoring.slf import read_slf, slf_text
from dlm.client import Client
from dlm.units import LN_10

DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
SPEECH = DATA / "speech"
ARPA = DATA / "arpa" / "books5.arpa.zst"
UTTERANCES = (
    "sense_and_sensibility_01_austen_64kb-0880",
    "sense_and_sensibility_01_austen_64kb-0930",
)
SEARCH = Search(Scales(1.0, 12.0))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ARPA.exists() and (SPEECH / "transcripts.tsv").exists()),
        reason=f"no {ARPA} or {SPEECH}; name the folder of the shared data in DLM_SHARED_DATA",
    ),
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A real 5-gram model, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with open_model(ARPA) as client:
            yield client


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, list[str], list[str]]]:
    """Of each utterance the lattice's file, what was said, and what pocketsphinx understood."""
    pocketsphinx = pytest.importorskip("pocketsphinx")
    soundfile = pytest.importorskip("soundfile")
    folder = tmp_path_factory.mktemp("slf")
    with (SPEECH / "transcripts.tsv").open(newline="") as file:
        rows = {Path(row["file"]).stem: row for row in csv.DictReader(file, delimiter="\t")}
    decoder = pocketsphinx.Decoder(samprate=16000, loglevel="FATAL")
    found = []
    for name in UTTERANCES:
        samples, rate = soundfile.read(SPEECH / rows[name]["file"], dtype="int16")
        assert rate == 16000
        decoder.start_utt()
        decoder.process_raw(samples.tobytes(), full_utt=True)
        decoder.end_utt()
        decoder.get_lattice().write_htk(str(folder / f"{name}.slf"))
        said = rows[name]["text"].lower().split()
        found.append((folder / f"{name}.slf", said, decoder.hyp().hypstr.split()))
    return found


def errors(words: list[str] | tuple[str, ...], reference: list[str]) -> int:
    """Word errors of a sentence."""
    return NbestList("one", (Hypothesis(tuple(words)),)).oracle(reference).errors


def test_lattices_of_real_speech_are_rescored_written_and_read_again(
    client: Client, spoken: list[tuple[Path, list[str], list[str]]], tmp_path: Path
) -> None:
    """The best sentences have their own scores; fewer words are wrong than pocketsphinx had, none
    fewer than the oracle's."""
    before = after = fewest = 0
    for path, said, understood in spoken:
        lattice = read_slf(path)
        assert lattice.arcs > 1000
        assert 2.0 < lattice.duration_s < 4.0
        found = rescore(lattice, client.utterance(), SEARCH)
        assert found.positions < found.queries / 20
        best = best_paths(found.lattice, 10).hypotheses
        assert len({one.words for one in best}) == 10
        scores = client.utterance().score_sentences([one.words for one in best])
        for one, score in zip(best, scores, strict=True):
            assert one.lm == pytest.approx(score.log10_prob * LN_10, rel=1e-12)
        written = tmp_path / path.name
        written.write_text(slf_text(found.lattice))
        again = read_slf(written)
        assert again.lm.tolist() == found.lattice.lm.tolist()
        assert best_paths(again, 10).hypotheses == best
        assert_same(rescore(again, client.utterance(), SEARCH).lattice, again)
        before += errors(understood, said)
        after += errors(best[0].words, said)
        fewest += lattice.oracle(said).errors
    assert fewest == 0
    assert fewest <= after < before


def assert_same(lattice: Lattice, other: Lattice) -> None:
    """The same best sentence, by the same score."""
    one, two = (best_paths(each).hypotheses[0] for each in (lattice, other))
    assert one == two
