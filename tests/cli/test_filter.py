"""`dlm filter`: what it writes and prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlm.cli.prune import filter_
from dlm.errors import ConfigError
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.backoff import DictModel
from estimate.merge_models import normalised_model, worst_sum


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that sums to 1, and a list of words beside it."""
    (tmp_path / "words.txt").write_text("w1 w2\nw5 absent\n")
    path = normalised_model(1, [f"w{i}" for i in range(9)]).write(tmp_path / "model.arpa")
    path.write_text("# provenance: {}\n" + path.read_text())
    return path


@pytest.mark.parametrize("renormalise", [False, True])
def test_the_output_has_the_counts_that_are_told_and_where_it_is_from(
    renormalise: bool, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compressed by its name; the provenance of the input stays, a line is added."""
    output = model.with_name("out.arpa.zst")
    filter_(model, model.with_name("words.txt"), output, renormalise=renormalise)
    oracle = DictModel.from_arpa(output)
    told = capsys.readouterr().out.splitlines()
    with ArpaReader(output) as reader:
        first, second = reader.comments
        counts = [f"order {k}: kept {n:,} of " for k, n in enumerate(reader.counts, 1)]
    assert [line[: len(count)] for line, count in zip(told, counts, strict=False)] == counts
    assert told[-1].startswith("not in the model: 1 word of ")
    assert first == "provenance: {}"
    about = json.loads(second.removeprefix("provenance: "))
    assert about["from"] == "model.arpa"
    assert about["renormalised"] is renormalise
    assert (worst_sum(oracle) < 1e-6) is renormalise


def test_options_that_do_not_go_together_are_refused(model: Path) -> None:
    """And a limit that is too low, before the model is read."""
    words, output = model.with_name("words.txt"), model.with_name("out.arpa")
    for options, message in (
        ({"contexts": True, "renormalise": True}, "Give one of the two"),
        ({"memory": 1 << 30}, "--memory applies only with --renormalise"),
        ({"memory": 1024, "renormalise": True}, "the limit is 1,024; raise --memory"),
    ):
        with pytest.raises(ConfigError, match=message):
            filter_(model, words, output, **options)  # type: ignore[arg-type]
    assert not output.exists()
