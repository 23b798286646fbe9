"""Names heard by the CTC beam search: 20 per utterance, in a list with 200 that nobody says.

    python tests/benchmarks/names.py [--utterances 12 --flat 2.5]

Utterances are sentences drawn from the model that comes with dlm, with 20 words replaced by names:
rare words of the model, and as many that it lacks. They are spelled in letters, and posteriors say
them unclearly (`asr.decoding`). The bonus has the fewest errors in as many other utterances. Prints
errors in names (substituted or deleted names, listed words inserted) and in other words; and how
many listed words are heard per hour where none is said.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from asr.decoding import posteriors
from benchmarks.heard import FRAMES_PER_LETTER, LETTERS, TOKENS, sentences
from benchmarks.rare_words import errors
from dlm.asr.ctc import build_ctcdecoder
from dlm.asr.speech.lexicon import read_table
from dlm.client import Client, Utterance
from dlm.index.making import build_shard_set
from dlm.ngram.arpa.source import TextSource

MODEL = Path(__file__).parents[2] / "dlm/data/books20k.arpa.zst"
NAMES, DISTRACTORS, SENTENCES = 20, 200, 8
ADVISED = 1.0  # where the listed words are often not said
BONUSES = (0.5, 1.0, 1.5, 2.0, 3.0)


def main() -> None:
    """Decodes and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--utterances", type=int, default=12)
    parser.add_argument("--flat", type=float, default=2.5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dlm-names-") as folder:
        shards = sharded(Path(folder), 1)
        with Client.local(shards) as client:
            print_table(client, shards, given.utterances, given.flat)


def sharded(folder: Path, shards: int) -> Path:
    """The model's shard set."""
    with closing(TextSource(str(MODEL))) as source, (folder / "a").open("wb") as out:
        while data := source.read(1 << 20):
            out.write(data)
    build_shard_set(folder / "a", folder / "shards", shards)
    return folder / "shards"


def spellable(utterance: Utterance) -> list[str]:
    """The words of a model that have letters alone."""
    every = (word.decode("utf-8", "replace") for word in utterance.vocabulary.words)
    return [word for word in every if word and set(word) <= set(LETTERS)]


def print_table(client: Client, shards: Path, count: int, flat: float) -> None:
    """Names of both kinds are drawn once; utterances of a half have their own."""
    utterance, rng = client.utterance(), np.random.default_rng(1)
    words, vocabulary = spellable(utterance), utterance.vocabulary
    ids = [word for word, _ in utterance.next_words(utterance.null(), len(vocabulary))]
    likely = [vocabulary.words[word].decode("utf-8", "replace") for word in ids]
    rare = [word for word in likely[len(likely) // 2 :] if len(word) > 3 and word in set(words)]
    new = [word for word in read_table() if word not in vocabulary and len(word) > 3]
    new = [word for word in new if set(word) <= set(LETTERS)]
    decoder = build_ctcdecoder(["", " ", *LETTERS], utterance, words)
    said = sentences(shards, words, 2 * count * SENTENCES, 3)
    spoken: list[tuple[list[str], list[str], list[str], Any]] = []
    for number in range(2 * count):
        text = [word for one in said[number::2 * count] for word in one]  # fmt: skip
        half = (NAMES + DISTRACTORS) // 2
        names = [*rng.choice(rare, half, replace=False), *rng.choice(new, half, replace=False)]
        rng.shuffle(names)
        own, others = list(map(str, names[:NAMES])), list(map(str, names[NAMES:]))
        at = rng.choice(len(text) // 2, NAMES, replace=False) * 2
        for place, name in zip(at.tolist(), own, strict=True):
            text[place] = name
        heard = posteriors(text, number, flat, TOKENS, FRAMES_PER_LETTER)
        spoken.append((text, own, others, heard))
    test, tuning = spoken[:count], spoken[count:]

    def counted(some: list[Any], bonus: float) -> Any:
        total = np.zeros(4, np.int64)
        for text, own, others, heard in some:
            phrases = dict.fromkeys([*own, *others], bonus) if bonus else None
            found = decoder.decode(heard, phrases=phrases).split()
            total += errors(text, found, set(own), {*own, *others})
        return total

    bonus = min(BONUSES, key=lambda one: counted(tuning, one)[[1, 3]].sum())
    print(f"flat {flat:g}; the bonus is {bonus:g}\n\n| bonus | names wrong | others wrong |")
    print("| ---: | ---: | ---: |")
    shown = sorted({0.0, ADVISED, bonus})
    for one in shown:
        names, wrong, rest, others_wrong = counted(test, one).tolist()
        print(f"| {one:g} | {wrong} of {names} | {others_wrong} of {rest} |", flush=True)
    hours = 0.02 / 3600 * sum(len(heard) for *_, heard in test)
    for one in shown:
        alarms = 0
        for (_, _, others, _), (text, own, _, heard) in zip(tuning, test, strict=True):
            listed = set(others) - {*text, *own}
            phrases = dict.fromkeys(listed, one) if one else None
            alarms += sum(word in listed for word in decoder.decode(heard, phrases=phrases).split())
        print(f"bonus {one:g}: {alarms} listed words in {hours:.2f} h, {alarms / hours:.0f} per h")


if __name__ == "__main__":
    main()
