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
from dlm.index.local import LocalModel
from dlm.index.verify import Report, verify
from models import HAND_MADE, Change, PlainModel, build, changed, random_model, seal

Files = dict[str, dict[str, Any]]

MODELS = HAND_MADE | {
    f"random {seed}": random_model(seed, order=2 + seed % 5, per_order=50, unk=bool(seed % 3))
    for seed in range(8)
}


def rules(report: Report) -> set[str]:
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
    report.require_ok()


# ------------------------------------------------------------- violations planted in the arrays

LOW = "low_orders.arrow"
WORDS = "vocabulary.arrow"


def first(mask: np.ndarray) -> int:
    """The first place where `mask` holds; there must be one."""
    places = np.flatnonzero(mask)
    assert len(places), "the model has no n-gram to which this change applies"
    return int(places[0])


def shard_with(files: Files, wanted: Callable[[dict[str, Any]], np.ndarray]) -> tuple[Any, int]:
    """The first shard and place in it where `wanted` holds."""
    for name, arrays in files.items():
        if name.startswith("shard") and wanted(arrays).any():
            return arrays, first(wanted(arrays))
    raise AssertionError("no shard has a place to which this change applies")


def is_blank(meta: np.ndarray) -> np.ndarray:
    return (meta & layout.BLANK) != 0


def set_low(column: str, value: float) -> Change:
    """The first n-gram of `column` gets `value`."""

    def change(content: dict[str, Any], files: Files) -> None:
        kind = column.split("_")[0]
        files[LOW][column][first(~is_blank(files[LOW][f"{kind}_meta"]))] = value

    return change


def set_gram(value: float, blank: bool = False) -> Change:
    """The first n-gram (or blank) of a shard gets the probability `value`."""

    def change(content: dict[str, Any], files: Files) -> None:
        arrays, at = shard_with(files, lambda a: is_blank(a["gram_meta"]) == blank)
        arrays["gram_log10_prob"][at] = value

    return change


def flip_state_length(content: dict[str, Any], files: Files) -> None:
    arrays, at = shard_with(files, lambda a: np.ones(len(a["gram_meta"]), bool))
    arrays["gram_meta"][at] ^= 1


def flip_unigram_state_length(content: dict[str, Any], files: Files) -> None:
    files[LOW]["unigram_meta"][1] ^= 1


def clear_stored(content: dict[str, Any], files: Files) -> None:
    meta = files[LOW]["bigram_meta"]
    meta[first(meta & layout.STORED != 0)] &= ~np.uint8(layout.STORED)


def set_stored(content: dict[str, Any], files: Files) -> None:
    meta = files[LOW]["bigram_meta"]
    meta[first(meta & layout.STORED == 0)] |= layout.STORED


def reserved_bit(content: dict[str, Any], files: Files) -> None:
    files[LOW]["bigram_meta"][0] |= 0x10


def reserved_bit_of_a_gram(content: dict[str, Any], files: Files) -> None:
    arrays, at = shard_with(files, lambda a: np.ones(len(a["gram_meta"]), bool))
    arrays["gram_meta"][at] |= layout.STORED


def long_state(content: dict[str, Any], files: Files) -> None:
    files[LOW]["unigram_meta"][0] |= 0x0F


def root_weight(content: dict[str, Any], files: Files) -> None:
    arrays, at = shard_with(files, lambda a: a["node_backoff"] != 7)
    arrays["node_backoff"][at] = -0.375


def deep_weight(value: float) -> Change:
    """A node that is no root gets the weight `value`."""

    def change(content: dict[str, Any], files: Files) -> None:
        def deep(a: dict[str, Any]) -> np.ndarray:
            return np.arange(len(a["node_key"])) >= int(a["level_begin"][1])

        arrays, at = shard_with(files, deep)
        arrays["node_backoff"][at] = value

    return change


def blank_pair_weight(content: dict[str, Any], files: Files) -> None:
    low = files[LOW]
    low["bigram_backoff"][first(is_blank(low["bigram_meta"]))] = -0.5


def blank_made_ngram(content: dict[str, Any], files: Files) -> None:
    arrays, at = shard_with(files, lambda a: is_blank(a["gram_meta"]))
    arrays["gram_meta"][at] &= ~np.uint8(layout.BLANK)
    shift_between_files(content, files)


def shift_between_files(content: dict[str, Any], files: Files) -> None:
    """Order 3 gets the n-gram that a shard now counts more, so that the manifest adds up."""
    content["counts"][3] += 1
    content["blanks"][2] -= 1


def blank_word(content: dict[str, Any], files: Files) -> None:
    files[LOW]["unigram_meta"][2] |= layout.BLANK


def counts_between_orders(content: dict[str, Any], files: Files) -> None:
    content["counts"][2] += 1
    content["counts"][3] -= 1


def model_id(content: dict[str, Any], files: Files) -> None:
    content["model"] = "0" * 32


def slot_moved(content: dict[str, Any], files: Files) -> None:
    content["slots"] = [1 - shard for shard in content["slots"]]


def unsorted_grams(content: dict[str, Any], files: Files) -> None:
    def pair(a: dict[str, Any]) -> np.ndarray:
        return a["gram_word"][:-1] < a["gram_word"][1:]

    arrays, at = shard_with(files, pair)
    words = arrays["gram_word"]
    words[at], words[at + 1] = words[at + 1], words[at]


def wide_offsets(content: dict[str, Any], files: Files) -> None:
    arrays = files["shard-0000.arrow"]
    arrays["node_gram"] = arrays["node_gram"].astype(np.uint64)


def unknown_id(content: dict[str, Any], files: Files) -> None:
    files["shard-0000.arrow"]["gram_word"][-1] = 0xFFFFFFFF


def foreign_node(content: dict[str, Any], files: Files) -> None:
    """Nodes for contexts that the model has not: the words of each family counted from 0."""
    for arrays in (files["shard-0000.arrow"], files["shard-0001.arrow"]):
        child = arrays["node_child"].astype(int)
        for begin, end in pairwise(child):
            arrays["node_key"][begin:end] = np.arange(end - begin)


def drop_gram(arrays: dict[str, Any], at: int) -> None:
    """Takes one n-gram or blank out of a shard."""
    for column in ("gram_word", "gram_log10_prob", "gram_meta"):
        arrays[column] = np.delete(arrays[column], at)
    arrays["node_gram"][arrays["node_gram"] > at] -= 1


def lost_blank(content: dict[str, Any], files: Files) -> None:
    arrays, at = shard_with(files, lambda a: is_blank(a["gram_meta"]))
    level = int(
        np.searchsorted(arrays["node_gram"][arrays["level_begin"].astype(int)], at, "right")
    )
    drop_gram(arrays, at)
    content["blanks"][level + 1] -= 1


def useless_node(content: dict[str, Any], files: Files) -> None:
    """A leaf that stood for its weight alone loses it."""

    def leaf(a: dict[str, Any]) -> np.ndarray:
        return (
            (np.diff(a["node_gram"].astype(np.int64)) == 0)
            & (np.diff(a["node_child"].astype(np.int64)) == 0)
            & (a["node_backoff"] != 0)
        )

    arrays, at = shard_with(files, leaf)
    arrays["node_backoff"][at] = 0


def prefix_made_blank(content: dict[str, Any], files: Files) -> None:
    low = files[LOW]
    at = first((low["bigram_meta"] & layout.STORED != 0) & ~is_blank(low["bigram_meta"]))
    low["bigram_meta"][at] |= layout.BLANK
    low["bigram_log10_prob"][at] = 0
    for entry in content["files"][1:2]:
        entry["ngrams"] -= 1
        entry["blanks"] += 1
    content["counts"][1] -= 1
    content["blanks"][1] += 1


def word_with_space(content: dict[str, Any], files: Files) -> None:
    words = files[WORDS]
    words["word_bytes"][int(words["word_begin"][4])] = ord(" ")


def word_twice(content: dict[str, Any], files: Files) -> None:
    words = files[WORDS]
    words["word_bytes"][:] = ord("w")


def no_sentence_begin(content: dict[str, Any], files: Files) -> None:
    text = files[WORDS]["word_bytes"].tobytes().replace(b"<s>", b"<r>")
    files[WORDS]["word_bytes"] = np.frombuffer(text, np.uint8)


def children_out_of_range(content: dict[str, Any], files: Files) -> None:
    files["shard-0000.arrow"]["node_child"][-1] += 1000


def leaves_with_children(content: dict[str, Any], files: Files) -> None:
    """The last level must have none, or a walk could go deeper than the order."""
    arrays = files["shard-0000.arrow"]
    arrays["node_child"][:] = 0
    arrays["node_child"][-1] = len(arrays["node_key"])


def huge_offset(content: dict[str, Any], files: Files) -> None:
    arrays = files["shard-0000.arrow"]
    arrays["node_gram"] = arrays["node_gram"].astype(np.uint64)
    arrays["node_gram"][1] = 1 << 63


def levels_out_of_order(content: dict[str, Any], files: Files) -> None:
    files["shard-0000.arrow"]["level_begin"][1] = len(files["shard-0000.arrow"]["node_key"]) + 1


def short_column(content: dict[str, Any], files: Files) -> None:
    arrays = files["shard-0000.arrow"]
    arrays["gram_meta"] = arrays["gram_meta"][:-1]


def root_key_out_of_range(content: dict[str, Any], files: Files) -> None:
    arrays = files["shard-0000.arrow"]
    arrays["node_key"][int(arrays["level_begin"][1]) - 1] = len(files[LOW]["bigram_word"])


def bigram_begins_fall(content: dict[str, Any], files: Files) -> None:
    begins = files[LOW]["bigram_begin"]
    begins[first((begins[1:] < begins[-1]) & (begins[1:] > 0)) + 1] = begins[-1] + 1


def vocabulary_begins_fall(content: dict[str, Any], files: Files) -> None:
    files[WORDS]["word_begin"][2] = 0xFFFFFFFF


def probability_changed(content: dict[str, Any], files: Files) -> None:
    arrays, at = shard_with(files, lambda a: ~is_blank(a["gram_meta"]))
    arrays["gram_log10_prob"][at] -= 0.25


PLANTED: dict[str, tuple[str, Change]] = {
    "a probability that differs": ("model-id", probability_changed),
    "a model id of another model": ("model-id", model_id),
    "a probability above one": ("probability", set_gram(0.5)),
    "a probability that is no number": ("probability", set_gram(np.nan)),
    "a 2-gram's probability above one": ("probability", set_low("bigram_log10_prob", 1e-9)),
    "an infinite weight": ("backoff", set_low("unigram_backoff", np.inf)),
    "a node's weight that is no number": ("backoff", deep_weight(np.nan)),
    "a zero with a sign": ("negative-zero", set_gram(-0.0)),
    "a weight of zero with a sign": ("negative-zero", set_low("unigram_backoff", -0.0)),
    "a blank with a probability": ("blank-value", set_gram(-0.5, blank=True)),
    "a blank pair with a weight": ("blank-value", blank_pair_weight),
    "a word that is a blank": ("blank-word", blank_word),
    "a blank made an n-gram": ("counts", blank_made_ngram),
    "an n-gram with a blank for its prefix": ("prefix", prefix_made_blank),
    "a blank that is missing": ("suffix", lost_blank),
    "counts of two orders mixed": ("counts", counts_between_orders),
    "a state length that is wrong": ("state-length", flip_state_length),
    "a word's state length that is wrong": ("state-length", flip_unigram_state_length),
    "a pair that hides its root": ("stored", clear_stored),
    "a pair that promises a root": ("stored", set_stored),
    "a root with another weight": ("root-backoff", root_weight),
    "a node for nothing": ("node-useless", useless_node),
    "a node for a context that is none": ("node", foreign_node),
    "slots that moved": ("slot", slot_moved),
    "offsets wider than needed": ("width", wide_offsets),
    "a word with a space": ("word", word_with_space),
    "a vocabulary without <s>": ("word", no_sentence_begin),
    "a word that stands twice": ("file", word_twice),
    "a reserved bit of a pair": ("file", reserved_bit),
    "a reserved bit of an n-gram": ("file", reserved_bit_of_a_gram),
    "a state longer than a context": ("file", long_state),
    "words out of order": ("file", unsorted_grams),
    "an id beyond the vocabulary": ("file", unknown_id),
    "a root beyond the 2-grams": ("file", root_key_out_of_range),
    "children beyond the nodes": ("file", children_out_of_range),
    "leaves that have children": ("file", leaves_with_children),
    "an offset of 2**63": ("file", huge_offset),
    "levels that fall": ("file", levels_out_of_order),
    "2-grams that begin beyond the end": ("file", bigram_begins_fall),
    "words that begin beyond the end": ("file", vocabulary_begins_fall),
    "a column cut short": ("file", short_column),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 4-gram model with blanks and weights that nothing follows, in two shards."""
    return build(random_model(7, words=8, per_order=60), tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_violation_is_told_by_its_rule(planted: str, good: Path, tmp_path: Path) -> None:
    """Checksums and sizes fit, so that only the rule itself can catch it."""
    rule, change = PLANTED[planted]
    report = verify(changed(good, tmp_path / "bad", change))
    assert rule in rules(report), [str(v) for v in report.violations]
    assert not report.ok
    with pytest.raises(ShardFormatError, match=rf"\[{rule}\]"):
        report.require_ok()


@pytest.mark.parametrize(
    "planted", [name for name in PLANTED if "number" in name or "above" in name]
)
def test_values_no_model_has_are_refused_where_they_would_be_served(
    planted: str, good: Path, tmp_path: Path
) -> None:
    """Opening to serve looks at every value: a NaN must not become a score."""
    _, change = PLANTED[planted]
    bad = changed(good, tmp_path / "bad", change)
    with pytest.raises(ShardFormatError, match=r"0 or less|finite"):
        LocalModel.open(bad)


def test_a_change_of_nothing_is_told_by_no_rule(good: Path, tmp_path: Path) -> None:
    """So that the test above tells the changes and not the copying."""
    assert verify(changed(good, tmp_path / "same", lambda content, files: None)).ok


def test_a_weight_at_the_highest_order_is_told(tmp_path: Path) -> None:
    """Nothing backs off from there."""
    source = build(HAND_MADE["bigrams_only"], tmp_path)
    report = verify(changed(source, tmp_path / "bad", set_low("bigram_backoff", -0.5)))
    assert "backoff" in rules(report)


def test_a_blank_that_closes_nothing_is_told(tmp_path: Path) -> None:
    """A blank a c, though no n-gram ends so."""
    source = build(HAND_MADE["bigrams_only"], tmp_path)

    def change(content: dict[str, Any], files: Files) -> None:
        low = files[LOW]
        a, c = 3, 5  # the ids are those of <unk> <s> </s> a b c d
        at = int(low["bigram_begin"][a + 1])
        meta = layout.BLANK | int(low["unigram_meta"][c])
        for column, value in (("word", c), ("log10_prob", 0), ("backoff", 0), ("meta", meta)):
            low[f"bigram_{column}"] = np.insert(low[f"bigram_{column}"], at, value)
        low["bigram_begin"][a + 1 :] += 1
        content["blanks"][1] += 1
        content["files"][1]["blanks"] += 1

    assert rules(verify(changed(source, tmp_path / "bad", change))) == {"blank-useless"}


def test_the_unknown_word_that_a_model_lacks_scores_minus_one_hundred(tmp_path: Path) -> None:
    """Its blank has that value and no other."""
    source = build(HAND_MADE["no_unknown_word"], tmp_path)

    def change(content: dict[str, Any], files: Files) -> None:
        files[LOW]["unigram_log10_prob"][0] = -99

    assert "blank-value" in rules(verify(changed(source, tmp_path / "bad", change)))


def test_the_same_ngrams_in_two_shards_are_told(good: Path, tmp_path: Path) -> None:
    """As repeated, and as roots where their slots are not."""

    def change(content: dict[str, Any], files: Files) -> None:
        files["shard-0001.arrow"] = files["shard-0000.arrow"]
        found = layout.read_manifest(good)
        ours, theirs = found.files[2:]
        content["counts"][2] += ours.ngrams - theirs.ngrams
        content["blanks"][2] += ours.blanks - theirs.blanks

    assert {"twice", "slot"} <= rules(verify(changed(good, tmp_path / "bad", change)))


# --------------------------------------------------------------------- manifest and other files


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "another"),
        ("format_version", 2),
        ("format_version", True),
        ("features", ["shared_slots"]),
        ("features", [["nested"]]),
        ("features", "none"),
        ("encoding", "compact"),
        ("encoding", []),
        ("order", 4.0),
        ("order", 0),
        ("order", 16),
        ("model", "xyz"),
        ("counts", [1, 2]),
        ("counts", "four"),
        ("counts", [-1, 0, 0, 0]),
        ("blanks", [1, 0, 0, 0]),
        ("unk_in_model", 1),
        ("slots", [0] * 4095),
        ("slots", [2] * 4096),
        ("slots", [0.5] * 4096),
        ("slots", None),
        ("files", []),
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


@pytest.mark.parametrize("field", ["model", "order", "counts", "slots", "files", "shard_set"])
def test_a_manifest_without_a_field_is_refused(field: str, good: Path, tmp_path: Path) -> None:
    """The message names it, or the id that is missing."""
    content = json.loads((good / layout.MANIFEST).read_bytes())
    seal(tmp_path, content)
    del content[field]
    if field != "shard_set":
        seal(tmp_path, content)
    else:
        (tmp_path / layout.MANIFEST).write_bytes(layout.canonical_text(content))
    with pytest.raises(ShardFormatError, match=field.replace("_", " ")):
        layout.read_manifest(tmp_path)


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
        b'{"format":"dlm shard set","format_version":1,"features":[]}',
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


def test_differences_from_an_arpa_file_are_named(tmp_path: Path) -> None:
    """An n-gram more, one fewer, another value, another word."""
    model = HAND_MADE["missing_suffixes"]
    folder = build(model, tmp_path, 2)

    def against(ngrams: dict[tuple[str, ...], tuple[float, float | None]]) -> Report:
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
