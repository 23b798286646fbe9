"""What the language model is worth in speech recognition: word error rates, full against small.

    python tests/benchmarks/wer.py --work DIR [--conditions clean 10 ...] [--models full ...]

DLM's Table 1 and Figure 10, and the ladder of model sizes of its section 4.1.2, on read English
speech (`DLM_SHARED_DATA`/speech): posteriors of the packaged acoustic model, clean and with the
babble of other speakers at so many dB; flashlight's beam search over a lexicon of 60,000 words;
the models of `wer_models.py`. Utterances that share 8 words in a row with their text are left out.

1. weights are tuned with KenLM, which is quick, on a grid, with a beam of 20; each speaker's are
   those that are best for all other speakers
2. each speaker is decoded with these by KenLM, and by a real cluster of two servers;
`bigram_fallback` by
   the client of the full model whose servers have been killed
3. the table: WER with its interval (bootstrap by speaker), the difference from full (paired), the
   smallest difference that would show (in 80 of 100 samples, at 5 %), the n-best list's oracle

Every step leaves its results in DIR and is not done again. Without DIR/*.arpa they are made first:
12 GB. Cost on two cores: models 15 min, posteriors 3 min per condition, tuning 2 min and decoding
5 min per model and condition.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.settings import DATA
from benchmarks.wer_models import (
    MODELS,
    SMALL,
    Spoken,
    make_models,
    make_shards,
    read_speech,
    write_text,
)
from benchmarks.wer_plot import Bar, intervals
from dlm.asr.decoders.flashlight import DlmLM
from dlm.asr.settings import BeamSettings
from dlm.asr.speech.acoustic import AcousticModel
from dlm.asr.speech.audio import read_audio
from dlm.asr.speech.lexicon import model_lexicon
from dlm.asr.speech.transcribe import CtcDecoder
from dlm.asr.speech.wer import (
    Interval,
    WordErrors,
    by_group,
    distance,
    error_rate,
    rate_difference,
    total,
    word_errors,
)
from dlm.client import Client, ClientConfig
from dlm.cluster.processes import running_servers
from dlm.files import replacing, write_whole

CONDITIONS = ("clean", "10", "5", "0")  # dB of speech above babble
# Chosen before anything was decoded there, since it takes long: where noise is loudest, weights are
# those of 10 dB, and of the utterances in their order every second is decoded.
TUNED_ON = {"clean": "clean", "10": "10", "5": "10", "0": "10"}
EVERY = {"clean": 1, "10": 1, "5": 2, "0": 2}
VOICES = 6  # of the babble
SHARDS = 2
BEAM, TUNING_BEAM, NBEST = 60, 20, 100
GRID = tuple(product((1.0, 1.5, 2.0, 2.5, 3.0), (-1.0, 0.0, 1.0)))
SHOWS = 1.96 + 0.84  # standard errors: found at 5 %, in 80 of 100 samples

CALLED = {
    "bigram_fallback": "its 2-grams",
    "unigram": "its words alone",
    **{f"small_{share}": f"pruned to 1/{share}" for share in SMALL},
}

Weights = tuple[float, float]  # of the language model, per word


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was made of an utterance.

    fewest  errors of the best sentence of the n-best list
    """

    text: str
    errors: WordErrors
    fewest: int
    seconds: float


class Study:
    """All that is decided once: utterances, models, posteriors, the lexicon."""

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.work = work
        every = read_speech(DATA / "speech")
        text, shared = write_text(sorted((DATA / "text").glob("*.zst")), every, work)
        self.spoken = [one for one in every if one.name not in shared]
        self.arpas = make_models(text, work)
        self.of_kenlm = tuple(model for model in MODELS if model != "unigram")  # 2-grams at least
        self.acoustic = AcousticModel()
        with Client.local(self.shards("full"), verify=False) as client:
            self.lexicon = model_lexicon(client.utterance(), self.acoustic.labels, tell=say)

    def shards(self, model: str) -> Path:
        """The shard set of a model."""
        return make_shards(self.arpas[model], SHARDS)

    def spoken_in(self, condition: str) -> list[Spoken]:
        """The utterances that are decoded."""
        return self.spoken[:: EVERY[condition]]

    def posteriors(self, condition: str) -> dict[str, NDArray[np.float32]]:
        """(T, labels) of each utterance."""
        folder = self.work / "posteriors" / condition
        folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, NDArray[np.float32]] = {}
        for one in self.spoken_in(condition):
            path = folder / f"{one.name}.npy"
            if not path.exists():
                heard = self.acoustic.log_probs(self._heard(one, condition))
                with replacing(path) as file:
                    np.save(file, heard)
            found[one.name] = np.load(path)
        return found

    def _heard(self, one: Spoken, condition: str) -> NDArray[np.float32]:
        """Its samples, with the babble of `VOICES` utterances of other speakers."""
        samples = read_audio(one.path)
        if condition == "clean":
            return samples
        rng = np.random.default_rng([*one.name.encode(), 1])
        others = [other for other in self.spoken if other.speaker != one.speaker]
        babble = np.zeros_like(samples)
        for at in rng.choice(len(others), VOICES, replace=False):
            voice = read_audio(others[at].path)
            voice = np.roll(voice, int(rng.integers(len(voice)))) / voice.std()
            babble += np.resize(voice, len(samples))
        gain = samples.std() / babble.std() * 10.0 ** (-float(condition) / 20.0)
        return np.asarray(samples + gain * babble, np.float32)

    def decoder(self, weights: Weights, *, beam: int = BEAM, nbest: int = 1) -> CtcDecoder:
        """The beam search with these weights."""
        settings = BeamSettings(
            lm_weight=weights[0], word_score=weights[1], hypotheses=beam, nbest=nbest
        )
        acoustic = self.acoustic
        return CtcDecoder(
            self.lexicon,
            labels=len(acoustic.labels),
            boundary=acoustic.boundary,
            blank=acoustic.blank,
            settings=settings,
        )


def say(line: str) -> None:
    """On standard error, at once."""
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


def local_lm(study: Study, model: str) -> Any:
    """flashlight's own KenLM, in C++; dlm's in this process where KenLM refuses the model."""
    if model not in study.of_kenlm:
        client = Client.local(study.shards(model), verify=False)
        return DlmLM(client.utterance(), study.lexicon.words)
    from flashlight.lib.text.decoder.kenlm import KenLM
    from flashlight.lib.text.dictionary import Dictionary

    arpa = study.arpas[model]
    say(f"reading {arpa} with KenLM")
    dictionary = Dictionary([*study.lexicon.words, "<unk>"])
    return KenLM(str(arpa), dictionary)


def decode(decoder: CtcDecoder, lm: Any, one: Spoken, posteriors: NDArray[np.float32]) -> Decoded:
    """An utterance, and how far the best of its n-best list is from what was said."""
    began = time.perf_counter()
    sentences = decoder.decode(posteriors, lm)
    seconds = time.perf_counter() - began
    texts = [sentence.text for sentence in sentences] or [""]
    fewest = min(distance(one.words, text.split()) for text in texts)
    return Decoded(texts[0], word_errors(one.words, texts[0].split()), fewest, seconds)


def cached(path: Path, make: Callable[[], Any]) -> Any:
    """JSON at `path`, made where it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(make()).encode())
    return json.loads(path.read_bytes())


def tune(study: Study, model: str, condition: str, lm: Callable[[], Any]) -> dict[str, Weights]:
    """The weights of each speaker: those with the fewest errors of all other speakers."""
    condition = TUNED_ON[condition]

    def grid() -> list[dict[str, int]]:
        say(f"tuning {model} {condition}")
        posteriors = study.posteriors(condition)
        rows = []
        for weights in GRID:
            decoder = study.decoder(weights, beam=TUNING_BEAM)
            rows.append(
                {
                    one.name: decode(decoder, lm(), one, posteriors[one.name]).errors.errors
                    for one in study.spoken
                }
            )
        return rows

    rows = cached(study.work / "tuned" / f"{model}.{condition}.json", grid)
    chosen = {}
    for speaker in sorted({one.speaker for one in study.spoken}):
        others = [one.name for one in study.spoken if one.speaker != speaker]
        best = min(range(len(GRID)), key=lambda at: sum(rows[at][name] for name in others))
        chosen[speaker] = GRID[best]
    return chosen


def decode_all(
    study: Study, condition: str, chosen: dict[str, Weights], lm: Callable[[], Any], what: str
) -> dict[str, Any]:
    """Each utterance with its speaker's weights."""
    say(f"decoding {condition} with {what}")
    posteriors = study.posteriors(condition)
    decoders = {weights: study.decoder(weights, nbest=NBEST) for weights in set(chosen.values())}
    return {
        one.name: asdict(decode(decoders[chosen[one.speaker]], lm(), one, posteriors[one.name]))
        for one in study.spoken_in(condition)
    }


def read_decoded(rows: dict[str, Any]) -> dict[str, Decoded]:
    """What `decode_all` returned, of JSON."""
    return {
        name: replace(Decoded(**row), errors=WordErrors(**row["errors"]))
        for name, row in rows.items()
    }


@contextmanager
def served(study: Study, model: str) -> Iterator[Callable[[], DlmLM]]:
    """A real cluster's client, as a maker of language models: one for each utterance.

    `bigram_fallback` is the full model's, its servers killed once the client has its low orders.
    """
    directory = study.shards("full" if model == "bigram_fallback" else model)
    config = ClientConfig(
        bigram_fallback=model == "bigram_fallback", deadline_s=20.0, cache_dir=study.work / "client"
    )
    with running_servers([directory]) as servers:
        addresses = [server.endpoint.address for server in servers]
        with Client.connect(addresses, config) as client:
            if model == "bigram_fallback":
                for server in servers:
                    server.process.kill()
                    server.process.wait()
            yield lambda: DlmLM(client.utterance(), study.lexicon.words)


def run(study: Study, models: Sequence[str], conditions: Sequence[str], by: Sequence[str]) -> None:
    """Tunes and decodes what has not been."""
    for model in models:
        loaded: list[Any] = []

        def lm(model: str = model, loaded: list[Any] = loaded) -> Any:
            if not loaded:
                loaded.append(local_lm(study, model))
            return loaded[0]

        path = study.work / "decoded"
        if "kenlm" in by and model in study.of_kenlm:
            for condition in conditions:
                chosen = tune(study, model, condition, lm)
                decode = partial(decode_all, study, condition, chosen, lm, f"{model}, here")
                cached(path / f"{model}.{condition}.kenlm.json", decode)
        left = [c for c in conditions if not (path / f"{model}.{c}.dlm.json").exists()]
        if left and "dlm" in by:
            weights = {condition: tune(study, model, condition, lm) for condition in left}
            loaded.clear()
            with served(study, model) as make:
                for condition, chosen in weights.items():
                    cached(
                        path / f"{model}.{condition}.dlm.json",
                        partial(decode_all, study, condition, chosen, make, f"dlm, {model}"),
                    )


def report(study: Study, models: Sequence[str], conditions: Sequence[str]) -> dict[str, Any]:
    """The figures of every model in every condition, of what has been decoded."""
    speaker_of = {one.name: one.speaker for one in study.spoken}
    found: dict[str, Any] = {}
    for condition in conditions:
        full: list[WordErrors] = []
        for model in models:
            rows = {
                by: read_decoded(json.loads(path.read_bytes()))
                for by in ("dlm", "kenlm")
                if (path := study.work / "decoded" / f"{model}.{condition}.{by}.json").exists()
            }
            if not rows:
                continue
            decoded = rows.get("dlm") or rows["kenlm"]
            groups = by_group({name: one.errors for name, one in decoded.items()}, speaker_of)
            errors = list(groups.values())
            full = errors if model == "full" else full
            weights = Counter(tune(study, model, condition, lambda: None).values())
            facts = {
                "wer": asdict(error_rate(errors)),
                "errors": asdict(total(errors)),
                "oracle": sum(one.fewest for one in decoded.values()) / total(errors).words,
                "weights": {str(w): count for w, count in weights.most_common()},
                "by": next(iter(rows)),
                "utterances": len(decoded),
            }
            if len(rows) == 2:
                same = [rows["dlm"][name].text == one.text for name, one in rows["kenlm"].items()]
                facts["as_kenlm"] = [sum(same), len(same)]
            if model != "full" and full:
                facts["minus_full"] = asdict(rate_difference(full, errors))
            found[f"{model}.{condition}"] = facts
    return found


def spoken_as(condition: str) -> str:
    """How a condition is shown."""
    return condition if condition == "clean" else f"{condition} dB"


def plot(figures: dict[str, Any]) -> str:
    """What each smaller model costs, for each kind of speech (DLM Figure 10)."""
    groups: dict[str, dict[str, Bar]] = {}
    for name, facts in figures.items():
        model, condition = name.split(".")
        if "minus_full" in facts:
            minus = Interval(**facts["minus_full"])
            bar = Bar(*(100 * value for value in (minus.value, minus.low, minus.high)))
            groups.setdefault(spoken_as(condition), {})[CALLED[model]] = bar
    return intervals("points of WER more than the full model, 95 % intervals, paired", groups)


def markdown(study: Study, figures: dict[str, Any]) -> str:
    """The table."""
    seconds = sum(one.seconds for one in study.spoken)
    speakers = len({one.speaker for one in study.spoken})
    words = sum(len(one.words) for one in study.spoken)
    lines = [
        f"{len(study.spoken)} utterances, {seconds / 60:.0f} minutes, {words:,} words, {speakers} "
        "speakers; WER in %, with 95 % intervals.",
        "",
        "| speech (utterances) | model | WER | minus full | would show | oracle | weights "
        "| as KenLM |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, facts in figures.items():
        model, condition = name.split(".")
        wer, minus = Interval(**facts["wer"]), facts.get("minus_full")
        difference, shows = "", ""
        if minus is not None:
            one = Interval(**minus)
            difference = f"{100 * one.value:+.2f} ({100 * one.low:+.2f}..{100 * one.high:+.2f})"
            shows = f"{100 * SHOWS * one.error:.2f}"
        same = "{}/{}".format(*facts["as_kenlm"]) if "as_kenlm" in facts else facts["by"]
        lines.append(
            f"| {spoken_as(condition)} ({facts['utterances']}) | {model} "
            f"| {100 * wer.value:.2f} ({100 * wer.low:.1f}..{100 * wer.high:.1f}) | {difference} "
            f"| {shows} | {100 * facts['oracle']:.1f} | {next(iter(facts['weights']))} | {same} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Decodes what is missing, then prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--by",
        nargs="*",
        choices=("kenlm", "dlm"),
        default=["kenlm", "dlm"],
        help="with none, what has been decoded is shown",
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--svg", type=Path, help="file for a plot")
    arguments = parser.parse_args()
    study = Study(arguments.work)
    run(study, arguments.models, arguments.conditions, arguments.by)
    figures = report(study, arguments.models, arguments.conditions)
    if arguments.json is not None:
        write_whole(arguments.json, json.dumps(figures, indent=1).encode())
    if arguments.svg is not None:
        write_whole(arguments.svg, plot(figures).encode())
    print(markdown(study, figures))


if __name__ == "__main__":
    main()
