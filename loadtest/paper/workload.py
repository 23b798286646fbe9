"""The input of experiments: the model's n-grams, and two sets of calls. One is the trace, with
dlm's states as contexts; the other rescores known text with whole histories, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from dlm.index.layout import read_manifest
from dlm.index.search.shard import open_vocabulary
from dlm.ngram.vocab import Vocabulary
from loadtest.baselines.hash_index import HashIndex, Ngrams
from loadtest.baselines.systems import Cache, Call, calls_of
from loadtest.paper.result import Setup
from loadtest.traces.rescoring import CANDIDATES_END, Confusions, Transcript, read_transcripts
from loadtest.traces.trace import read_trace

TRANSCRIPTS = Path(__file__).parents[1] / "traces/transcripts.tsv"
FREQUENT = 20_000  # candidates are taken from this many of the most frequent words
# Penalty, in log10, of a candidate other than the spoken word, as from an acoustic model.
NOT_SAID = 0.5
CONTEXTS, WORDS = 10, 10  # K and W


@dataclass(frozen=True, eq=False)
class Model:
    """A model's n-grams in every form that baselines need.

    cache  the part that clients hold;  file  the file of n-grams that servers read
    """

    ngrams: Ngrams
    whole: HashIndex
    cache: Cache
    vocabulary: Vocabulary
    file: Path

    @property
    def order(self) -> int:
        return len(self.ngrams.orders)


@dataclass(frozen=True, eq=False)
class Asked:
    """A named set of calls, with the seconds of audio that they stand for."""

    name: str
    calls: Sequence[Call]
    audio_s: float

    def queries(self) -> Iterator[tuple[Call, np.ndarray]]:
        for call in self.calls:
            yield call, np.bincount(call.place, minlength=len(call.words))


def model_of(setup: Setup) -> Model:
    """Reads the model once per process; the n-grams are stored in `setup.work`."""
    return _model(setup.model.absolute(), setup.work.absolute())


@cache
def _model(folder: Path, work: Path) -> Model:
    manifest = read_manifest(folder)
    file = work / f"ngrams-{manifest.model[:12]}-{manifest.encoding}.npz"
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        Ngrams.of(folder).write(file)
    ngrams = Ngrams.read(file)
    vocabulary = open_vocabulary(folder, manifest)
    return Model(ngrams, HashIndex(ngrams), Cache.of(ngrams), vocabulary, file)


def recorded(setup: Setup) -> Asked:
    return _recorded(model_of(setup), setup.trace.absolute())


@cache
def _recorded(model: Model, path: Path) -> Asked:
    trace = read_trace(path)
    return Asked(
        f"trace {path.stem}", calls_of(trace, model.vocabulary, model.order), trace.audio_s
    )


def histories(setup: Setup) -> Asked:
    """Rescores the spoken text on the fly, with K histories by W candidates at each word."""
    model, said = model_of(setup), read_transcripts(TRANSCRIPTS, as_spoken=True)
    if setup.quick:
        said = said[:2]
    ids, probs, _ = model.ngrams.orders[0]
    frequent = np.argsort(-probs, kind="stable")[:FREQUENT]
    confusions = Confusions(model.vocabulary.words[int(one)] for one in ids[frequent, 0])
    calls = [call for one in said for call in _walk(model, one, confusions)]
    return Asked("whole histories", calls, sum(one.seconds for one in said))


def _walk(model: Model, said: Transcript, confusions: Confusions) -> Iterator[Call]:
    """Runs a beam search that recombines hypotheses whose last order - 1 words are equal."""
    width = model.order - 1
    beam: dict[tuple[int, ...], float] = {(model.vocabulary.begin_id,): 0.0}
    for word in (*said.words, CANDIDATES_END):
        words = [word] if word == CANDIDATES_END else confusions.of(word, WORDS)
        ids = np.array([model.vocabulary.id_of(one) for one in words], np.uint32)
        contexts = np.zeros((len(beam), width), np.uint32)
        lengths = np.array([len(history) for history in beam], np.uint8)
        for row, history in enumerate(beam):
            contexts[row, width - len(history) :] = history
        call = Call.of(contexts, lengths, ids)
        yield call
        found, _, _ = model.whole.score(call.contexts[call.row], call.lengths[call.row], call.words)
        totals = found[call.place].reshape(len(beam), len(words)) - NOT_SAID * (
            np.arange(len(ids)) > 0
        )
        best: dict[tuple[int, ...], float] = {}
        for (history, before), row in zip(beam.items(), totals.tolist(), strict=True):
            for one, prob in zip(ids.tolist(), row, strict=True):
                longer = (*history, one)[-width:]
                best[longer] = max(best.get(longer, -np.inf), before + prob)
        beam = dict(sorted(best.items(), key=lambda one: -one[1])[:CONTEXTS])
