"""Cased models of an uncased network: CapSampleApprox and what is simpler, by cased accuracy.

    most frequent spelling     SampleApprox, each word then spelled as public text mostly spells it;
                               on n-grams of public text, or (own) of samples
    samples, capitalised       sentences of the network, each spelled as a cased model of public
                               text finds most probable (FNG 5), estimated by Kneser-Ney
    CapSampleApprox            `dlm distill --capitalize`, on n-grams of public cased text
    CapSampleApprox, own       the same on the n-grams of the capitalised samples

Cased accuracy: how often the next word is the one that a model puts first, its spelling included,
of the words whose lower case the network knows. Case alone: how often the spelling of a word that
is told is right, where its lower case has more than one; the others by the best spelling of the
whole sentence.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import distillation

from benchmarks.fng_data import LanguageFiles
from benchmarks.fng_judge import DRAWS, _Done, users_of
from benchmarks.fng_models import NGRAMS, ORDER, as_ids, lines_of, vocabulary_of
from benchmarks.fng_train import Network

LEAST_SEEN = 20  # times that a spelling stands in public text, or it is taken for an error
CAP_NGRAMS = 400_000
SAMPLES = 10_000  # sentences of the network
Spell = Callable[[Sequence[Sequence[str]]], list[list[str]]]


def spellings_of(files: LanguageFiles) -> dict[str, list[str]]:
    """The spellings of each word of the models in public text, the most frequent first."""
    known = set(files.words.read_text(encoding="utf-8").split())
    seen = Counter(word for line in lines_of(files.public_cased) for word in line)
    found: dict[str, list[str]] = {word: [] for word in sorted(known)}
    for spelling, times in seen.most_common():
        if spelling.lower() in known and (times >= LEAST_SEEN or not found[spelling.lower()]):
            found[spelling.lower()].append(spelling)
    return {word: spelled or [word] for word, spelled in found.items()}


def most_frequent(spellings: dict[str, list[str]]) -> Spell:
    """Each word in its most frequent spelling."""
    return lambda lines: [[spellings.get(word, [word])[0] for word in line] for line in lines]


def best_spelling(model: Any, spellings: dict[str, list[str]]) -> Spell:
    """Each sentence in the spelling that a 3-gram model finds most probable (Viterbi)."""
    ids, begin, end = model.vocabulary.ids, model.vocabulary.begin_id, model.vocabulary.end_id

    def choices(word: str) -> list[str]:
        return [one for one in spellings.get(word, [word]) if one.encode() in ids] or [word]

    def spell(lines: Sequence[Sequence[str]]) -> list[list[str]]:
        # Of each sentence, by the last two words: how probable, and the spelling.
        paths: list[dict[tuple[int, int], tuple[float, tuple[str, ...]]]] = [
            {(begin, begin): (0.0, ())} for _ in lines
        ]
        for at in range(max(map(len, lines), default=0) + 1):
            moves = [
                (row, state, one, end if one is None else ids.get(one.encode(), 0))
                for row, line in enumerate(lines)
                if at <= len(line)
                for one in (choices(line[at]) if at < len(line) else [None])
                for state in paths[row]
            ]
            asked = np.array([(*state, word) for _, state, _, word in moves], np.uint32)
            given = model.log10_probs(asked)
            after: dict[int, dict[tuple[int, int], tuple[float, tuple[str, ...]]]] = {}
            for (row, state, one, word), log10 in zip(moves, given.tolist(), strict=True):
                before, said = paths[row][state]
                path = (before + log10, said if one is None else (*said, one))
                here = after.setdefault(row, {})
                key = (state[1], word)
                if key not in here or path > here[key]:
                    here[key] = path
            for row, found in after.items():
                paths[row] = found
        return [list(max(found.values())[1]) for found in paths]

    return spell


def case_accuracy(
    spell: Spell, lines: list[list[str]], spellings: dict[str, list[str]]
) -> dict[str, float]:
    """Share of words with a choice that are spelled right, in per cent; and without first words."""
    right, asked = Counter[bool](), Counter[bool]()
    spelled = spell([[word.lower() for word in line] for line in lines])
    for line, found in zip(lines, spelled, strict=True):
        for at, (word, one) in enumerate(zip(line, found, strict=True)):
            if len(spellings.get(word.lower(), [])) > 1:
                asked[at > 0] += 1
                right[at > 0] += word == one
    return {
        "case_percent": 100 * right.total() / asked.total(),
        "case_percent_inside": 100 * right[True] / asked[True],
    }


def respelled(model: Any, spell: Spell) -> Any:
    """An uncased model, its words spelled otherwise."""
    from dlm.estimate.columns import ModelColumns
    from dlm.ngram.vocab import MARKS

    words = model.vocabulary.words
    names = [w.decode() if w in MARKS else spell([[w.decode()]])[0][0] for w in words]
    vocabulary = vocabulary_of(names[len(MARKS) :])
    return ModelColumns.of(
        vocabulary, [(c.ids, c.log10_prob, c.log10_backoff) for c in model.orders]
    )


def next_word_sums(model: Any, users: list[list[list[str]]], known: set[str]) -> list[list[float]]:
    """`Metrics` of each user; a word counts as known where its lower case is."""
    from dlm.distill.evaluate import NgramJudge

    judge = NgramJudge("", model)
    found = []
    for said in users:
        there = [np.array([judge.knows(w) and w.lower() in known for w in line]) for line in said]
        total = np.zeros(7)
        for one in judge.each(said, there):
            total += list(vars(one).values())
        total[2] = sum(word.lower() in known for line in said for word in line)
        found.append(total.tolist())
    return found


def compare(files: LanguageFiles, network: Network) -> dict[str, Any]:
    """All of it, for one network."""
    from dlm.distill.evaluate import Evaluation
    from dlm.distill.files import distill_files
    from dlm.distill.request import DistillRequest
    from dlm.distill.sources.network import NetworkSource
    from dlm.estimate.columns import ModelColumns

    spellings = spellings_of(files)
    cased = vocabulary_of(one for found in spellings.values() for one in found)
    folder = files.arpa("cased").parent
    public = distillation.kneser_ney(as_ids(lines_of(files.public_cased), cased), cased, folder)
    cap = distillation.pruned(public, CAP_NGRAMS)
    cap.write(files.arpa("cap"))
    distillation.pruned(cap, NGRAMS).write(files.arpa("cap-topology"))
    viterbi = best_spelling(cap, spellings)

    source = NetworkSource(files.run(network.name))
    said = distillation.sampled_text(source.visits(SAMPLES, 0), source.vocabulary)
    words, end = source.vocabulary.words, source.vocabulary.end_id
    lines: list[list[str]] = [[]]
    for word in said.tolist():
        if word == end:
            lines.append([])
        else:
            lines[-1].append(words[word].decode())
    capitalised = viterbi(lines[:-1])
    estimated = distillation.kneser_ney(as_ids(capitalised, cased), cased, folder)
    estimated = distillation.pruned(estimated, NGRAMS)
    estimated.write(files.arpa("capitalised-kn"))

    uncased = {
        name: ModelColumns.read(files.arpa(f"{network.name}-{kind}-{NGRAMS}"))
        for name, kind in (("", "e"), (", own", "i"))
    }
    models = {
        f"most frequent spelling{name}": respelled(model, most_frequent(spellings))
        for name, model in uncased.items()
    }
    models["samples, capitalised"] = estimated
    for name, topology in (("", "cap-topology"), (", own", "capitalised-kn")):
        output = files.arpa(f"capsampleapprox{'-own' if name else ''}")
        request = DistillRequest(
            source=str(files.run(network.name)), topology=str(files.arpa(topology)),
            output=output, samples=SAMPLES, order=ORDER, capitalize=files.arpa("cap"),
        )  # fmt: skip
        distill_files(request)
        models[f"CapSampleApprox{name}"] = ModelColumns.read(output)

    users = users_of(files.cased)
    known = set(spellings)
    sums = {name: next_word_sums(model, users, known) for name, model in models.items()}
    plain = [[[word.lower() for word in line] for line in said] for said in users]
    for name, model in uncased.items():
        sums[f"uncased model, uncased words{name}"] = next_word_sums(model, plain, known)
    judges = [_Done(name, True) for name in sums]
    judged = Evaluation(judges, np.array(list(sums.values()))).figures(DRAWS)
    accuracy = {
        name: {
            key: [one.value, one.low, one.high]
            for key, one in found.items()
            if key.startswith("top1")
        }
        for name, found in zip(sums, judged, strict=True)
    }
    told = [line for user in users for line in user]
    case = {
        "most frequent spelling": case_accuracy(most_frequent(spellings), told, spellings),
        "cased model of public text": case_accuracy(viterbi, told, spellings),
    }
    for name in ("CapSampleApprox", "CapSampleApprox, own", "samples, capitalised"):
        case[name] = case_accuracy(best_spelling(models[name], spellings), told, spellings)
    return {
        "accuracy": accuracy,
        "case": case,
        "ngrams": {name: sum(model.counts) for name, model in models.items()},
        "spellings": sum(map(len, spellings.values())),
    }
