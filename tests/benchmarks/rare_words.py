"""Rare words heard: what phrases per utterance are worth in speech recognition.

    python tests/benchmarks/rare_words.py --work DIR

Each utterance of `DLM_SHARED_DATA`/speech gets its own list: the rare words of its transcript (rank
above 5,000 by frequency in the text of the model, books5), and so many distractors, rare words
drawn from that text. Every word is a phrase with the same bonus. The acoustic model, the lexicon
and the beam search are those of `dlm transcribe`; utterances that share 8 words in a row with the
text are left out, as in `wer.py`.

The speakers are split in two halves by their order. The bonus is the one of `BONUSES` with the
fewest errors in all words of the first half, with 100 distractors. The table is of the other half:
errors in biased words (of the transcript's rare words: substituted or deleted; and words of the
list that were inserted) and in the others, without and with phrases, and their changes, with 95 %
intervals by bootstrap over speakers.

The second table is of false alarms: the same half with lists of distractors alone, so no listed
word is said. It has how many listed words are heard per hour of audio, without phrases and with
`ADVISED` and the tuned bonus, and the errors in all words.

With `--names`, only a third: of the rare words of the other half that are names, how many are heard
wrong, by how often they occur in the text. A word is a name if nine of ten times that it stands
inside a sentence of the text, it has a capital letter.

Every decoded utterance is kept in DIR. Cost: some 60 minutes of processor time.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.settings import ARPA_FILES, DATA, plain_arpa
from benchmarks.wer import cached, say
from benchmarks.wer_models import Spoken, make_shards, read_speech, write_text
from benchmarks.workload import lines_of
from dlm.asr.decoders.flashlight import DlmLM
from dlm.asr.settings import BeamSettings
from dlm.asr.speech.acoustic import AcousticModel
from dlm.asr.speech.audio import read_audio
from dlm.asr.speech.lexicon import LabelLexicon, model_lexicon
from dlm.asr.speech.transcribe import CtcDecoder
from dlm.asr.speech.wer import DRAWS, INSERTION, MATCH, align
from dlm.client import Client
from dlm.files import replacing

TEXTS = ("gutenberg.txt.zst", "wikipedia_en.txt.zst")  # which books5 was made of
COMMON = 5000  # words that are not rare
DISTRACTORS = (100, 500, 1000)
BONUSES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
ADVISED = 2.0  # where the listed words are often not said
NAME_SHARE = 0.9  # of a name's occurrences that have a capital letter
OFTEN = (100, 10, 1)  # classes of names, by the least times in the text
SETTINGS = BeamSettings(hypotheses=60)


class Study:
    """Utterances, posteriors, the model, and which words are rare."""

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.work = work
        every = read_speech(DATA / "speech")
        text, shared = write_text([DATA / "text" / name for name in TEXTS], every, work)
        self.spoken = [one for one in every if one.name not in shared]
        ranked = cached(work / "words.json", partial(_ranked, text))
        self.common, self.rare = set(ranked[:COMMON]), ranked[COMMON:]
        speakers = sorted({one.speaker for one in self.spoken})
        self.tuning = set(speakers[::2])
        self.acoustic = AcousticModel()
        arpa = work / "books5.arpa"
        if not arpa.exists():  # nor what an earlier run linked to
            arpa.unlink(missing_ok=True)
            arpa.symlink_to(plain_arpa(ARPA_FILES[0]))
        self.client = Client.local(make_shards(arpa, 1), verify=False)
        self._plain: tuple[LabelLexicon, CtcDecoder] | None = None
        self._lexicon: dict[tuple[str, int, bool], LabelLexicon] = {}

    def posteriors(self, one: Spoken) -> NDArray[np.float32]:
        """(T, labels) of an utterance."""
        path = self.work / "posteriors" / f"{one.name}.npy"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            heard = self.acoustic.log_probs(read_audio(one.path))
            with replacing(path) as file:
                np.save(file, heard)
        found: NDArray[np.float32] = np.load(path)
        return found

    def wanted(self, one: Spoken) -> list[str]:
        """The rare words of its transcript."""
        return [word for word in dict.fromkeys(one.words) if word not in self.common]

    def listed(self, one: Spoken, distractors: int, said: bool = True) -> list[str]:
        """Its list: rare words of the transcript if `said`, and others; the first of a longer
        list."""
        rng = np.random.default_rng([*one.name.encode(), 2])
        own = self.wanted(one)
        others = rng.choice(len(self.rare), max(DISTRACTORS) + len(own), replace=False)
        drawn = [self.rare[at] for at in others.tolist() if self.rare[at] not in own]
        return [*own, *drawn[:distractors]] if said else drawn[:distractors]

    def lexicon(self, one: Spoken, distractors: int, said: bool) -> LabelLexicon:
        """The lexicon with the words of its list, whose bonuses are 1; they scale with others."""
        phrases = dict.fromkeys(self.listed(one, distractors, said), 1.0)
        return model_lexicon(self.client.utterance(phrases=phrases), self.acoustic.labels)

    def decoder(self, lexicon: LabelLexicon) -> CtcDecoder:
        """The beam search of `dlm transcribe`."""
        acoustic = self.acoustic
        return CtcDecoder(
            lexicon,
            labels=len(acoustic.labels),
            boundary=acoustic.boundary,
            blank=acoustic.blank,
            settings=SETTINGS,
        )

    def decode(self, one: Spoken, distractors: int, bonus: float, said: bool) -> dict[str, Any]:
        """What is heard, and how long the search took."""
        if bonus:
            phrases = dict.fromkeys(self.listed(one, distractors, said), bonus)
            utterance = self.client.utterance(phrases=phrases)
            lexicon = self._last(one, distractors, said)
            assert lexicon.log10_bonus is not None
            lexicon = replace(lexicon, log10_bonus=bonus * lexicon.log10_bonus)
            decoder = self.decoder(lexicon)
        else:
            utterance = self.client.utterance()
            if self._plain is None:
                lexicon = model_lexicon(utterance, self.acoustic.labels)
                self._plain = lexicon, self.decoder(lexicon)
            lexicon, decoder = self._plain
        posteriors = self.posteriors(one)
        begun = time.perf_counter()
        lm = DlmLM(utterance, lexicon.ids.tolist(), lm_weight=SETTINGS.lm_weight)
        found = decoder.decode(posteriors, lm)
        seconds = time.perf_counter() - begun
        return {"text": found[0].text if found else "", "seconds": seconds}

    def _last(self, one: Spoken, distractors: int, said: bool) -> LabelLexicon:
        key = one.name, distractors, said
        if key not in self._lexicon:
            self._lexicon = {key: self.lexicon(one, distractors, said)}
        return self._lexicon[key]

    def decoded(
        self, half: str, distractors: int, bonuses: Sequence[float], said: bool = True
    ) -> dict[float, dict[str, Any]]:
        """What is heard of each utterance of a half, "tuning" or "test", with each bonus; lists
        have the rare words that are `said`, or only others."""
        found: dict[float, dict[str, Any]] = {bonus: {} for bonus in bonuses}
        say(f"{half}: {distractors} distractors, bonuses {bonuses}")
        for one in self.spoken:
            if (one.speaker in self.tuning) != (half == "tuning"):
                continue
            for bonus in bonuses:
                name = f"{distractors if bonus else 0}-{bonus:g}"
                name += "" if said or not bonus else "-absent"
                path = self.work / "decoded" / name / f"{one.name}.json"
                made = partial(self.decode, one, distractors, bonus, said)
                found[bonus][one.name] = cached(path, made)
        return found


def _ranked(text: Path) -> list[str]:
    """The words of a text, most frequent first."""
    counts: Counter[str] = Counter()
    with text.open(encoding="utf-8") as lines:
        for line in lines:
            counts.update(line.split())
    return [word for word, _ in counts.most_common()]


def errors(
    reference: Sequence[str], heard: Sequence[str], wanted: set[str], listed: set[str]
) -> NDArray[np.int64]:
    """Biased words and errors in them; other words and errors in them."""
    found = np.zeros(4, np.int64)
    for operation, said, instead in align(reference, heard):
        biased = instead in listed if operation == INSERTION else said in wanted
        found[0 if biased else 2] += operation != INSERTION
        found[1 if biased else 3] += operation != MATCH
    return found


def by_speaker(study: Study, rows: dict[str, Any], distractors: int) -> NDArray[np.int64]:
    """(speakers, 4): see `errors`. Lists are the same without phrases, for what is compared."""
    found: dict[str, NDArray[np.int64]] = {}
    for one in study.spoken:
        if one.name in rows:
            wanted, listed = set(study.wanted(one)), set(study.listed(one, distractors))
            counted = errors(one.words, rows[one.name]["text"].split(), wanted, listed)
            found[one.speaker] = found.get(one.speaker, np.zeros(4, np.int64)) + counted
    return np.array([found[speaker] for speaker in sorted(found)])


def compared(before: NDArray[np.int64], after: NDArray[np.int64]) -> dict[str, list[float]]:
    """Shares and changes, each with its interval: [value, low, high]."""
    rows = _resampled(len(before))
    old, new = rows @ before, rows @ after
    figures = {
        "biased_before": 100 * old[:, 1] / old[:, 0],
        "biased_after": 100 * new[:, 1] / new[:, 0],
        "fewer": 100 * (1 - new[:, 1] / old[:, 1]),
        "others_before": 100 * old[:, 3] / old[:, 2],
        "others_after": 100 * new[:, 3] / new[:, 2],
        "others_worse": 100 * (new[:, 3] - old[:, 3]) / old[:, 2],
    }
    return {name: _interval(values) for name, values in figures.items()}


def _resampled(speakers: int) -> NDArray[np.int64]:
    """(1 + DRAWS, speakers): how often each counts; first all once, then by bootstrap."""
    drawn = np.random.default_rng(1).multinomial(
        speakers, np.full(speakers, 1.0 / speakers), size=DRAWS
    )
    return np.concatenate([np.ones((1, speakers), np.int64), drawn])


def _interval(values: NDArray[np.float64]) -> list[float]:
    return [float(values[0]), *map(float, np.quantile(values[1:], [0.025, 0.975]))]


def false_alarms(study: Study, rows: dict[str, Any], distractors: int) -> NDArray[np.float64]:
    """(speakers, 4): hours of audio, words of a list of distractors that are heard, words, errors
    in them."""
    found: dict[str, NDArray[np.float64]] = {}
    for one in study.spoken:
        if one.name in rows:
            listed = set(study.listed(one, distractors, said=False))
            heard = rows[one.name]["text"].split()
            alarms = sum(word in listed for word in heard)
            wrong = sum(operation != MATCH for operation, _, _ in align(one.words, heard))
            counted = np.array([one.seconds / 3600, alarms, len(one.words), wrong])
            found[one.speaker] = found.get(one.speaker, np.zeros(4)) + counted
    return np.array([found[speaker] for speaker in sorted(found)])


def print_false_alarms(study: Study, plain: dict[str, Any], bonus: float) -> dict[str, Any]:
    """Prints the second table; its figures, by distractors and bonus."""
    figures: dict[str, Any] = {}
    print("\n| distractors | bonus | heard | per hour | words wrong, % | change, points |")
    print("| ---: | ---: | ---: | --- | --- | --- |")
    for distractors in DISTRACTORS:
        heard = study.decoded("test", distractors, (ADVISED, bonus), said=False)
        before = false_alarms(study, plain, distractors)
        for given, rows in {0.0: plain, **heard}.items():
            after = false_alarms(study, rows, distractors)
            drawn = _resampled(len(after))
            old, new = drawn @ before, drawn @ after
            one = {
                "per_hour": _interval(new[:, 1] / new[:, 0]),
                "wrong": _interval(100 * new[:, 3] / new[:, 2]),
                "worse": _interval(100 * (new[:, 3] - old[:, 3]) / new[:, 2]),
            }
            counts = after.sum(axis=0).tolist()
            figures[f"{distractors}-{given:g}"] = {**one, "counts": counts}
            cells = [f"{v[0]:.1f} ({v[1]:.1f}..{v[2]:.1f})" for v in one.values()]
            print(
                f"| {distractors} | {given:g} | {counts[1]:g} | {' | '.join(cells)} |", flush=True
            )
    return figures


def names_among(words: set[str]) -> dict[str, int]:
    """The names among words, with how often each occurs in the texts inside of sentences."""
    seen: Counter[tuple[str, bool]] = Counter()
    for name in TEXTS:
        for line in lines_of(DATA / "text" / name):
            for before, word in pairwise(re.findall(r"[^\W\d_]+|[.?!]", line)):
                if before not in ".?!" and word.lower() in words:
                    seen[word.lower(), word[0].isupper()] += 1
    counts = {word: seen[word, True] + seen[word, False] for word in words}
    return {w: n for w, n in counts.items() if n and seen[w, True] >= NAME_SHARE * n}


def print_names(study: Study) -> None:
    """Prints the third table: names, and how many are heard wrong with each bonus."""
    bonuses = (0.0, ADVISED, max(BONUSES))
    rows = study.decoded("test", DISTRACTORS[0], bonuses)
    test = [one for one in study.spoken if one.speaker not in study.tuning]
    names = names_among({word for one in test for word in study.wanted(one)})
    found: dict[int, NDArray[np.int64]] = {}
    for one in test:
        for place, bonus in enumerate(bonuses):
            for operation, said, _ in align(one.words, rows[bonus][one.name]["text"].split()):
                if said in names:
                    often = next(least for least in OFTEN if names[said] >= least)
                    counted = found.setdefault(often, np.zeros((len(bonuses), 2), np.int64))
                    counted[place] += [1, operation != MATCH]
    print(
        "| times in the text | names said | " + " | ".join(f"bonus {b:g}" for b in bonuses) + " |"
    )
    print("| --- | ---: " + "| ---: " * len(bonuses) + "|")
    for often in sorted(found, reverse=True):
        wrong = [f"{row[1]} wrong" for row in found[often].tolist()]
        print(f"| {often:,} or more | {found[often][0][0]} | {' | '.join(wrong)} |", flush=True)


def main() -> None:
    """Decodes what is missing, then prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tune", action="store_true", help="only tune the bonus")
    parser.add_argument("--names", action="store_true", help="only the table of names")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    study = Study(given.work)
    if given.names:
        print_names(study)
        return
    print("| bonus | errors in biased words | in others | in all words |")
    print("| --- | ---: | ---: | ---: |")
    totals = {}
    for bonus, rows in study.decoded("tuning", 100, (0.0, *BONUSES)).items():
        words, wrong, others, other_wrong = by_speaker(study, rows, 100).sum(axis=0).tolist()
        totals[bonus] = wrong + other_wrong
        share = 100 * totals[bonus] / (words + others)
        print(f"| {bonus:g} | {wrong} of {words} | {other_wrong} of {others} | {share:.2f} % |")
    chosen = min(BONUSES, key=lambda bonus: totals[bonus])
    print(f"\nThe bonus is {chosen:g}.\n", flush=True)
    if given.tune:
        return
    figures: dict[str, Any] = {"bonus": chosen}
    before = study.decoded("test", 100, (0.0,))[0.0]
    print("| distractors | biased words wrong | with phrases | fewer | others wrong | more |")
    print("| --- | --- | --- | --- | --- | --- |")
    for distractors in DISTRACTORS:
        after = study.decoded("test", distractors, (chosen,))[chosen]
        counts = [by_speaker(study, rows, distractors) for rows in (before, after)]
        one = compared(*counts)
        figures[str(distractors)] = {
            **one,
            "counts": [rows.sum(axis=0).tolist() for rows in counts],
            "speakers": len(counts[0]),
            "utterances": len(after),
            "seconds": [
                float(np.mean([row["seconds"] for row in rows.values()]))
                for rows in (before, after)
            ],
        }
        cells = [f"{v[0]:.1f} ({v[1]:.1f}..{v[2]:.1f})" for v in one.values()]
        cells = [f"{distractors}", *cells[:3], *cells[4:]]
        print(f"| {' | '.join(cells)} |", flush=True)
    figures["false_alarms"] = print_false_alarms(study, before, chosen)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
