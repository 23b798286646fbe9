"""Commands take a KenLM file wherever they take an ARPA file; `dlm export` turns it back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.conftest import Run
from dlm.ngram.backoff import DictModel

GOLDEN = Path(__file__).parents[1] / "kenlm_files/golden"
BINARIES = ["demo.probing.binary", "demo.array.binary"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in three files, a text and a list of its words."""
    place = tmp_path_factory.mktemp("kenlm")
    for name in ("demo.arpa", "demo.probing-v.binary", *BINARIES):
        shutil.copy(GOLDEN / name, place / name)
    (place / "text.txt").write_text("the old man sat by the sea\nshe put the letter down\n")
    (place / "words.txt").write_text("the old man sat by the sea of rain\n")
    return place


def by_words(arpa: Path) -> dict[tuple[bytes, ...], tuple[float, float]]:
    """The n-grams of an ARPA file by their words."""
    model = DictModel.from_arpa(arpa)
    words = model.vocabulary.words
    return {
        tuple(words[i] for i in ids): (float(p), float(b)) for ids, (p, b) in model.ngrams.items()
    }


COMMANDS = {  # alternately of hash tables and of a trie
    "prune": ["prune", "MODEL", "--threshold", "1e-4", "--text", "text.txt", "--output", "OUT"],
    "reduce": ["reduce", "MODEL", "--order", "2", "--output", "OUT"],
    "filter": ["filter", "MODEL", "--vocab", "words.txt", "--output", "OUT"],
    "renormalise": ["filter", "MODEL", "--vocab", "words.txt", "--renormalise", "-o", "OUT"],
    "merge": ["merge", "MODEL", "demo.arpa", "--weights", "0.3,0.7", "--output", "OUT"],
    "distill": ["distill", "MODEL", "--topology", "MODEL", "--output", "OUT"],
}


@pytest.mark.promise("kenlm_ngrams")
@pytest.mark.parametrize(
    ("command", "model"),
    [
        pytest.param(*row, marks=() if row[0] == "prune" else pytest.mark.slow)
        for row in zip(COMMANDS, BINARIES * 3, strict=True)
    ],
)
def test_a_command_makes_the_same_of_a_kenlm_file(
    command: str, model: str, home: Path, run: Run, tmp_path: Path
) -> None:
    """The same n-grams as of the ARPA file; values up to the order in which sums are taken."""
    found = []
    for name in ("demo.arpa", model):
        output = tmp_path / f"{name}.out.arpa"
        places = {"MODEL": name, "OUT": str(output)}
        run(*(places.get(word, word) for word in COMMANDS[command]), cwd=home, status=0)
        found.append(by_words(output))
    wanted, ours = found
    assert ours.keys() == wanted.keys()
    for ngram, values in wanted.items():
        assert ours[ngram] == pytest.approx(values, abs=1e-5)


@pytest.mark.promise("kenlm_ngrams")
@pytest.mark.parametrize("model", [pytest.param(BINARIES[0], marks=pytest.mark.slow), BINARIES[1]])
def test_a_shard_set_of_a_kenlm_file_is_that_of_its_ngrams(
    model: str, home: Path, run: Run, tmp_path: Path
) -> None:
    """It equals both files n-gram for n-gram; its provenance says where it is from."""
    run("shard", model, "--shards", 2, "--output", tmp_path / "set", cwd=home, status=0)
    for arpa in ("demo.arpa", model):
        run("verify", tmp_path / "set", "--arpa", arpa, cwd=home, status=0)
    facts = json.loads(run("info", "--json", tmp_path / "set").stdout)
    assert facts["provenance"]["file_bytes"] == (home / model).stat().st_size
    (line,) = facts["provenance"]["comments"]
    assert model in line
    assert run("shard", model, "--estimate", cwd=home).returncode == 0


@pytest.mark.parametrize("model", [*BINARIES, "demo.probing-v.binary"])
def test_export_writes_the_ngrams_of_a_kenlm_file(
    model: str, home: Path, run: Run, tmp_path: Path
) -> None:
    """Compressed by the name, to standard output, and with the words that a file lacks."""
    words = []
    if "-v" in model:
        refused = run("export", model, cwd=home, status=1)
        assert b"--vocab" in refused.stderr
        listed = tmp_path / "all.txt"
        listed.write_bytes(b"\n".join(n[0] for n in by_words(home / "demo.arpa") if len(n) == 1))
        words = ["--vocab", listed]
    run("export", model, "--output", tmp_path / "out.arpa.zst", *words, cwd=home, status=0)
    assert by_words(tmp_path / "out.arpa.zst") == by_words(home / "demo.arpa")
    printed = run("export", model, *words, cwd=home)
    (tmp_path / "printed.arpa").write_bytes(printed.stdout)
    assert by_words(tmp_path / "printed.arpa") == by_words(home / "demo.arpa")
    assert run("export", model, "-o", tmp_path / "out.arpa.zst", cwd=home).returncode == 1


def test_info_shows_the_header_of_a_kenlm_file(home: Path, run: Run) -> None:
    """Its type, counts, words and size; options of shard sets are refused. `dlm verify` says what
    checks such a file."""
    facts = json.loads(run("info", "--json", "demo.probing-v.binary", cwd=home).stdout)
    assert facts["type"] == "probing"
    assert facts["counts"] == [175, 322, 328]
    assert facts["words_stored"] is False
    assert b"quantised" in run("info", GOLDEN / "demo.quant.binary").stdout
    assert run("info", "--helm", "demo.array.binary", cwd=home).returncode == 1
    refused = run("verify", "demo.array.binary", cwd=home, status=1)
    assert b"dlm export demo.array.binary" in refused.stderr
    assert run("export", home, "--vocab", "words.txt", cwd=home).returncode == 1


def test_export_writes_a_probing_file(home: Path, run: Run, tmp_path: Path) -> None:
    """Of an ARPA file that of build_binary; of a set and of a trie the same n-grams. A record that
    it cannot carry is said to stay behind."""
    assert run("shard", "demo.arpa", "--output", tmp_path / "set", cwd=home).returncode == 0
    for model in ("demo.arpa", tmp_path / "set", "demo.array.binary"):
        output = tmp_path / "out.binary"
        done = run("export", model, "--format", "probing", "-o", output, "--force", cwd=home)
        assert done.returncode == 0, done.stderr
        assert b"privacy record" not in done.stderr
        if model == "demo.arpa":
            assert output.read_bytes() == (GOLDEN / "demo.probing.binary").read_bytes()
        assert run("export", output, "-o", tmp_path / "back.arpa", "--force").returncode == 0
        assert by_words(tmp_path / "back.arpa") == by_words(home / "demo.arpa")
    text = (home / "demo.arpa").read_text()
    (tmp_path / "private.arpa").write_text(f'# privacy: {{"format": "x"}}\n{text}')
    done = run("export", tmp_path / "private.arpa", "--format", "probing", "-o", tmp_path / "x")
    assert b"privacy record" in done.stderr
    assert run("export", "demo.arpa", "--format", "probing", cwd=home).returncode == 1
    listed = ("--format", "probing", "--vocab", "words.txt", "-o", "x")
    assert run("export", "demo.arpa", *listed, cwd=home).returncode == 1
    assert run("export", "demo.arpa", "--format", "trie", "-o", "x", cwd=home).returncode == 1


def test_a_model_that_exceeds_the_memory_is_not_exported_as_a_probing_file(
    home: Path, run: Run, tmp_path: Path
) -> None:
    """Whatever holds it; before its n-grams are read. The error names their number."""
    assert run("shard", "demo.arpa", "--output", tmp_path / "set", cwd=home).returncode == 0
    probing = ("--format", "probing", "-o", tmp_path / "out.binary")
    for model in ("demo.arpa", tmp_path / "set", "demo.array.binary"):
        done = run("export", model, *probing, "--memory", "100K", cwd=home, status=1)
        assert b" 825 n-grams" in done.stderr
        assert not (tmp_path / "out.binary").exists()
        assert (
            run("export", model, *probing, "--memory", "110K", "--force", cwd=home).returncode == 0
        )
        (tmp_path / "out.binary").unlink()
