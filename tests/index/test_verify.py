"""`verify` passes what the builder makes, and tells each way in which a set can be wrong.

Long, since every rule of the format has its planted violation in the one table here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm.errors import ArpaError, ShardFormatError
from dlm.index import layout
from dlm.index.check.decode import decode
from dlm.index.check.verify import VerifyReport, verify
from dlm.index.packed.low import BLANK, STATE_LENGTH, STORED, key_bits_of, mirrored
from dlm.index.search.local import LocalModel
from models import HAND_MADE, Change, PlainModel, build, changed, random_model, seal, tampered

Files = dict[str, Any]

MODELS = HAND_MADE | {
    f"random {seed}": random_model(seed, order=2 + seed % 5, per_order=50, unk=bool(seed % 3))
    for seed in range(8)
}


def rules(report: VerifyReport) -> set[str]:
    """The names of the rules that are broken."""
    return {violation.rule for violation in report.violations}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_what_the_builder_makes_passes(name: str, shards: int, tmp_path: Path) -> None:
    """Every rule, and the comparison with the ARPA file."""
    folder = build(MODELS[name], tmp_path, shards)
    lines: list[str] = []
    report = verify(folder, arpa=tmp_path / "model.arpa", progress=lines.append)
    assert report.violations == []
    assert report.warnings == []
    assert report.ok
    assert len(lines) == 5


# ------------------------------------------------------------ violations planted in the n-grams

LOW = "low_orders.arrow"
WORDS = "vocabulary.arrow"
SHARD = "shard-0000.arrow"


def first(mask: np.ndarray) -> int:
    """The first place where `mask` holds; there must be one."""
    places = np.flatnonzero(mask)
    assert len(places), "the model has no n-gram to which this change applies"
    return int(places[0])


def level_with(files: Files, depth: int, wanted: Callable[[Any], np.ndarray]) -> tuple[Any, int]:
    """The first level at `depth` of a shard, and place in it, where `wanted` holds."""
    for name, levels in files.items():
        if name.startswith("shard") and wanted(levels[depth]).any():
            return levels[depth], first(wanted(levels[depth]))
    raise AssertionError("no shard has a place to which this change applies")


def set_low(column: str, value: float) -> Change:
    """The first n-gram of `column` that is no blank gets `value`."""

    def change(content: dict[str, Any], files: Files) -> None:
        low = files[LOW]
        blank = (low["pair_flags"] & BLANK) != 0
        low[column][first(~blank) if column.startswith("pair") else 0] = value

    return change


def set_gram(value: float, blank: bool = False) -> Change:
    """The first 3-gram (or blank) of a shard gets the probability `value`."""

    def change(content: dict[str, Any], files: Files) -> None:
        level, at = level_with(files, 0, lambda a: a["blank"] == blank)
        level["log10_prob"][at] = value

    return change


def deep_weight(value: float) -> Change:
    """A node that is no root gets the weight `value`."""

    def change(content: dict[str, Any], files: Files) -> None:
        level, at = level_with(files, 1, lambda a: a["log10_backoff"] != 0)
        level["log10_backoff"][at] = value

    return change


def state_length_of_a_pair(found: Callable[[Any], np.ndarray], value: int) -> Change:
    """The first pair whose state length is so gets another."""

    def change(content: dict[str, Any], files: Files) -> None:
        flags = files[LOW]["pair_flags"]
        at = first(found(flags & STATE_LENGTH))
        flags[at] = (flags[at] & ~np.uint8(STATE_LENGTH)) | value

    return change


def clear_stored(content: dict[str, Any], files: Files) -> None:
    flags = files[LOW]["pair_flags"]
    flags[first(flags & STORED != 0)] &= ~np.uint8(STORED | STATE_LENGTH)


def blank_pair_weight(content: dict[str, Any], files: Files) -> None:
    """Its root has it."""
    flags = files[LOW]["pair_flags"]
    roots = [levels[0] for name, levels in files.items() if name.startswith("shard")]
    level = next(root for root in roots if (flags[root["key"]] & BLANK != 0).any())
    level["log10_backoff"][first(flags[level["key"]] & BLANK != 0)] = -0.5


def blank_made_ngram(content: dict[str, Any], files: Files) -> None:
    """Order 4 gets the n-gram that a shard now counts more, so that the manifest adds up."""
    level, at = level_with(files, 0, lambda a: a["blank"])
    level["blank"][at] = False
    content["counts"][3] += 1
    content["blanks"][2] -= 1


def unknown_word_missing(content: dict[str, Any], files: Files) -> None:
    """The unknown word, which begins and ends n-grams, is said not to be in the model."""
    content["unk_in_model"] = False
    content["counts"][0] -= 1
    content["blanks"][0] += 1
    content["files"][1]["ngrams"] -= 1
    content["files"][1]["blanks"] += 1


def prefix_made_blank(content: dict[str, Any], files: Files) -> None:
    low = files[LOW]
    flags = low["pair_flags"]
    level, gram = level_with(files, 0, lambda a: ~a["blank"])
    at = int(level["key"][np.searchsorted(level["begin"], gram, side="right") - 1])
    assert flags[at] & BLANK == 0
    flags[at] |= BLANK
    low["pair_log10_prob"][at] = 0
    content["files"][1]["ngrams"] -= 1
    content["files"][1]["blanks"] += 1
    content["counts"][1] -= 1
    content["blanks"][1] += 1


def counts_between_orders(content: dict[str, Any], files: Files) -> None:
    content["counts"][2] += 1
    content["counts"][3] -= 1


def model_id(content: dict[str, Any], files: Files) -> None:
    content["model"] = "0" * 32


def slot_moved(content: dict[str, Any], files: Files) -> None:
    content["slots"] = [1 - shard for shard in content["slots"]]


def foreign_node(content: dict[str, Any], files: Files) -> None:
    """Contexts of three words begin with the first words of the vocabulary, whatever follows."""
    key_bits = key_bits_of(len(files[LOW]["log10_prob"]))
    for name, levels in files.items():
        if name.startswith("shard"):
            for begin, end in pairwise(levels[0]["child"]):
                levels[1]["key"][begin:end] = np.sort(mirrored(np.arange(end - begin), key_bits))


def unsorted_words(content: dict[str, Any], files: Files) -> None:
    """Two words of a short list of 2-grams exchanged."""
    low = files[LOW]
    at = int(low["begin"][first((np.diff(low["begin"]) > 1) & (np.diff(low["begin"]) <= 8))])
    low["key"][[at, at + 1]] = low["key"][[at + 1, at]]


def unsorted_ranks(content: dict[str, Any], files: Files) -> None:
    """Two words of a list of 3-grams exchanged."""
    level, node = level_with(files, 0, lambda a: abs(np.diff(a["begin"]) - 5) <= 3)
    at = int(level["begin"][node])
    level["rank"][[at, at + 1]] = level["rank"][[at + 1, at]]


def rank_beyond(content: dict[str, Any], files: Files) -> None:
    level, node = level_with(files, 0, lambda a: np.diff(a["begin"]) > 0)
    level["rank"][int(level["begin"][node + 1]) - 1] = files[LOW]["log10_prob"].size - 1


def unsorted_nodes(content: dict[str, Any], files: Files) -> None:
    """Two nodes below one root exchanged."""
    for name, levels in files.items():
        if name.startswith("shard") and (np.diff(levels[0]["child"]) > 1).any():
            at = int(levels[0]["child"][first(np.diff(levels[0]["child"]) > 1)])
            key = levels[1]["key"]
            key[[at, at + 1]] = key[[at + 1, at]]


def key_of_no_word(words: int) -> int:
    """The largest key that stands for an id beyond the vocabulary."""
    key_bits = key_bits_of(words)
    keys = np.arange(1 << key_bits)
    return int(keys[mirrored(keys, key_bits) >= words].max())


def unknown_pair_id(content: dict[str, Any], files: Files) -> None:
    """The last word of a list of 2-grams."""
    low = files[LOW]
    lost = key_of_no_word(len(low["log10_prob"]))
    ends = low["begin"][1:] - 1
    low["key"][ends[first(low["key"][ends] < lost)]] = lost


def unknown_node_id(content: dict[str, Any], files: Files) -> None:
    """The last node below a root."""
    lost = key_of_no_word(len(files[LOW]["log10_prob"]))
    for name, levels in files.items():
        if name.startswith("shard"):
            child, key = levels[0]["child"], levels[1]["key"]
            ends = child[1:][np.diff(child) > 0] - 1
            key[ends[first(key[ends] < lost)]] = lost


def word_with_space(content: dict[str, Any], files: Files) -> None:
    files[WORDS]["words"][-2] = ord(" ")


def word_twice(content: dict[str, Any], files: Files) -> None:
    text = files[WORDS]["words"]
    files[WORDS]["words"] = np.where(text == ord("\n"), text, np.uint8(ord("w")))


def no_sentence_begin(content: dict[str, Any], files: Files) -> None:
    text = files[WORDS]["words"].tobytes().replace(b"<s>", b"<r>")
    files[WORDS]["words"] = np.frombuffer(text, np.uint8)


def word_too_many(content: dict[str, Any], files: Files) -> None:
    files[WORDS]["words"] = np.append(files[WORDS]["words"], np.uint8(ord("\n")))


def last_word_open(content: dict[str, Any], files: Files) -> None:
    files[WORDS]["words"][-1] = ord("w")


PLANTED: dict[str, tuple[str, Change]] = {
    "a probability that differs": ("model-id", set_gram(-0.8125)),
    "a model id of another model": ("model-id", model_id),
    "a probability that is no number": ("file", set_gram(np.nan)),
    "a 2-gram's probability that is no number": ("file", set_low("pair_log10_prob", np.nan)),
    "a word's probability that is no number": ("file", set_low("log10_prob", np.nan)),
    "a word's infinite weight": ("file", set_low("log10_backoff", np.inf)),
    "a node's weight that is no number": ("file", deep_weight(np.nan)),
    "a weight of zero with a sign": ("file", set_low("log10_backoff", -0.0)),
    "a node's weight of zero with a sign": ("file", deep_weight(-0.0)),
    "a blank with a probability": ("blank-value", set_gram(-0.5, blank=True)),
    "a blank pair with a weight": ("blank-value", blank_pair_weight),
    "an unknown word that is missing": ("blank-word", unknown_word_missing),
    "a blank made an n-gram": ("counts", blank_made_ngram),
    "an n-gram with a blank for its prefix": ("prefix", prefix_made_blank),
    "counts of two orders mixed": ("counts", counts_between_orders),
    "a pair with the state of another word": (
        "columns",
        state_length_of_a_pair(lambda length: length == 1, 0),
    ),
    "a pair with a state longer than its own": (
        "columns",
        state_length_of_a_pair(lambda length: length < 2, 2 | STORED),
    ),
    "a pair that hides its root": ("columns", clear_stored),
    "a node for a context that is none": ("node", foreign_node),
    "slots that moved": ("columns", slot_moved),
    "a word with a space": ("word", word_with_space),
    "a vocabulary without <s>": ("word", no_sentence_begin),
    "a word that stands twice": ("file", word_twice),
    "a word too many": ("file", word_too_many),
    "a last word without its end": ("file", last_word_open),
    "words of 2-grams out of order": ("file", unsorted_words),
    "words of 3-grams out of order": ("file", unsorted_ranks),
    "a word beyond the list of the low orders": ("rank", rank_beyond),
    "nodes out of order": ("file", unsorted_nodes),
    "a pair's id beyond the vocabulary": ("file", unknown_pair_id),
    "a node's id beyond the vocabulary": ("file", unknown_node_id),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 4-gram model with blanks and weights that nothing follows, in two shards."""
    return build(random_model(7, words=8, per_order=60), tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with tables of values."""
    folder = tmp_path_factory.mktemp("compact")
    return build(random_model(7, words=8, per_order=60), folder, encoding="compact", bits=32)


@pytest.mark.promise("verify")
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_violation_is_told_by_its_rule(planted: str, good: Path, tmp_path: Path) -> None:
    """Checksums and sizes fit, so that only the rule itself can catch it; what one file shows by
    itself is refused where it would be served, too: a NaN must not become a score."""
    rule, change = PLANTED[planted]
    bad = changed(good, tmp_path / "bad", change)
    report = verify(bad)
    assert rule in rules(report), [str(v) for v in report.violations]
    assert not report.ok
    if rule == "file":
        with pytest.raises(ShardFormatError):
            LocalModel.open(bad)


@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("unigrams_only", set_low("log10_backoff", -0.5), "backoff"),
        ("no_unknown_word", set_low("log10_prob", -99), "blank-value"),
    ],
)
def test_a_value_that_only_some_models_may_have_is_told(
    name: str, change: Change, rule: str, tmp_path: Path
) -> None:
    """Nothing backs off from the highest order; a missing unknown word scores -100."""
    source = build(HAND_MADE[name], tmp_path)
    assert rule in rules(verify(changed(source, tmp_path / "bad", change)))


@pytest.mark.parametrize(
    ("columns", "values"),
    [
        (("prob_table",), (0.5, np.nan, np.inf, -0.0)),
        (("backoff_table", "weight_table"), (np.nan, np.inf, -np.inf, -0.0)),
    ],
)
@pytest.mark.parametrize("file", [LOW, SHARD])
def test_a_table_with_a_value_no_model_has_is_refused(
    file: str, columns: tuple[str, ...], values: tuple[float, ...], compact: Path, tmp_path: Path
) -> None:
    """Every entry of every table may become a score."""
    for number, value in enumerate(values):

        def change(content: dict[str, Any], files: Files, value: float = value) -> None:
            tables = [name for name in files[file] if name.endswith(columns)]
            table = files[file][max(tables, key=lambda name: len(files[file][name]))]
            table[np.flatnonzero(np.isfinite(table))[-1]] = value

        bad = tampered(compact, tmp_path / f"bad {number}", change)
        with pytest.raises(ShardFormatError, match=r"0 or less|finite|negative zero"):
            LocalModel.open(bad)
        assert rules(verify(bad)) == {"file"}


def spare_bit(content: dict[str, Any], files: Files) -> None:
    files[LOW]["list"][-1] = 1


def other_encoding(content: dict[str, Any], files: Files) -> None:
    content["encoding"] = "compact"


def longer_table(content: dict[str, Any], files: Files) -> None:
    """An entry that no code names, in the last table of each shard."""
    for name, columns in files.items():
        if name.startswith("shard"):
            columns["weight_table"] = np.append(columns["weight_table"], np.float32(1))
            columns["shape"][-1] += 1


@pytest.mark.parametrize("change", [spare_bit, other_encoding, longer_table])
def test_columns_that_the_builder_would_not_write_are_told(
    change: Change, good: Path, tmp_path: Path
) -> None:
    """The n-grams are right, and still: one model has one packed form."""
    assert rules(verify(tampered(good, tmp_path / "bad", change))) == {"columns"}


def test_a_change_of_nothing_is_told_by_no_rule(good: Path, compact: Path, tmp_path: Path) -> None:
    """So that the tests above tell the changes and not the copying."""

    def nothing(content: dict[str, Any], files: Files) -> None:
        pass

    for number, source in enumerate((good, compact)):
        assert verify(changed(source, tmp_path / f"{number} plain", nothing)).ok
        assert verify(tampered(source, tmp_path / f"{number} packed", nothing)).ok


def test_a_blank_pair_that_closes_nothing_is_told(tmp_path: Path) -> None:
    """A blank a c, though no n-gram ends so."""
    source = build(HAND_MADE["bigrams_only"], tmp_path)

    def change(content: dict[str, Any], files: Files) -> None:
        low = files[LOW]
        a, c = 3, 5  # the ids are those of <unk> <s> </s> a b c d
        key = int(mirrored(np.array([c]), key_bits_of(7))[0])
        begin, end = low["begin"][a : a + 2]
        at = int(begin + np.searchsorted(low["key"][begin:end], key))
        for column, value in (
            ("key", key),
            ("pair_log10_prob", 0),
            ("pair_flags", BLANK | int(low["extended"][c])),
        ):
            low[column] = np.insert(low[column], at, value)
        low["begin"][a + 1 :] += 1
        content["blanks"][1] += 1
        content["files"][1]["blanks"] += 1

    assert rules(verify(changed(source, tmp_path / "bad", change))) == {"columns"}


def test_the_same_ngrams_in_two_shards_are_told(good: Path, tmp_path: Path) -> None:
    """As repeated, and as roots where their slots are not; no model is made of them."""

    def change(content: dict[str, Any], files: Files) -> None:
        files["shard-0001.arrow"] = files["shard-0000.arrow"]
        found = layout.read_manifest(good)
        ours, theirs = found.files[2:]
        content["counts"][2] += ours.ngrams - theirs.ngrams
        content["blanks"][2] += ours.blanks - theirs.blanks

    bad = changed(good, tmp_path / "bad", change)
    assert "twice" in rules(verify(bad))
    with pytest.raises(ShardFormatError, match="twice"):
        decode(bad)


# --------------------------------------------------------------------- manifest and other files


@pytest.mark.promise("versions")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "another"),
        ("format_version", 2),
        ("format_version", 4),
        ("format_version", True),
        ("features", [["nested"]]),
        ("features", "none"),
        ("encoding", []),
        ("order", 4.0),
        ("order", 0),
        ("model", "xyz"),
        ("counts", [1, 2]),
        ("counts", "four"),
        ("counts", [-1, 0, 0, 0]),
        ("blanks", [1, 0, 0, 0]),
        ("unk_in_model", 1),
        ("slots", [0.5] * 4096),
        ("slots", None),
        ("files", [None] * 4),
        ("provenance", []),
    ],
)
def test_a_manifest_with_a_wrong_field_is_refused(
    field: str, value: object, good: Path, tmp_path: Path
) -> None:
    """Though its id fits its content."""
    content = json.loads((good / layout.MANIFEST).read_bytes())
    content[field] = value
    seal(tmp_path, content)
    with pytest.raises(ShardFormatError):
        layout.read_manifest(tmp_path)
    assert rules(verify(tmp_path)) == {"manifest"}


@pytest.mark.parametrize(
    "field", ["model", "order", "counts", "slots", "files", "shard_set", "check"]
)
def test_a_manifest_without_a_field_is_refused(field: str, good: Path, tmp_path: Path) -> None:
    """The message names it, or the id that is missing."""
    content = json.loads((good / layout.MANIFEST).read_bytes())
    seal(tmp_path, content)
    del content[field]
    if field not in ("shard_set", "check"):
        seal(tmp_path, content)
    else:
        (tmp_path / layout.MANIFEST).write_bytes(layout.canonical_text(content))
    with pytest.raises(ShardFormatError, match=field.replace("_", ".")):
        layout.read_manifest(tmp_path)


def test_what_is_said_of_the_source_counts_for_the_check_alone(good: Path, tmp_path: Path) -> None:
    """The same model from another file is the same set; an edit is told all the same."""
    content = json.loads((good / layout.MANIFEST).read_bytes())
    content["provenance"]["source"] = "renamed.arpa"
    (tmp_path / layout.MANIFEST).write_bytes(layout.canonical_text(content))
    with pytest.raises(ShardFormatError, match="edited"):
        layout.read_manifest(tmp_path)
    before = content["check"]
    seal(tmp_path, content)
    assert layout.read_manifest(tmp_path).shard_set == layout.read_manifest(good).shard_set
    assert content["check"] != before


@pytest.mark.promise("versions")
def test_a_field_that_is_not_known_is_left_alone(good: Path, tmp_path: Path) -> None:
    """A later writer may add what a reader can do without; it still counts for the id."""
    content = json.loads((good / layout.MANIFEST).read_bytes())
    content["added_later"] = {"x": [1.5, None]}
    content["files"][0]["added_later"] = 1
    seal(tmp_path, content)
    manifest = layout.read_manifest(tmp_path)
    assert manifest.model == layout.read_manifest(good).model
    assert manifest.shard_set != layout.read_manifest(good).shard_set


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format":"dlm shard set","x":NaN}',
        b'{"format":"dlm shard set","x":1e999}',
        b'{"format":"dlm shard set","format_version":2,"features":[]}',
    ],
)
def test_a_text_that_is_no_manifest_is_refused(text: bytes) -> None:
    """And nothing but ShardFormatError comes out."""
    with pytest.raises(ShardFormatError):
        layout.parse_manifest(text)


def test_a_manifest_in_another_spelling_is_refused(good: Path) -> None:
    """There is one text for one content, so that the id names the bytes."""
    content = json.loads((good / layout.MANIFEST).read_bytes())
    with pytest.raises(ShardFormatError, match="edited"):
        layout.parse_manifest(json.dumps(content, indent=1).encode())


def test_a_missing_file_and_one_that_does_not_belong_are_told(good: Path, tmp_path: Path) -> None:
    """The first is a violation, the second a warning; the other files are looked at too."""
    folder = tmp_path / "set"
    shutil.copytree(good, folder)
    (folder / "shard-0000.arrow").unlink()
    (folder / "shard-0001.arrow").write_bytes(b"")
    (folder / "notes.txt").write_text("mine")
    report = verify(folder)
    assert [v.file for v in report.violations] == ["shard-0000.arrow", "shard-0001.arrow"]
    assert len(report.warnings) == 1
    assert "notes.txt" in report.warnings[0]
    assert not report.complete


def test_a_folder_that_is_no_shard_set_is_told(tmp_path: Path) -> None:
    """With the command that makes one."""
    report = verify(tmp_path)
    assert rules(report) == {"manifest"}
    assert "dlm shard" in report.violations[0].message


# -------------------------------------------------------------------- comparison with an ARPA file


@pytest.mark.promise("verify")
def test_differences_from_an_arpa_file_are_named(tmp_path: Path) -> None:
    """An n-gram more, one fewer, another value, another word."""
    model = HAND_MADE["missing_suffixes"]
    folder = build(model, tmp_path, 2)

    def against(ngrams: dict[tuple[str, ...], tuple[float, float | None]]) -> VerifyReport:
        other = PlainModel(4, ngrams).write(tmp_path / "other.arpa")
        return verify(folder, arpa=other)

    same = against(dict(reversed(model.ngrams.items())))
    assert same.ok, "the order of lines, and so the ids, may differ"

    fewer = {n: v for n, v in model.ngrams.items() if n != ("d", "a", "b")}
    assert rules(against(fewer)) == {"arpa-extra"}
    assert "'d a b'" in against(fewer).violations[0].message

    more = model.ngrams | {("d", "a", "c"): (-0.5, None), ("b", "c"): (-0.25, None)}
    assert rules(against(more)) == {"arpa-missing"}
    assert len(against(more).violations) == 2

    weight = model.ngrams | {("a", "b", "c"): (-0.25, -0.75000006)}
    assert rules(against(weight)) == {"arpa-value"}

    words = model.ngrams | {("e",): (-0.5, None)}
    assert rules(against(words)) == {"arpa-words", "arpa-missing"}

    lower = {n: v for n, v in model.ngrams.items() if len(n) < 4}
    shorter = PlainModel(3, lower).write(tmp_path / "other.arpa")
    assert "arpa-order" in rules(verify(folder, arpa=shorter))


def test_a_repaired_set_equals_the_file_it_came_from(tmp_path: Path) -> None:
    """The prefixes that repair added are made again for the comparison."""
    ngrams = {n: v for n, v in HAND_MADE["missing_suffixes"].ngrams.items() if n != ("d", "a")}
    folder = build(PlainModel(4, ngrams), tmp_path, repair=True)
    assert verify(folder, arpa=tmp_path / "model.arpa").ok


def test_a_malformed_arpa_file_is_the_callers_fault(good: Path, tmp_path: Path) -> None:
    """It is raised, not reported: the set is not to blame."""
    (tmp_path / "bad.arpa").write_text("no model")
    with pytest.raises(ArpaError):
        verify(good, arpa=tmp_path / "bad.arpa")
