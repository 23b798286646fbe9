"""Compares two models on sentences: what each answers, and how fast."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from dlm.client.api.client import Client
from dlm.cluster.rollout import Comparison
from dlm.errors import DlmError
from dlm.ngram.vocab import as_text

SENTENCES, WORDS, CHOICES, TURNS = 32, 8, 16, 2
SEED = 20191201


def sample(client: Client, sentences: int = SENTENCES, seed: int = SEED) -> list[str]:
    """Sentences drawn from a served model: each word among the likeliest after those before."""
    rng, utterance = np.random.default_rng(seed), client.utterance()
    words = client.vocabulary.words
    out = []
    for _ in range(sentences):
        state, said = utterance.begin(), []
        for _ in range(WORDS):
            likely = utterance.next_words(state, CHOICES)
            word = likely[int(rng.integers(len(likely)))][0]
            if word == client.vocabulary.end_id:
                break
            said.append(as_text(words[word]))
            state = utterance.extend([state], [word]).states[0, 0]
        out.append(" ".join(said))
    return out


def compare(old: Client, new: Client, files: Client | None, sentences: Sequence[str]) -> Comparison:
    """Asks both models for each sentence, one after the other.

    Of two turns, the shorter counts: a delay of this machine must not count as the servers'.
    """
    took: tuple[list[float], list[float]] = ([], [])
    failed, wrong = [0, 0], 0
    differences: list[float] = []
    for sentence in sentences:
        scores = []
        for number, client in enumerate((old, new)):
            lasted = []
            try:
                for _ in range(TURNS):
                    begun = time.perf_counter()
                    (found,) = client.utterance().score_sentences([sentence])
                    lasted.append(1e3 * (time.perf_counter() - begun))
            except DlmError:
                failed[number] += 1
                continue
            took[number].append(min(lasted))
            scores.append(found.token_log10_prob)
            if number and files is not None:
                (told,) = files.utterance().score_sentences([sentence])
                wrong += not np.array_equal(told.token_log10_prob, found.token_log10_prob)
        if len(scores) == 2 and len(scores[0]) == len(scores[1]):
            differences += (scores[1] - scores[0]).tolist()
    old_p99, new_p99 = (float(np.percentile(one, 99)) if one else 0.0 for one in took)
    mean = float(np.mean(differences)) if differences else 0.0
    largest = max(differences, key=abs, default=0.0)
    return Comparison(len(sentences), failed[1], failed[0], wrong, old_p99, new_p99, mean, largest)
