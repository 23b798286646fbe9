"""`dlm wer`, as users run it, and options of `dlm transcribe` that need no package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Run

SAID = "file\tspeaker\ttext\na.flac\tx\tThe man is there.\nb.flac\ty\tA dog, a cat\n"
HEARD = "b.flac\ta dog cat\na.flac\tthe man was there now\n"
BETTER = "a.flac\tthe man is there\nb.flac\ta dog cat\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """References and two hypotheses."""
    (tmp_path / "said.tsv").write_text(SAID)
    (tmp_path / "heard.tsv").write_text(HEARD)
    (tmp_path / "better.tsv").write_text(BETTER)
    return tmp_path


def test_rates_intervals_and_speakers_are_printed(run: Run, folder: Path) -> None:
    """A row each, columns parted by tabs."""
    done = run("wer", "said.tsv", "heard.tsv", "--by-speaker", cwd=folder, status=0)
    assert done.stdout.decode().splitlines() == [
        "WER\t37.50 %\t3 errors in 8 words: 1 substituted, 1 deleted, 1 inserted",
        "95 %\t25.00 to 50.00\tby 2 speakers; the interval is too narrow with fewer than 5",
        "x\t50.00 %\t4 words",
        "y\t25.00 %\t4 words",
    ]


def test_the_difference_from_another_is_paired(run: Run, folder: Path) -> None:
    """It is HYP's place to be better."""
    done = run("wer", "said.tsv", "better.tsv", "--against", "heard.tsv", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["wer"], facts["against"]["wer"]) == (0.125, 0.375)
    assert facts["difference"] == {"value": -0.25, "low": -0.5, "high": 0.0}


def test_alignments_show_what_was_said_and_heard(run: Run, folder: Path) -> None:
    """Below each other; utterances without errors are left out."""
    done = run("wer", "said.tsv", "better.tsv", "--alignments", cwd=folder)
    assert done.stdout.decode().splitlines()[-4:] == [
        "b.flac",
        "said  a dog a cat",
        "heard a dog * cat",
        "            D",
    ]


def test_exact_words_differ_in_case_and_punctuation(run: Run, folder: Path) -> None:
    """As they stand in the files."""
    done = run("wer", "said.tsv", "better.tsv", "--exact", "--json", cwd=folder)
    assert json.loads(done.stdout)["substitutions"] == 4


@pytest.mark.parametrize(
    ("rules", "wrong"),
    [
        ("a dog => the dog\nThe man => a man ;; both\n", 3),
        (";; NIST's form\n* name x\n[a dog a] => [a dog] / [ ] __ [ ]\ncat => \n", 2),
        ("a => b\na => a dog\n", None),
        ("a => {b / c}\n", None),
        ("a => b => c\n", None),
        ("a => b / x __ [ ]\n", None),
        ("* only a heading\n", None),
    ],
)
def test_spellings_of_a_map_count_as_equal(
    run: Run, folder: Path, rules: str, wrong: int | None
) -> None:
    """In the reference as in what was heard; a rule of another form is refused with its place."""
    (folder / "map").write_text(rules)
    done = run("wer", "said.tsv", "heard.tsv", "--map", "map", "--json", cwd=folder)
    if wrong is None:
        assert done.returncode == 1 and b"map" in done.stderr and done.stdout == b""
    else:
        facts = json.loads(done.stdout)
        assert sum(facts[kind] for kind in ("substitutions", "deletions", "insertions")) == wrong


def test_what_does_not_fit_is_an_error_that_says_where(run: Run, folder: Path) -> None:
    """One line, and status 1."""
    (folder / "part.tsv").write_text("a.flac\tthe man\n")
    done = run("wer", "said.tsv", "part.tsv", cwd=folder, status=1)
    assert done.stderr.decode() == (
        "dlm: 1 of 2 utterances of the reference, such as 'b.flac', have no hypothesis; expected "
        "one for each (or pass --subset)\n"
    )


def test_one_utterance_has_no_interval_and_the_output_says_so(run: Run, folder: Path) -> None:
    """Nor has its difference from another recogniser."""
    (folder / "part.tsv").write_text("a.flac\tthe man\n")
    done = run("wer", "said.tsv", "part.tsv", "--subset", "--against", "heard.tsv", cwd=folder)
    assert done.returncode == 0, done.stderr
    intervals = [row for row in done.stdout.decode().splitlines() if row.startswith("95 %")]
    assert intervals == [
        "95 %\tundefined\tby 1 speaker; an interval needs at least 2",
        "95 %\tundefined\tby 1 speaker, paired; an interval needs at least 2",
    ]


@pytest.mark.parametrize("other", [(), ("--against", "heard.tsv")])
def test_a_subset_is_scored_where_it_is_asked_for(
    run: Run, folder: Path, other: tuple[str, ...]
) -> None:
    """Both recognisers on the same utterances; what is left out is counted."""
    (folder / "part.tsv").write_text("a.flac\tthe man\n")
    done = run("wer", "said.tsv", "part.tsv", "--subset", *other, cwd=folder, status=0)
    assert done.stdout.decode().splitlines()[:2] == [
        "WER\t50.00 %\t2 errors in 4 words: 0 substituted, 2 deleted, 0 inserted",
        "scored\t1 of 2 utterances",
    ]
    assert (b"against\t50.00 %" in done.stdout) == bool(other)


def test_a_subset_of_nothing_is_an_error(run: Run, folder: Path) -> None:
    """Of the hypotheses, or between two recognisers."""
    for name, text in (("a", "a.flac\tthe man\n"), ("b", "b.flac\ta dog\n"), ("c", "c\tx\n")):
        (folder / name).write_text(text)
    for others in (["c"], ["a", "--against", "b"]):
        done = run("wer", "said.tsv", *others, "--subset", cwd=folder)
        assert (done.returncode, done.stdout) == (1, b""), done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--hypotheses", 0), "--hypotheses is 0; expected 1 or more"),
        (("--nbest", 2), "--nbest is 2, but only --json prints more"),
        (("--deadline", 0), "deadline"),
        (("tab\there.wav",), r"AUDIO is 'tab\there.wav', which contains a tab or a line break"),
    ],
)
def test_settings_of_transcribe_are_checked_before_anything_is_opened(
    run: Run, folder: Path, options: tuple[object, ...], says: str
) -> None:
    """With the setting's name."""
    pytest.importorskip("soundfile", reason="pip install -e '.[asr]'")
    for name in ("a.wav", "tab\there.wav"):
        (folder / name).touch()
    done = run("transcribe", "a.wav", "--lm", "none.arpa", *options, cwd=folder, status=1)
    assert says in done.stderr.decode()
    assert b"Traceback" not in done.stderr
