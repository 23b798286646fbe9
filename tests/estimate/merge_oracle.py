"""Static interpolation over dictionaries: the oracle of the fast one.

Nothing here is clever; every sum runs over all words. It takes the models as `DictModel` reads them
and spells n-grams in words, so that it shares no numbering with what it checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlm.ngram.backoff import DictModel
from dlm.ngram.vocab import BEGIN_SENTENCE, UNK_ID, is_unk_spelling

Words = tuple[bytes, ...]


def prob_of(model: DictModel, context: Words, word: bytes) -> float:
    """P(word | context) in one model: 0 for a word that it lacks, which is <unk> in a context."""
    vocabulary = model.vocabulary
    word_id = vocabulary.id_of(word)
    if word_id == UNK_ID and not (is_unk_spelling(word) and vocabulary.unk_in_model):
        return 0.0
    ids = [vocabulary.id_of(w) for w in context]
    log10_total = 0.0
    for start in range(max(0, len(ids) - model.order + 1), len(ids) + 1):
        found = model.ngrams.get((*ids[start:], word_id))
        if found is not None:
            log10_total += float(found[0])
            break
        entry = model.ngrams.get(tuple(ids[start:]))
        if entry is not None and start < len(ids):
            log10_total += float(entry[1])
    return float(10.0**log10_total)


def merge_plain(
    models: Sequence[DictModel], weights: Sequence[float]
) -> dict[Words, tuple[float, float]]:
    """n-gram -> (probability, backoff weight) of the mixture, both linear.

    Trusts  every model sums to 1 in each context, and leaves something to back off
    """
    ngrams = {tuple(_word(model, i) for i in ngram) for model in models for ngram in model.ngrams}
    probs = {
        ngram: sum(
            weight * prob_of(model, ngram[:-1], ngram[-1])
            for model, weight in zip(models, weights, strict=True)
        )
        for ngram in ngrams
    }
    words = [ngram[0] for ngram in ngrams if len(ngram) == 1 and ngram[0] != BEGIN_SENTENCE]
    order = max(model.order for model in models)
    backoffs: dict[Words, float] = {}

    def mixed(context: Words, word: bytes) -> float:
        if (*context, word) in probs:
            return probs[*context, word]
        return backoffs.get(context, 1.0) * mixed(context[1:], word)

    for k in range(1, order):
        for context in [ngram for ngram in ngrams if len(ngram) == k]:
            listed = [word for word in words if (*context, word) in probs]
            left = 1 - sum(probs[*context, word] for word in listed)
            room = sum(mixed(context[1:], word) for word in words if word not in listed)
            backoffs[context] = left / room if listed else 1.0
    return {ngram: (prob, backoffs.get(ngram, 1.0)) for ngram, prob in probs.items()}


def _word(model: DictModel, word_id: int) -> bytes:
    return b"<unk>" if word_id == UNK_ID else model.vocabulary.words[word_id]
