"""`dlm distill` of a network that users trained: samples, distributions, and the record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")
pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")

from cli.trained import dlm, ln_after, train  # noqa: E402
from dlm.checkpoint import CHECKPOINT  # noqa: E402
from dlm.distill.counts.work import COUNTS  # noqa: E402
from dlm.distill.sources.network import NetworkSource  # noqa: E402
from dlm.distill.sources.source import MOST_WORDS  # noqa: E402
from dlm.errors import ConfigError, FormatError  # noqa: E402
from dlm.ngram.arpa import ArpaReader  # noqa: E402
from dlm.ngram.backoff import DictModel  # noqa: E402
from dlm.record.counts_file import WordCounts, write_counts  # noqa: E402
from dlm.record.provenance import LINE_PREFIX, Guarantee, Provenance  # noqa: E402
from estimate.merge_models import normalised_model, worst_sum  # noqa: E402
from federated.compiling import quickly  # noqa: E402

WORDS = ["alpha", "beta", "gamma", "delta"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two rounds, and a model for its n-grams, with a word of its own."""
    place = tmp_path_factory.mktemp("distill")
    (place / "words.txt").write_text("\n".join(WORDS) + "\n")
    normalised_model(1, [*WORDS, "other"], order=3).write(place / "top.arpa")
    with quickly():
        train(place, WORDS, 'vocabulary = "words.txt"\npublic = "the tests"')
        yield place


def test_visits_are_those_of_the_sampled_sentences(home: Path) -> None:
    """Each history's distribution is the network's after the whole of it; as many sentences as
    were asked for, whatever fits into a batch; the same for the same seed."""
    source = NetworkSource(home / "run", batch=3)
    end, begin = source.vocabulary.end_id, source.vocabulary.begin_id
    said: dict[int, list[int]] = {}
    begun = 0
    longest: list[int] = []
    for visit in source.visits(8, seed=5):
        assert len(visit.places) <= 3
        np.testing.assert_allclose(visit.given.sum(axis=1), 1, atol=1e-5)
        assert (visit.given[:, begin] == 0).all()
        for place, word, given in zip(
            visit.places.tolist(), visit.words.tolist(), visit.given, strict=True
        ):
            if word == begin:
                begun += 1
                said[place] = []
            said[place].append(word)
            assert word != end
            np.testing.assert_allclose(given, np.exp(ln_after(source, said[place])), atol=1e-5)
            assert len(said[place]) <= MOST_WORDS
            longest.append(len(said[place]))
    assert begun == 8
    assert max(longest) > 2
    again = [visit.words.tolist() for visit in source.visits(8, seed=5)]
    assert again == [visit.words.tolist() for visit in source.visits(8, seed=5)]
    assert again != [visit.words.tolist() for visit in source.visits(8, seed=6)]


def test_a_network_follows_a_text_and_finds_its_own_n_grams(home: Path) -> None:
    """A text that nobody vouches for takes the guarantee away, by name; the network's n-grams are
    as public as the network."""
    (home / "lines.txt").write_text("alpha beta gamma\ndelta unheard alpha\n" * 30)
    args = ("distill", home / "run", "--json", "-q", "-o", home / "other.arpa")
    dlm(*args, "--topology", home / "top.arpa", "--text", home / "lines.txt", status=0)
    with ArpaReader(home / "other.arpa") as reader:
        record = Provenance.from_json(reader.comments[1])
    assert any("lines.txt" in reason for reason in record.reasons), record.reasons
    for _ in range(2):  # the second time from what was kept
        work = ("--work", home / "work", "--samples", 500)
        done = dlm(*args, "--topology", "self", "--order", 2, "--ngrams", 25, *work, status=0)
        assert sum(json.loads(done.stdout)["ngrams"]) == 25
    with ArpaReader(home / "other.arpa") as reader:
        carried = Provenance.from_json(reader.comments[1])
    assert carried.ledgers == NetworkSource(home / "run").record.ledgers
    assert not any("topology" in reason for reason in carried.reasons)
    done = dlm(*args, "--topology", home / "top.arpa", "--work", home / "work", "--samples", 500)
    assert isinstance(done.exception, ConfigError)
    assert "topology was" in str(done.exception)


def test_the_command_writes_a_model_that_carries_the_record(home: Path) -> None:
    """Near to what the network says; sums to 1; a simulation promises nothing, and says so."""
    out = home / "out.arpa"
    args = ("distill", home / "run", "--topology", home / "top.arpa", "-o", out, "--json")
    done = dlm(*args, "--samples", "2e3", "--public-attested-by", "the tests", status=0)
    figures = json.loads(done.stdout)
    assert 0 < figures["relative_entropy_nats"] < 0.05
    model = DictModel.from_arpa(out)
    assert worst_sum(model) < 3e-6
    assert b"other" not in model.vocabulary.words
    assert set(map(str.encode, WORDS)) < set(model.vocabulary.words)
    with ArpaReader(out) as reader:
        made, record = reader.comments
    facts = json.loads(made.partition(": ")[2])
    assert (facts["samples"], facts["seed"]) == (2000, 0)
    assert [part["as"] for part in facts["inputs"]] == ["network", "topology"]
    assert record.startswith(LINE_PREFIX)
    carried = Provenance.from_json(record)
    of_run = NetworkSource(home / "run").record
    assert carried.guarantee is None
    assert carried.ledgers == of_run.ledgers
    assert carried.simulated == of_run.simulated
    # More samples, and the network's own words as the topology: nearer.
    again = dlm(*args, "--samples", "2e3", "--public-attested-by", "the tests")
    assert json.loads(again.stdout)["perplexity"] == figures["perplexity"]


def test_a_network_is_judged_beside_its_model(home: Path) -> None:
    """On the same words, by its distribution after each history."""
    out = home / "judged.arpa"
    args = ("distill", home / "run", "--topology", home / "top.arpa", "-o", out)
    assert dlm(*args, "--samples", "500").exit_code == 0
    rows = [f"u{i % 3}\t{text}" for i, text in enumerate(HELD_OUT)]
    (home / "held.tsv").write_text("user_id\tutterance\n" + "\n".join(rows) + "\n")
    done = dlm("evaluate", out, home / "run", "--users", home / "held.tsv", "--json", status=0)
    facts = json.loads(done.stdout)
    network = NetworkSource(home / "run")
    ln = {"words": 0.0, "known": 0.0, "ends": 0.0}
    right = known = 0
    for text in HELD_OUT:
        ids = [*network.vocabulary.ids_of([w.encode() for w in text.split()]).tolist(), 2]
        for place, target in enumerate(ids):
            given = ln_after(network, [1, *ids[:place]])
            part = "ends" if target == 2 else "words"
            ln[part] += float(given[target])
            if target > 2:
                known += 1
                ln["known"] += float(given[target])
                right += int(given.argmax()) == target
    words = sum(len(text.split()) for text in HELD_OUT)
    assert (facts["words"], facts["known_words"]) == (words, known)
    judged = {
        name: figure["value"] for name, figure in facts["models"][1].items() if name != "model"
    }
    size = len(HELD_OUT)
    assert judged["perplexity"] == pytest.approx(
        np.exp(-(ln["words"] + ln["ends"]) / (words + size)), rel=1e-4
    )
    assert judged["sll_without_oovs"] == pytest.approx(ln["known"] / size, rel=1e-4)
    assert judged["top1"] == pytest.approx(right / known)
    # Its words are independent, nearly: the n-gram model is as good.
    assert abs(judged["perplexity_difference"]) < 0.5


HELD_OUT = ["alpha beta nowhere gamma", "delta", "beta beta alpha delta gamma beta", "nowhere"]
CASED = ["alpha", "Alpha", "beta", "Beta", "gamma", "Delta"]


def test_words_are_cased_and_their_frequencies_are_those_of_counts(home: Path) -> None:
    """Spellings of a word share what the network gives to it; words of the counts are in, split
    over theirs; and the records of all inputs are composed."""
    for name, seed in (("cap", 5), ("cased", 6)):
        path = normalised_model(seed, CASED, order=2, contexts=1.0).write(home / f"{name}.arpa")
        path.write_text(f"# {Provenance.public(name, name).line}\n" + path.read_text())
    counts = home / "counts.tsv"
    given = Provenance(
        Guarantee(2.12, 1e-6, 0.125),
        stages=({"stage": "unigrams", "mechanism": "gaussian", "noise_multiplier": 2.0,
                 "rounds": 1, "gap": 1, "max_participations": 1, "extras": {"ledger": "a" * 64}},),
        ledgers=("a" * 64,),
    )  # fmt: skip
    words = ("beta", "rare", "alpha", "gamma", "delta")
    write_counts(counts, WordCounts(words, np.array([8.0, 4.0, 2.0, 1.0, 1.0]), given))
    args = ("distill", home / "run", "--topology", home / "cased.arpa", "--samples", "500")
    cased = ("--capitalize", home / "cap.arpa")
    bare, both = home / "cased_alone.arpa", home / "cased_both.arpa"
    dlm(*args, *cased, "-o", bare, status=0)
    done = dlm(*args, *cased, "-o", both, "--unigrams", counts, status=0)
    assert "7 words got the frequencies of the counts; 1 of them are new" in done.stderr
    models = [DictModel.from_arpa(path) for path in (bare, both)]
    plain = DictModel.from_arpa(home / "cap.arpa")
    prob = [
        {m.vocabulary.words[n[0]].decode(): 10.0 ** float(p) for n, (p, _) in m.ngrams.items()
         if len(n) == 1}
        for m in (*models, plain)
    ]  # fmt: skip
    assert prob[0].keys() == {*CASED, "<s>", "</s>", "<unk>"}
    assert prob[1].keys() == {*prob[0], "rare"}
    assert worst_sum(models[0]) < 3e-6
    assert worst_sum(models[1]) < 3e-6
    room = sum(prob[0][word] for word in CASED)
    share = prob[2]["Beta"] / (prob[2]["Beta"] + prob[2]["beta"])
    assert prob[1]["Beta"] == pytest.approx(room * share * 8 / 16, rel=1e-4)
    assert prob[1]["rare"] == pytest.approx(room * 4 / 16, rel=1e-4)
    with ArpaReader(both) as reader:
        made, record = reader.comments
    facts = json.loads(made.partition(": ")[2])
    assert [part["as"] for part in facts["inputs"]] == [
        "network", "topology", "capitaliser", "unigrams",
    ]  # fmt: skip
    carried = Provenance.from_json(record)
    assert set(carried.ledgers) == {"a" * 64, *NetworkSource(home / "run").record.ledgers}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --samples"),
        (["--samples", "5", "--unigram-weight", "0"], "above 0 and at most 1"),
        (["--samples", "5", "--capitalize", "none.arpa"], "none.arpa"),
    ],
)
def test_what_a_network_cannot_be_asked_is_refused(
    home: Path, options: list[str], message: str
) -> None:
    """And nothing is written."""
    done = dlm(
        "distill", home / "run", "--topology", home / "top.arpa", "-o", home / "no", *options
    )
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert not (home / "no").exists()


def test_a_checkpoint_of_something_else_is_no_network(home: Path) -> None:
    """Counts where a run's checkpoint is expected."""
    work, wrong = home / "counted", home / "wrong"
    args = ("distill", home / "run", "--topology", home / "top.arpa", "--samples", 5)
    assert dlm(*args, "--work", work).exit_code == 0
    wrong.mkdir()
    (work / COUNTS).rename(wrong / CHECKPOINT)
    for asked in (("distill", wrong, *args[2:], "-o", home / "no"), ("evaluate", wrong, "--text")):
        done = dlm(*asked, *([home / "words.txt"] if asked[0] == "evaluate" else []))
        assert isinstance(done.exception, FormatError), done.exception
        assert "does not contain a network from dlm federate" in str(done.exception)
