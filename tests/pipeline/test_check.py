"""What would stop a pipeline, or leave its model without a guarantee, is said before users are
counted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")
pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")

from dlm.errors import ArpaError, ConfigError, DlmError, FormatError, PrivacyError
from dlm.index.ngrams import read_raw
from dlm.kenlm.open import open_ngrams
from dlm.kenlm.write import write_probing
from dlm.pipeline.check import check, check_users, voids
from dlm.pipeline.settings import PipelineSettings
from dlm.record.provenance import Provenance
from dlm.record.sidecar import write_recorded
from estimate.merge_models import normalised_model
from pipeline.runs import WORDS, people

Change = Callable[[str], str]


def swap(old: str, new: str) -> Change:
    """A change of the configuration."""

    def change(text: str) -> str:
        assert old in text, old
        return text.replace(old, new)

    return change


def topology(name: str) -> Change:
    """The configuration with a topology in place of public text."""

    def change(text: str) -> str:
        text = text.replace("[estimate]\ndiscount_fallback = true\n", "")
        return text.replace('text = "public.txt"', f'topology = "{name}"')

    return change


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users, words, public text and a configuration; and inputs that are wrong."""
    folder = people(tmp_path_factory.mktemp("check") / "home", seed="")
    raw = Provenance.none("users were counted without noise")
    content = (folder / "public.txt").read_bytes()
    write_recorded(folder / "of_users.txt", content, raw, digest_name="text_sha256")
    (folder / "upper.txt").write_bytes(content.upper())
    os.mkfifo(folder / "pipe")
    normalised_model(1, WORDS, order=3).write(folder / "good.arpa")
    with open_ngrams(folder / "good.arpa") as reader:
        orders = read_raw(reader)
        write_probing(folder / "good.binary", reader.vocabulary, orders)
    arpa = (folder / "good.arpa").read_text()
    (folder / "raw.arpa").write_text(f"# {raw.line}\n{arpa}")
    (folder / "edited.arpa").write_text(f"# {raw.line.replace('without', 'with')}\n{arpa}")
    (folder / "cut.arpa").write_text(arpa[: len(arpa) // 2])
    normalised_model(1, ["other", "words"], order=2).write(folder / "other.arpa")
    return folder


def settings(home: Path, change: Change) -> PipelineSettings:
    """The configuration with a change."""
    text = (home / "p.toml").read_text()
    (home / "changed.toml").write_text(change(text))
    return PipelineSettings.read(home / "changed.toml")


TEXT = 'text = "public.txt"'


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (swap("samples = 300", "samples = inf"), ConfigError, "distill.samples is inf"),
        (swap("samples = 300", "prior = inf"), ConfigError, "distill.prior is inf"),
        (swap("multiplier = 2.0", "multiplier = nan"), ConfigError, "noise_multiplier is nan"),
        (swap('"-,-,40"', '"-,40"'), ConfigError, "has numbers for 2 orders, but .* have 3"),
        (swap('folder = "out"', 'folder = "out"\nmemory = "9"'), ConfigError, "memory is '9'"),
        (swap("hidden_size = 16", "layers = 100000000000"), ConfigError, "layers is 1000"),
        (swap('mechanism = "tree"', 'mechanism = "trea"'), DlmError, "trea"),
        (swap(TEXT, 'text = "users.tsv"'), PrivacyError, "users' text is not public"),
        (swap('"held_out.tsv"', '"users.tsv"'), ConfigError, "it has not learned from"),
        (swap(TEXT, 'text = "of_users.txt"'), PrivacyError, "says that .* comes from users"),
        (swap(TEXT, 'text = "upper.txt"'), ConfigError, "none of the words of inputs.wordlist"),
        (swap(TEXT, 'text = "/"'), ConfigError, "is a folder, a pipe or a device; give a file"),
        (swap('"users.tsv"', '"pipe"'), ConfigError, "users: .* is a folder, a pipe or a device"),
        (topology("edited.arpa"), PrivacyError, "edited.arpa was changed after"),
        (topology("cut.arpa"), ArpaError, "truncated"),
        (topology("other.arpa"), ConfigError, "none of the words of inputs.wordlist"),
        (
            swap("[unigrams]", 'user_column = "id"\n[unigrams]'),
            FormatError,
            "'id' exactly once",
        ),
        (swap('public = "the tests"', ""), PrivacyError, r"set \[inputs\] public to the name"),
    ],
)
def test_what_cannot_end_well_is_refused_before_users_are_counted(
    home: Path, change: Change, error: type[Exception], said: str
) -> None:
    """With what to do; and no folder is made."""
    with pytest.raises(error, match=said):
        check(settings(home, change))
    assert not (home / "out").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (swap("report_goal = 40", "report_goal = 0"), "[unigrams]"),
        (swap('folder = "out"', 'folder = "out"\nmemory = "x"'), "[run]"),
        (swap('ngrams = "-,-,40"', 'bytes = "x"'), "[prune]"),
        (swap("[unigrams]", 'user_column = "id"\n[unigrams]'), "[inputs]"),
        (swap("clip_norm = 0.5", "clip_norm = 1e-99"), "[federate.privacy]"),
        (swap("samples = 300", "samples = inf"), ""),
    ],
)
def test_an_error_names_the_table_of_its_settings(home: Path, change: Change, named: str) -> None:
    """Also one that commands share, which knows their options alone; once."""
    with pytest.raises(DlmError) as raised:
        check(settings(home, change))
    notes = getattr(raised.value, "__notes__", [])
    if f"{named.strip('[]')}." in str(raised.value):
        named = ""
    assert [named in note for note in notes] == [True] * bool(named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (swap("report_goal = 40", "report_goal = 1800"), "[unigrams] report_goal"),
        (swap("report_goal = 20", "report_goal = 300"), "[federate.sampling] report_goal"),
    ],
)
def test_rounds_that_users_cannot_fill_are_refused(home: Path, change: Change, named: str) -> None:
    """By the check alone, with the settings to change."""
    assert check_users(settings(home, lambda text: text)) == 170
    with pytest.raises(ConfigError, match="170 users") as raised:
        check_users(settings(home, change))
    assert any(named in note for note in raised.value.__notes__)


def test_a_topology_without_a_guarantee_is_told_of_at_once(home: Path) -> None:
    """Whoever vouches: its record speaks for itself. A KenLM file has none."""
    for name, told in (("good.arpa", []), ("good.binary", []), ("raw.arpa", ["without noise"])):
        given = settings(home, topology(name))
        check(given)
        found = voids(given)
        assert len(found) == len(told)
        assert all(part in reason for part, reason in zip(told, found, strict=True))


def test_an_error_shows_no_line_of_users(home: Path) -> None:
    """A file without a header begins with what somebody said."""
    rows = (home / "users.tsv").read_text().partition("\n")[2]
    (home / "headless.tsv").write_text(rows)
    with pytest.raises(FormatError) as raised:
        check(settings(home, swap('"users.tsv"', '"headless.tsv"')))
    assert "expected a header" in str(raised.value)
    assert rows.split("\t")[1].split()[0] not in str(raised.value)
    assert "user000" not in str(raised.value)
