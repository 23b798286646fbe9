"""Pieces to words: beside the composition B = M o A, and beside the words of all sentences."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sentencepiece", reason="pip install -e '.[train]'")

from distill import oracle
from distill.oracle import END, Ngram
from distill.pieces_oracle import SPACE, Composed, ComposedCounts, Pieces, Spelled, words_of
from distill.plain import Plain, ngrams_of, sampled_counts
from dlm.distill.counts.count import NgramCounts, Visit, local_counts
from dlm.distill.fitting.fit import fit
from dlm.distill.fitting.prior import as_backed_off
from dlm.distill.fitting.topology import closed, restricted
from dlm.distill.sources.capitalize import Spellings
from dlm.distill.sources.pieces_to_words import Lexicon, PieceReader
from dlm.errors import ConfigError
from dlm.estimate.columns import MISSING, ModelColumns
from dlm.federated.pieces.inventory import Inventory, build_inventory
from dlm.record.counts_file import WordCounts
from dlm.record.provenance import Provenance
from estimate.merge_models import normalised_model, read

# Words that are the beginnings of others, and one that no other shares a letter with.
WORDS = ["a", "ab", "abba", "b", "ba", "baa", "bab", "c"]
# The pieces are made of these too, which the topology lacks.
OTHERS = ["abc", "bb", "ca"]


@pytest.fixture(scope="module")
def inventory() -> Inventory:
    """Some whole words, some parts of words, each letter."""
    words = [*WORDS, *OTHERS]
    counts = WordCounts(
        tuple(words), 100.0 / np.arange(1, len(words) + 1), Provenance.none("a test")
    )
    return build_inventory(counts, 16)


def a_topology(seed: int, order: int, folder: Path, inventory: Inventory) -> ModelColumns:
    """N-grams of words and `<unk>`, closed, in the ids of the lexicon."""
    model, _ = read(normalised_model(seed, WORDS, order=order), folder / f"{seed}.arpa")
    lexicon = Lexicon.of(inventory, model.vocabulary.words)
    return closed(restricted(model, lexicon.vocabulary).model)


def visits_of(
    inventory: Inventory, sentences: list[tuple[Pieces, list[dict[str, float]]]], batch: int
) -> Iterator[Visit]:
    """What a source that says these pieces tells: what is given after each, places taken anew."""
    ids = {piece: i for i, piece in enumerate(inventory.pieces())}
    ids[END] = 2
    waiting = list(sentences)
    under_way: dict[int, list[tuple[int, dict[str, float]]]] = {}
    while True:
        for place in range(batch):
            if not under_way.get(place) and waiting:
                said, given = waiting.pop(0)
                tokens = [1, *(ids[piece] for piece in said)]
                under_way[place] = list(zip(tokens, given, strict=True))
        places = sorted(place for place, rest in under_way.items() if rest)
        if not places:
            return
        now = [under_way[place].pop(0) for place in places]
        table = np.zeros((len(places), inventory.size))
        for row, (_, given) in enumerate(now):
            for piece, prob in given.items():
                table[row, ids[piece]] += prob
        yield Visit(
            np.array([token for token, _ in now], np.uint32),
            np.array(places),
            table,  # type: ignore[arg-type]
            np.zeros(len(places), np.float32),
        )


def counted(
    topology: ModelColumns,
    inventory: Inventory,
    sentences: list[tuple[Pieces, list[dict[str, float]]]],
    batch: int = 7,
) -> NgramCounts:
    """Our counts."""
    lexicon = Lexicon.of(inventory, topology.vocabulary.words)
    reader = PieceReader(lexicon, topology.order - 1)
    return sampled_counts(topology, map(reader.read, visits_of(inventory, sentences, batch)))


def expected(source: Spelled) -> list[tuple[Pieces, list[dict[str, float]]]]:
    """All prefixes, as sentences that give nothing but at their end, as much as they are likely."""
    return [
        (said, [{}] * len(said) + [{p: prob * v for p, v in source.after(said).items()}])
        for said, prob in source.prefixes()
    ]


def same(topology: ModelColumns, ours: NgramCounts, found: dict, backed: dict) -> None:  # type: ignore[type-arg]
    """C(w, h) and C(phi, h), to 1e-12."""
    local = local_counts(topology, ours)
    total = 0.0
    for k, order in enumerate(ngrams_of(topology)):
        wanted = [found.get(ngram, 0.0) for ngram in order]
        total += sum(wanted)
        np.testing.assert_allclose(local.found[k], wanted, rtol=0, atol=1e-12)
        if k + 1 < topology.order:
            back = [backed.get(ngram, 0.0) for ngram in order]
            np.testing.assert_allclose(local.backed[k + 1], back, rtol=0, atol=1e-12)
    assert total == pytest.approx(sum(found.values()), abs=1e-12)
    assert ours.words == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("order", [1, 2, 3])
def test_counts_are_those_of_the_composition_moved_to_words(
    tmp_path: Path, inventory: Inventory, seed: int, order: int
) -> None:
    """B = M o A, exact counts; and those of the words of all sentences, each cut by itself."""
    topology = a_topology(seed, order, tmp_path, inventory)
    source = Spelled(inventory.pieces()[3:], seed, longest=5)
    ours = counted(topology, inventory, expected(source))
    shape = {ngram for names in ngrams_of(topology) for ngram in names}
    composed = ComposedCounts(Composed(set(WORDS), shape, order))
    plain = oracle.Counts(shape, order)
    unknown = 0.0
    for said, prob in source.prefixes():
        given = source.after(said)
        composed.add(said, given, prob)
        words: Ngram = ("<s>", *words_of(said, set(WORDS)), END)
        for place in range(1, len(words)):
            plain.add(words[:place], {words[place]: prob * given[END]})
        unknown += prob * given[END] * words.count("<unk>")
    assert unknown > 0.1
    same(topology, ours, composed.found, composed.backed)
    same(topology, ours, plain.found, plain.backed)


def test_each_way_to_cut_a_word_counts_for_it(inventory: Inventory) -> None:
    """And words whose beginning is shared, words of the language that the topology lacks, words
    that are none, and an empty sentence."""
    lexicon = Lexicon.of(inventory, [w.encode() for w in WORDS])
    pieces = set(inventory.pieces())
    cuts = [("▁", "a", "b"), ("▁a", "b"), ("▁ab",)]
    known = [cut for cut in cuts if set(cut) <= pieces]
    assert len(known) >= 2
    for cut in known:
        at = np.zeros(1, np.int64)
        for piece in cut:
            at = lexicon.walk(at, np.array([inventory.pieces().index(piece)]))
        assert lexicon.vocabulary.words[lexicon.word_at[at[0]]] == b"ab", cut
    assert words_of(("▁ab", "c"), set(WORDS)) == ("<unk>",)
    assert words_of((), set(WORDS)) == ()
    assert SPACE == "▁"


def test_words_that_cannot_be_spelled_are_left_out(inventory: Inventory) -> None:
    """Other letters, marks, bytes that are no text; what is spelled has a base distribution."""
    given = [b"ab", "é".encode(), b"\xff", b"<unk>", b"</s>", "▁a".encode(), b"c"]
    lexicon = Lexicon.of(inventory, given)
    assert lexicon.vocabulary.words == [b"<unk>", b"<s>", b"</s>", b"ab", b"c"]
    assert lexicon.base.sum() == pytest.approx(1)
    # No word is next to impossible, and those of few and frequent pieces are likelier.
    assert (lexicon.base[3:] >= 0.5 / 2).all()
    many = Lexicon.of(inventory, [*(w.encode() for w in WORDS), b"abcabcabcabccab"])
    assert many.base[-1] == pytest.approx(0.5 / 9, rel=1e-3)
    assert many.base[3] == many.base.max() > 1 / 9
    assert (lexicon.base[:3] == 0).all()
    with pytest.raises(ConfigError, match="spell no word"):
        Lexicon.of(inventory, ["é".encode()])


def test_what_a_word_gets_is_split_over_its_spellings(tmp_path: Path, inventory: Inventory) -> None:
    """As the cased model says after the cased history; drawn spellings are spellings of what was
    said; with one for each word nothing changes but the case."""
    lexicon = Lexicon.of(inventory, [w.encode() for w in WORDS])
    source = Spelled(inventory.pieces()[3:], 4, longest=5)
    rng = random.Random(4)
    drawn = [source.sample(rng) for _ in range(40)]
    told = [(said, [source.after(said[:i]) for i in range(len(said) + 1)]) for said in drawn]
    plain_cap = normalised_model(3, ["a", "A", "AB", "ab", "Ab", "Ba", "ba"], order=3)
    one = normalised_model(3, ["A", "ab", "BA"], order=3)
    for cap, choice in ((plain_cap, True), (one, False)):
        columns, _ = read(cap, tmp_path / "cap.arpa")
        model = Plain(cap)
        spellings = Spellings(lexicon.vocabulary, columns)
        texts = [w.decode() for w in spellings.vocabulary.words]
        bare, cased = PieceReader(lexicon, 2), PieceReader(lexicon, 2, spellings, 1)
        for visit in visits_of(inventory, told, 7):
            plain, ours = bare.read(visit), cased.read(visit)
            missing = plain.histories == MISSING
            assert (missing == (ours.histories == MISSING)).all()
            uncased = spellings.uncased_of[np.where(missing, 0, ours.histories)]
            assert (np.where(missing, MISSING, uncased) == plain.histories).all()
            wanted: dict[tuple[int, str], float] = {}
            for row, word, mass in zip(plain.rows, plain.words, plain.mass, strict=True):
                history = tuple(texts[i] for i in ours.histories[row] if i != MISSING)
                variants = [
                    t for t, u in zip(texts, spellings.uncased_of, strict=True) if u == word
                ]
                shares = [1.0]
                if len(variants) > 1:
                    shares = [model.prob(history, v) for v in variants]
                for variant, share in zip(variants, shares, strict=True):
                    wanted.setdefault((int(row), variant), 0.0)
                    wanted[int(row), variant] += mass * share / sum(shares)
            found: dict[tuple[int, str], float] = {}
            for row, word, mass in zip(ours.rows, ours.words, ours.mass, strict=True):
                found.setdefault((int(row), texts[word]), 0.0)
                found[int(row), texts[word]] += mass
            assert found == pytest.approx(wanted, rel=1e-6)
            assert choice or ours.mass.tolist() == plain.mass.tolist()


@pytest.mark.parametrize("visits", [None, 0.5])
def test_no_word_is_lost_for_not_being_sampled(
    tmp_path: Path, inventory: Inventory, visits: float | None
) -> None:
    """The prior gives each n-gram some probability; with many samples it is forgotten."""
    topology = a_topology(1, 3, tmp_path, inventory)
    lexicon = Lexicon.of(inventory, topology.vocabulary.words)
    source = Spelled(inventory.pieces()[3:], 1, longest=5)
    rng = random.Random(1)
    drawn = [source.sample(rng) for _ in range(3)]
    counts = counted(
        topology,
        inventory,
        [(said, [source.after(said[:i]) for i in range(len(said) + 1)]) for said in drawn],
    )
    predicted = topology.orders[0].ids[:, 0] != topology.vocabulary.begin_id
    bare = fit(topology, counts)
    assert (bare.model.orders[0].log10_prob[predicted] < -50).any()
    careful = fit(topology, counts, prior=as_backed_off(topology, counts, lexicon.base, visits))
    for k, columns in enumerate(careful.model.orders):
        rows = predicted if k == 0 else np.ones(len(columns), np.bool_)
        assert (columns.log10_prob[rows] > -20).all()
    exact = counted(topology, inventory, expected(source))
    much = exact.scaled(1e9)
    prior = as_backed_off(topology, much, lexicon.base, visits)
    for ours, plain in zip(
        fit(topology, much, prior=prior).model.orders, fit(topology, much).model.orders, strict=True
    ):
        there = plain.log10_prob > -6
        np.testing.assert_allclose(ours.log10_prob[there], plain.log10_prob[there], atol=1e-3)
    with pytest.raises(ConfigError, match="prior"):
        as_backed_off(topology, counts, lexicon.base, -1)
