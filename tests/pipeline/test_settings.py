"""The configuration of a pipeline: what is refused, and what it means where nothing is said."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")

from dlm.errors import ConfigError, DlmError
from dlm.pipeline.run import Pipeline, as_settings
from dlm.pipeline.settings import PipelineSettings

CONFIG = """
[run]
folder = "out"
[inputs]
users = "users.tsv"
wordlist = "words.txt"
text = "public.txt"
public = "the tests"
[unigrams]
noise_multiplier = 1
[federate.run]
rounds = 4
[federate.privacy]
clip_norm = 0.5
mechanism = "tree"
noise_multiplier = 2.0
"""


def read(folder: Path, text: str = CONFIG) -> PipelineSettings:
    """The settings of such a file."""
    (folder / "p.toml").write_text(text)
    return PipelineSettings.read(folder / "p.toml")


def test_what_is_not_said_has_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are of the file's folder; the stages agree on words; the environment says nothing."""
    monkeypatch.setenv("DLM_FEDERATE_RUN_ROUNDS", "99")
    found = read(tmp_path)
    assert found.run.folder == tmp_path / "out"
    assert found.inputs.users == tmp_path / "users.tsv"
    assert found.unigrams is not None
    assert (found.unigrams.clip, found.unigrams.max_participations, found.unigrams.delta) == (
        100,
        1,
        1e-6,
    )
    assert found.unigrams.released
    assert found.federate.run.rounds == 4
    assert found.federate.data.vocabulary == tmp_path / "out/counts.tsv"
    assert found.federate.data.tokenizer == found.unigrams.tokenizer == "words"
    assert found.prune is None
    names = [stage.name for stage in Pipeline(found).stages]
    assert names == ["estimate", "unigrams", "federate", "distill", "shard"]


def test_stages_are_those_that_are_asked_for(tmp_path: Path) -> None:
    """A vocabulary and a topology that are given need none; pruning and held-out users add one."""
    text = CONFIG.replace("wordlist", "vocabulary").replace("text =", "topology =")
    text = text.replace("[unigrams]\nnoise_multiplier = 1\n", "")
    text = text.replace(
        "[federate.run]", 'held_out = "h.tsv"\n[prune]\nngrams = 10\n[federate.run]'
    )
    found = read(tmp_path, text)
    assert found.prune is not None
    assert found.prune.goal.ngrams == 10
    assert found.federate.data.public == "the tests"
    names = [stage.name for stage in Pipeline(found).stages]
    assert names == ["federate", "distill", "prune", "measure", "shard"]


def test_wordpieces_stand_between_words_and_the_network(tmp_path: Path) -> None:
    """Made of counts that were made here or given; a given inventory needs no stage. What has a
    record is not vouched for, although other inputs are."""
    pieces = "[pieces]\nsize = 40\n[federate.run]"
    found = read(tmp_path, CONFIG.replace("[federate.run]", pieces))
    stages = Pipeline(found).stages
    assert [s.name for s in stages][:4] == ["estimate", "unigrams", "pieces", "federate"]
    assert stages[2].plan.reads["the counts"] == stages[1].plan.writes[0]
    assert stages[3].plan.reads["the vocabulary"] == stages[2].plan.writes[0]
    assert found.federate.data.vocabulary == tmp_path / "out/pieces.model"
    assert found.federate.data.public == ""
    given = CONFIG.replace("[unigrams]\nnoise_multiplier = 1\n", "")
    counts = given.replace('wordlist = "words.txt"', 'vocabulary = "counts.tsv"')
    assert read(tmp_path, counts).federate.data.public == "the tests"
    with_pieces = read(tmp_path, counts.replace("[federate.run]", pieces))
    assert Pipeline(with_pieces).stages[1].plan.settings["public"] == "the tests"
    (tmp_path / "counts.tsv.provenance.json").write_text("{}")
    assert read(tmp_path, counts).federate.data.public == ""
    with_pieces = read(tmp_path, counts.replace("[federate.run]", pieces))
    assert Pipeline(with_pieces).stages[1].plan.settings["public"] == ""
    given = given.replace('wordlist = "words.txt"', 'vocabulary = "mine.model"')
    names = [stage.name for stage in Pipeline(read(tmp_path, given)).stages]
    assert names == ["estimate", "federate", "distill", "shard"]
    with pytest.raises(ConfigError, match="already has wordpieces"):
        read(tmp_path, given.replace("[federate.run]", pieces))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[unigrams]", "[unigram]", r"unknown table \[unigram\] \(did you mean unigrams\?\)"),
        ("noise_multiplier = 1\n", "noise_multiplyer = 1\n", "did you mean noise_multiplier"),
        (
            "clip_norm",
            "clipnorm",
            r"\[federate.privacy\] does not have a setting named clipnorm \(did you",
        ),
        ('users = "users.tsv"', "", r"\[inputs\] lacks users"),
        ('folder = "out"', "", r"\[run\] lacks folder"),
        ('folder = "out"', 'folder = "out"\nseed = "x"', "run.seed is 'x'"),
        ('folder = "out"', 'folder = "a\\u0000b"', "run.folder is 'a.x00b'; .* NUL"),
        ('text = "public.txt"', "", "either text or topology"),
        ('text = "', 'topology = "t"\ntext = "', "either text or topology"),
        ("[federate.run]", "[pieces]\n[federate.run]", r"\[pieces\] lacks size"),
        ("[federate.run]", "[pieces]\nsize = 3\n[federate.run]", "pieces.size is 3"),
        (
            "[federate.run]",
            "[pieces]\nsize = 9\n[federate.data]\nvocabulary_size = 5\n[federate.run]",
            "wordpieces, all of which are used",
        ),
        ("[federate.run]", '[federate.data]\nvocabulary = "x"\n[federate.run]', "wordlist; leave"),
        ("rounds = 4", "rounds = 4\nseed = 3", r"\[run\] seed; leave it out"),
        ("rounds = 4\n", "", r"\[federate.run\] lacks rounds"),
        ("[federate.run]", "[prune]\n[federate.run]", "give one of --threshold"),
        (
            "[federate.run]",
            "[prune]\nngrams = 0\n[federate.run]",
            "prune.ngrams is 0",
        ),
        (
            "[federate.run]",
            "[shard]\nshards = 0\n[federate.run]",
            "shard.shards is 0",
        ),
        ("noise_multiplier = 1\n", "noise_multiplier = 1\nseed = 3\n", r"\[run\] seed; leave it"),
        ("[federate.run]", "[shard]\nbits = 6\n[federate.run]", "--encoding compact"),
        ("[federate.run]", "[distill]\nsamples = 0\n[federate.run]", "1 to 1e"),
        ("[federate.run]", '[estimate]\nprune = "x"\n[federate.run]', "estimate.prune is 'x'"),
        ("noise_multiplier = 1\n", "noise_multiplier = 1\nlambda = inf\n", "lambda is finite"),
        ("noise_multiplier = 1\n", "lambda = true\n", "unigrams.lambda is True"),
        ("noise_multiplier = 1\n", "delta = 0.1\n", "both --noise-multiplier and --delta"),
        ('public = "the tests"', 'tokenizer = "letters"', "words or whitespace"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    """With the table, and with what was perhaps meant."""
    assert old in CONFIG
    with pytest.raises(DlmError, match=message):
        read(tmp_path, CONFIG.replace(old, new))


@pytest.mark.parametrize(
    ("change", "message"),
    [("federate = 1\n{}", "federate is 1"), ("{}[federate]\nrun = 1\n", "federate.run is 1")],
)
def test_a_value_in_place_of_tables_is_refused(tmp_path: Path, change: str, message: str) -> None:
    """At every depth."""
    with pytest.raises(ConfigError, match=f"{message}; expected a table"):
        read(tmp_path, change.format(CONFIG.partition("[federate.run]")[0]))


def test_redo_names_a_stage(tmp_path: Path) -> None:
    """One of this pipeline."""
    with pytest.raises(ConfigError, match="did you mean distill"):
        Pipeline(read(tmp_path), ["distil"])


def test_the_example_reads_and_names_no_unknown_setting(tmp_path: Path) -> None:
    """The file beside the page: each of its stages."""
    example = Path(__file__).parents[2] / "dlm/pipeline/example.toml"
    found = read(tmp_path, example.read_text())
    tables = tomllib.loads(example.read_text())
    assert found.run.seed is None
    assert {"run", "inputs", "unigrams", "federate", "estimate", "prune", "shard"} < set(tables)
    assert len(Pipeline(found).stages) == 7


def test_an_option_that_an_error_advises_is_named_as_a_setting(tmp_path: Path) -> None:
    """Where the stage has one; what no stage has stays as it is."""
    (estimate, *_) = Pipeline(read(tmp_path)).stages
    said = "remove lines, or pass --discount-fallback; raise --memory; see --tmp"
    assert as_settings(said, estimate.plan) == [
        "in the configuration, --discount-fallback is discount_fallback in [estimate]",
        "in the configuration, --memory is memory in [run]",
    ]
