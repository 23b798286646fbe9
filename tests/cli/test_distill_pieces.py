"""`dlm distill` of a network of wordpieces: a model of words, and its record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")
pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
pytest.importorskip("sentencepiece", reason="pip install -e '.[train]'")

from cli.trained import dlm, ln_after, train  # noqa: E402
from dlm.distill.sources.network import NetworkSource  # noqa: E402
from dlm.errors import ConfigError  # noqa: E402
from dlm.ngram.arpa import ArpaReader  # noqa: E402
from dlm.ngram.backoff import DictModel  # noqa: E402
from dlm.record.provenance import LINE_PREFIX, Provenance  # noqa: E402
from estimate.merge_models import normalised_model, worst_sum  # noqa: E402
from federated.compiling import quickly  # noqa: E402

WORDS = ["ala", "alba", "bela", "lab"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two rounds on pieces; a topology with words that they do not spell."""
    place = tmp_path_factory.mktemp("pieces")
    counts = "".join(f"{word}\t{9 - i}\n" for i, word in enumerate(WORDS))
    (place / "counts.tsv").write_text(counts)
    normalised_model(3, [*WORDS, "other", "be"], order=3, contexts=1.0).write(place / "top.arpa")
    with quickly():
        done = dlm("pieces", place / "counts.tsv", "--size", 12, "--public-attested-by",
            "the tests",
                       "-o", place / "pieces.model")  # fmt: skip
        assert done.exit_code == 0, done.exception
        train(place, WORDS, 'vocabulary = "pieces.model"')
        yield place


def test_a_network_of_wordpieces_becomes_a_model_of_words(home: Path) -> None:
    """The topology's words that pieces can spell; what begins a sentence is as likely as the
    network says, over all ways to cut a word; the record is the network's, composed."""
    out = home / "out.arpa"
    args = ("distill", home / "run", "--topology", home / "top.arpa", "-o", out, "--json")
    done = dlm(*args, "--samples", "4e3", "--public-attested-by", "the tests", status=0)
    figures = json.loads(done.stdout)
    assert figures["source_perplexity"] is None
    assert figures["perplexity"] > 1
    assert "which contain 1 word that " in done.stderr
    model = DictModel.from_arpa(out)
    words = model.vocabulary.words
    assert set(words) == {*(w.encode() for w in [*WORDS, "be"]), b"<s>", b"</s>", b"<unk>"}
    assert worst_sum(model) < 3e-6
    network = NetworkSource(home / "run")
    begin = model.vocabulary.begin_id
    compared = 0
    for ngram, (log10_prob, _) in model.ngrams.items():
        if len(ngram) == 2 and ngram[0] == begin:
            wanted = first_word(network, words[ngram[1]].decode())
            assert 10.0**log10_prob == pytest.approx(wanted, abs=5 * np.sqrt(wanted / 4000) + 1e-4)
            compared += 1
    assert compared == 2
    with ArpaReader(out) as reader:
        made, record = reader.comments
    facts = json.loads(made.partition(": ")[2])
    assert facts["inputs"][0]["pieces"] == 12
    assert record.startswith(LINE_PREFIX)
    carried = Provenance.from_json(record)
    assert carried.ledgers == network.record.ledgers
    assert carried.derived[-1] == "distill"


def test_a_network_of_pieces_is_judged_in_words(home: Path) -> None:
    """Its words are what all their pieces get; those with other letters are unknown."""
    text = ["ala bela", "lab", "ala xyz alba"]
    (home / "held.txt").write_text("\n".join(text) + "\n")
    done = dlm("evaluate", home / "run", "--text", home / "held.txt", "--json", status=0)
    facts = json.loads(done.stdout)
    assert (facts["words"], facts["known_words"], facts["sentences"]) == (6, 5, 3)
    network = NetworkSource(home / "run")
    assert network.inventory is not None
    all_words = known = 0.0
    for line in text:
        said = [1]
        for word in [*line.split(), ""]:
            for piece in network.inventory.encode_word(word) if word else [2]:
                given = ln_after(network, said)
                all_words += float(given[piece])
                known += float(given[piece]) * (word not in ("xyz", ""))
                said.append(piece)
    (judged,) = facts["models"]
    assert judged["perplexity"]["value"] == pytest.approx(np.exp(-all_words / 9), rel=1e-4)
    assert judged["sll_without_oovs"]["value"] == pytest.approx(known / 3, rel=1e-4)
    assert judged["top1"]["value"] is None


def first_word(network: NetworkSource, word: str) -> float:
    """P of a word at the beginning of a sentence: of all ways to cut it, and of its end."""
    assert network.inventory is not None
    pieces = network.inventory.pieces()
    begins = [i for i, piece in enumerate(pieces) if piece.startswith("▁")]

    def rest(said: list[int], left: str) -> float:
        given = np.exp(ln_after(network, [1, *said]))
        if not left:
            return float(given[begins].sum() + given[2])
        return sum(
            float(given[i]) * rest([*said, i], left.removeprefix(piece))
            for i, piece in enumerate(pieces)
            if i > 2 and left.startswith(piece)
        )

    return rest([], "▁" + word)


def test_the_stages_and_the_figures_are_told(home: Path) -> None:
    """As people read them."""
    args = ("distill", home / "run", "--topology", home / "top.arpa", "-o", home / "said.arpa")
    done = dlm(*args, "--samples", 20, "--prior", 1, status=0)
    assert " 12 pieces" in done.stderr
    assert "new model" in done.stdout
    assert "nan" not in done.stdout


def test_counts_of_one_spelling_are_not_taken_for_anothers(home: Path) -> None:
    """--work is of a network, its topology and what cases it."""
    cap = normalised_model(4, [*WORDS, "Ala"], order=2, contexts=1.0).write(home / "a.arpa")
    other = normalised_model(5, [*WORDS, "Ala"], order=2, contexts=1.0).write(home / "b.arpa")
    args = ("distill", home / "run", "--samples", 20, "--topology", cap, "--work", home / "work")
    dlm(*args, "--capitalize", cap, "-o", home / "cased.arpa", status=0)
    first = DictModel.from_arpa(home / "cased.arpa").ngrams
    dlm(*args, "--capitalize", cap, "-o", home / "cased.arpa", status=0)
    assert DictModel.from_arpa(home / "cased.arpa").ngrams == first
    done = dlm(*args, "--capitalize", other, "-o", home / "cased.arpa")
    assert isinstance(done.exception, ConfigError)


def test_pieces_do_not_say_which_words_they_spell(home: Path) -> None:
    """A topology has to; an inferred one has none."""
    done = dlm("distill", home / "run", "--samples", 9, "--topology", "self", "-o", home / "no")
    assert isinstance(done.exception, ConfigError)
    assert "give a topology file" in str(done.exception)


def test_a_topology_of_other_letters_is_refused(home: Path) -> None:
    """No word of it is spelled by these pieces."""
    top = normalised_model(1, ["xyz", "zyx"], order=2).write(home / "foreign.arpa")
    done = dlm("distill", home / "run", "--topology", top, "-o", home / "no", "--samples", 5)
    assert isinstance(done.exception, ConfigError)
    assert "spell no word" in str(done.exception)
    assert not (home / "no").exists()
