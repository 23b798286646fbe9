"""`dlm pieces`: wordpieces from counts, with what protects those who were counted. `--pieces`: a
model over the pieces of any SentencePiece model."""

from __future__ import annotations

import io
import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("sentencepiece", reason="pip install -e '.[train]'")

import sentencepiece

from dlm.cli.main import app
from dlm.errors import ConfigError, EstimationError, FormatError, PrivacyError
from dlm.federated.pieces.inventory import Inventory
from dlm.record.counts_file import WordCounts, read_counts, write_counts
from dlm.record.provenance import Guarantee, Provenance, file_digest

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
WORDS = [
    stem + end
    for stem in ("walk", "talk", "nation", "read")
    for end in ("", "s", "ed", "ing", "ness")
]
GOOD = Provenance(Guarantee(1.0, 1e-6, 0.1), stages=({"stage": "unigrams"},))


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    """Counts without a record."""
    path = tmp_path / "counts.tsv"
    path.write_text("".join(f"{word}\t{100 / (i + 1)}\n" for i, word in enumerate(WORDS)))
    return path


def pieces(counts: Path, *more: str, output: str = "out.model") -> Result:
    """The command, in this process."""
    out = str(counts.parent / output)
    return CliRunner().invoke(app, ["pieces", str(counts), "--output", out, *more])


@pytest.mark.parametrize(
    ("record", "flags", "said"),
    [
        (
            GOOD,
            (),
            "(epsilon = 1, delta = 1e-06)-differential privacy, 0.1-zCDP for each user who took "
            "part. Unverified: ",
        ),
        (Provenance.none("no noise"), (), "NO GUARANTEE: no noise."),
        (None, (), "NO GUARANTEE: no provenance record stood beside the counts."),
        (
            None,
            ("--public-attested-by", "ACME"),
            "Public: no user's text is in it. The counts counts.tsv ",
        ),
    ],
)
def test_an_inventory_says_what_its_counts_are_worth(
    counts: Path, record: Provenance | None, flags: tuple[str, ...], said: str
) -> None:
    """Noised, raw, unknown and public; every word comes back from its pieces."""
    if record is not None:
        values = 100 / np.arange(1.0, len(WORDS) + 1)
        write_counts(counts, WordCounts(tuple(WORDS), values, record))
    done = pieces(counts, "--size", "36", *flags)
    assert done.exit_code == 0, done.exception
    first, last = done.stdout.splitlines()
    assert first.startswith("36 pieces in ")
    assert last.startswith(said)
    facts = json.loads(pieces(counts, "--size", "36", *flags, "--json", output="j.model").stdout)
    assert (facts["pieces"], facts["privacy"]) == (36, last)
    inventory = Inventory.load(counts.with_name("out.model"))
    assert inventory.size == 36
    assert inventory.decode(inventory.encode(WORDS)) == WORDS
    assert inventory.provenance.statement().startswith(said)
    assert inventory.provenance.derived == ("wordpieces 36",)
    share = (100 / np.arange(1.0, len(WORDS) + 1)).tolist()
    a_word = sum(
        n * len(inventory.encode([word])) for word, n in zip(WORDS, share, strict=True)
    ) / sum(share)
    assert first.endswith(f", {a_word:.2f} per word")


def test_counts_that_a_key_has_signed_make_verified_pieces(counts: Path) -> None:
    """Others are refused: not signed, signed by another key, changed; nothing is written."""
    pytest.importorskip("cryptography", reason="pip install -e '.[train]'")
    from dlm.record.signature import Claim, read_private_key, sign

    keys = {name: counts.with_name(f"{name}.pem") for name in ("mine", "theirs")}
    for key in keys.values():
        for line in (
            f"openssl genpkey -algorithm ed25519 -out {key}",
            f"openssl pkey -in {key} -pubout -out {key.with_suffix('.pub')}",
        ):
            subprocess.run(line.split(), check=True, capture_output=True)
    trust = ("--size", "36", "--public-key", str(keys["mine"].with_suffix(".pub")))
    write_counts(counts, WordCounts(tuple(WORDS), np.ones(len(WORDS)), GOOD))
    for name, said in ((None, "unverified: .* is not signed"), ("theirs", "not by the trusted")):
        if name is not None:
            sign(Claim.of(counts), read_private_key(keys[name]), at=NOW)
        done = pieces(counts, *trust)
        assert isinstance(done.exception, PrivacyError)
        assert re.search(said, str(done.exception))
        assert not counts.with_name("out.model").exists()
    sign(Claim.of(counts), read_private_key(keys["mine"]), at=NOW)
    done = pieces(counts, *trust)
    assert done.exit_code == 0, done.exception
    assert "Verified: signed by the key" in done.stdout
    assert Inventory.load(counts.with_name("out.model")).provenance.unverified == ()
    done = pieces(counts, *trust, "--public-attested-by", "ACME")
    assert "comes from users; leave --public-attested-by out" in str(done.exception)
    write_counts(counts, WordCounts(tuple(WORDS), np.full(len(WORDS), 2.0), GOOD))
    assert "wrong: " in str(pieces(counts, *trust).exception)


def test_what_cannot_be_is_refused_with_what_to_do(counts: Path) -> None:
    """Nothing is written."""
    for more, kind, message in (
        (("--size", "36", "--max-length", "0"), ConfigError, "--max-length is 0"),
        (("--size", "36", "--max-length", "513"), ConfigError, "expected 1 to 512"),
        (("--size", str(1 << 40)), EstimationError, "Give a smaller size"),
        (("--size", "3"), ConfigError, "4 or more"),
    ):
        done = pieces(counts, *more)
        assert isinstance(done.exception, kind)
        assert message in str(done.exception)
    done = pieces(counts, "--size", "36", output="out.txt")
    assert "expected a name that ends in .model" in str(done.exception)
    write_counts(counts, WordCounts(tuple(WORDS), np.ones(len(WORDS)), GOOD))
    done = pieces(counts, "--size", "36", "--public-attested-by", "ACME")
    assert "comes from users; leave --public-attested-by out" in str(done.exception)
    counts.with_name("counts.tsv.provenance.json").unlink()
    counts.write_text("no counts\n")
    done = pieces(counts, "--size", "36")
    assert isinstance(done.exception, FormatError)
    assert "line 1" in str(done.exception)
    assert list(counts.parent.iterdir()) == [counts]


def test_an_inventory_never_takes_the_place_of_its_counts(counts: Path) -> None:
    """Nor of a folder; and that none can be put there is found before the work."""
    (counts.parent / "folder.model").mkdir()
    released = counts.rename(counts.with_name("counts.model"))
    write_counts(released, WordCounts(tuple(WORDS), np.ones(len(WORDS)), GOOD))
    before = released.read_bytes()
    counts.with_name("link.model").symlink_to(released)
    for output, message in (
        ("counts.model", "is an input of this command"),
        ("link.model", "is an input of this command"),
        ("folder.model", "is a folder"),
        ("counts.model/x.model", "is not a folder"),
    ):
        done = pieces(released, "--size", "36", output=output)
        assert isinstance(done.exception, ConfigError)
        assert message in str(done.exception)
    assert released.read_bytes() == before
    assert read_counts(released).provenance.guarantee == GOOD.guarantee


@pytest.mark.parametrize("end", [".provenance.json", ".ledger.json", ".privacy.json", ".work"])
def test_counts_of_users_are_not_public_even_where_their_record_is_not_there(
    counts: Path, end: str
) -> None:
    """A count that was stopped before its last file, and a link to counts elsewhere."""
    Path(f"{counts}{end}").write_text("{}")
    link = counts.with_name("link.tsv")
    link.symlink_to(counts)
    for named in (counts, link):
        done = pieces(named, "--size", "36", "--public-attested-by", "ACME")
        assert isinstance(done.exception, ConfigError)
        assert f"counts.tsv{end} says that {named} comes from users" in str(done.exception)


def trained(sentences: list[str], size: int, path: Path) -> sentencepiece.SentencePieceProcessor:
    """A model as recognisers have it, without sentence marks, also written to `path`."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(sentences), model_writer=made, model_type="bpe", vocab_size=size,
        bos_id=-1, eos_id=-1, minloglevel=2,
    )  # fmt: skip
    path.write_bytes(made.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())


def test_a_model_over_pieces_is_that_of_text_cut_before(tmp_path: Path) -> None:
    """It names its pieces; text is cut alike to be scored, empty, faulty and unknown as it is."""
    said = [f"{a} the {b}\t{a}" for a in WORDS for b in WORDS] + ["", "walk  \u65e5\u672c talk"]
    processor = trained(said[:400], 40, tmp_path / "spm.model")
    cut = processor.encode([line.replace("\t", " ") for line in said], out_type=str)
    texts, models = (tmp_path / "whole", tmp_path / "cut"), (tmp_path / "a", tmp_path / "b")
    for text, lines in zip(texts, (said, map(" ".join, cut)), strict=True):
        text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    given = [["--pieces", str(tmp_path / "spm.model")], []]

    def run(command: str, *options: object) -> Result:
        return CliRunner().invoke(app, [command, *map(str, options)])

    for text, model, options in zip(texts, models, given, strict=True):
        done = run("estimate", text, "-n", 3, "-o", model, "--discount-fallback", *options)
        assert done.exit_code == 0, done.exception
    (first, whole), (_, plain) = (m.read_text(encoding="utf-8").split("\n", 1) for m in models)
    assert whole == plain
    about = json.loads(first.removeprefix("# provenance: "))
    assert about["pieces"] == {"model_sha256": file_digest(tmp_path / "spm.model")}
    assert about["text"]["words"] == sum(map(len, cut))
    for command in (("score", "--words", "--local", models[0]), ("perplexity", models[0])):
        found = [run(*command, text, *more) for text, more in zip(texts, given, strict=True)]
        assert found[0].stdout == found[1].stdout
        assert "OOVs:\t0\nTokens:" in found[0].output
    done = run("estimate", texts[0], "-o", models[0], *given[0], "--engine", "spark")
    assert isinstance(done.exception, ConfigError)
    done = run("score", "--pieces", texts[0], texts[0])
    assert f"the SentencePiece model {texts[0]} cannot be read: not a Sent" in str(done.exception)
