"""A file keyed by user becomes a dataset, or is refused with the line."""

from __future__ import annotations

import gzip
import stat
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlm.errors import ConfigError, FormatError
from dlm.federated.users import UserDataset

ROWS = [
    ("bea", "the cat sat"),
    ("al", "a dog ran off"),
    ("bea", "it slept"),
    ("cy", "naïve café\u2028one line"),
    ("al", "why"),
]


def tsv(
    path: Path, rows: list[tuple[str, str]], header: str = "user_id\tcontext\tutterance"
) -> Path:
    """A file of these rows."""
    lines = [header, *(f"{user}\tc\t{text}" for user, text in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    return path


def grouped(rows: list[tuple[str, str]]) -> dict[str, list[str]]:
    """The plain answer: a dictionary of lists."""
    found: dict[str, list[str]] = defaultdict(list)
    for user, text in rows:
        found[user].append(text)
    return dict(sorted(found.items()))


def held(dataset: UserDataset) -> dict[str, list[str]]:
    """The same from a dataset."""
    return {dataset.user_id(u): dataset.utterances(u) for u in range(len(dataset))}


def test_rows_are_grouped_by_user_in_the_order_of_ids(tmp_path: Path) -> None:
    """Each user's own order is the file's, and U+2028 ends no line."""
    dataset = UserDataset.from_tsv(tsv(tmp_path / "u.tsv", ROWS))
    assert held(dataset) == grouped(ROWS)
    assert dataset.user_ids() == ["al", "bea", "cy"]
    assert dataset.facts.users == 3
    assert dataset.facts.utterances == 5
    assert dataset.word_counts().tolist() == [5, 5, 4]


def test_plain_compressed_and_parquet_files_give_the_same_dataset(tmp_path: Path) -> None:
    """Digest included."""
    plain = tsv(tmp_path / "u.tsv", ROWS)
    (tmp_path / "u.tsv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    with pa.CompressedOutputStream(str(tmp_path / "u.tsv.zst"), "zstd") as out:
        out.write(plain.read_bytes())
    table = pa.table({"user_id": [u for u, _ in ROWS], "utterance": [t for _, t in ROWS]})
    pq.write_table(table, tmp_path / "u.parquet")
    with pa.CompressedOutputStream(str(tmp_path / "u.parquet.zst"), "zstd") as out:
        out.write((tmp_path / "u.parquet").read_bytes())
    digests = {
        UserDataset.open(tmp_path / name).digest
        for name in ("u.tsv", "u.tsv.gz", "u.tsv.zst", "u.parquet", "u.parquet.zst")
    }
    assert len(digests) == 1


def test_the_order_of_rows_of_different_users_does_not_matter(tmp_path: Path) -> None:
    """Only that of one user's."""
    one = UserDataset.from_tsv(tsv(tmp_path / "a.tsv", ROWS))
    by_user = sorted(ROWS, key=lambda row: row[0])
    other = UserDataset.from_tsv(tsv(tmp_path / "b.tsv", by_user))
    swapped = UserDataset.from_tsv(tsv(tmp_path / "c.tsv", ROWS[::-1]))
    assert one.digest == other.digest != swapped.digest


def test_a_file_larger_than_the_memory_is_sorted_on_disk(tmp_path: Path) -> None:
    """Many runs, against the dictionary."""
    random = np.random.default_rng(0)
    rows = [
        (f"user{random.integers(300):03}", f"{i} " + "word " * int(random.integers(1, 40)))
        for i in range(20_000)
    ]
    dataset = UserDataset.from_tsv(
        tsv(tmp_path / "u.tsv", rows), store=tmp_path / "store", memory_bytes=1 << 20
    )
    assert held(dataset) == grouped(rows)
    assert sorted(p.name for p in (tmp_path / "store").iterdir()) == ["users.arrow", "users.facts"]


def test_a_temporary_store_is_gone_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing is left of it, whatever ends the process."""
    monkeypatch.setattr("dlm.files.temporary_folder", lambda: tmp_path)
    source = tsv(tmp_path / "u.tsv", ROWS)
    dataset = UserDataset.from_tsv(source)
    assert list(tmp_path.iterdir()) == [source]
    assert held(dataset) == grouped(ROWS)


def test_a_store_is_used_again_and_made_anew_for_another_file(tmp_path: Path) -> None:
    """Or for other settings; one that was not finished is not taken."""
    path, store = tsv(tmp_path / "u.tsv", ROWS), tmp_path / "store"
    first = UserDataset.from_tsv(path, store=store).digest
    made = (store / "users.facts").stat().st_mtime_ns
    assert UserDataset.from_tsv(path, store=store).digest == first
    assert (store / "users.facts").stat().st_mtime_ns == made
    assert UserDataset.from_tsv(path, store=store, cap_words=2).digest != first
    tsv(path, [*ROWS, ("di", "new")])
    assert len(UserDataset.from_tsv(path, store=store)) == 4
    (store / "users.facts").unlink()
    (store / "users.arrow").write_bytes(b"ARROW1 cut short")
    assert len(UserDataset.from_tsv(path, store=store)) == 4


def test_words_over_the_cap_are_left_out_and_counted(tmp_path: Path) -> None:
    """First come first, over all utterances of a user."""
    dataset = UserDataset.from_tsv(tsv(tmp_path / "u.tsv", ROWS), cap_words=4)
    assert held(dataset)["bea"] == ["the cat sat", "it"]
    assert held(dataset)["al"] == ["a dog ran off"]
    assert dataset.facts.words_over_cap == 2
    assert dataset.words(0, cap=3) == ["a", "dog", "ran"]


def test_tokens_of_a_user_are_capped_over_all_utterances(tmp_path: Path) -> None:
    """The utterance that crosses the cap is cut, those after it are not given."""
    dataset = UserDataset.from_tsv(tsv(tmp_path / "u.tsv", ROWS))

    def encode(words: list[str]) -> Any:
        return np.array([len(w) for w in words], np.int32)

    assert [t.tolist() for t in dataset.tokens(1, encode)] == [[3, 3, 3], [2, 5]]
    assert [t.tolist() for t in dataset.tokens(1, encode, cap=4)] == [[3, 3, 3], [2]]
    assert [t.tolist() for t in dataset.tokens(1, encode, cap=3)] == [[3, 3, 3]]
    assert dataset.tokens(1, encode, cap=3)[0].dtype == np.int32


def test_a_split_puts_nobody_on_both_sides_and_keeps_sides(tmp_path: Path) -> None:
    """About the fraction asked for; a user stays where they are when others come."""
    rows = [(f"u{i}", "some text") for i in range(2000)]
    small = UserDataset.from_tsv(tsv(tmp_path / "a.tsv", rows[:1000]))
    large = UserDataset.from_tsv(tsv(tmp_path / "b.tsv", rows))
    train, test = large.split(0.2)
    assert set(train.user_ids()) | set(test.user_ids()) == {user for user, _ in rows}
    assert not set(train.user_ids()) & set(test.user_ids())
    assert 330 < len(test) < 470  # four standard deviations about 400
    assert set(small.split(0.2)[1].user_ids()) <= set(test.user_ids())
    assert set(large.split(0.2, name="other")[1].user_ids()) != set(test.user_ids())
    assert train.digest != test.digest != large.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user_id\tutterance\na\thello\n\ttext\n", "line 3: .*no user id"),
        ("user_id\tutterance\na\thello\n  \ttext\n", "line 3: .*no user id"),
        ("user_id\tutterance\na\thello\nb\t  \nb\t\n", "line 3 has no text"),
        ("user_id\tutterance\na\thello\nb\n", "line 3: .*1 fields, .*header has 2"),
        ("user_id\tutterance\na\tx\ty\n", "line 2: .*3 fields"),
        ("who\tutterance\na\tx\n", "'user_id' exactly once"),
        ("user_id\tuser_id\tutterance\na\ta\tx\n", "'user_id' exactly once"),
        ("", "'user_id' exactly once"),
        ("user_id,utterance\na,x\n", "is not tab-separated"),
        ("user_id\tutterance\n", "no user with text"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    """Never a user fewer in silence; and no user is named."""
    (tmp_path / "u.tsv").write_text(text)
    with pytest.raises(FormatError, match=message) as caught:
        UserDataset.from_tsv(tmp_path / "u.tsv")
    assert "u.tsv" in str(caught.value)


def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    """As is what is no compressed file at all."""
    (tmp_path / "u.tsv").write_bytes(b"user_id\tutterance\na\tok\nb\tcaf\xe9\n")
    with pytest.raises(FormatError, match=r"line 3: .*not UTF-8"):
        UserDataset.from_tsv(tmp_path / "u.tsv")
    (tmp_path / "u.tsv.zst").write_bytes(b"user_id\tutterance\na\tok\n")
    with pytest.raises(FormatError, match="cannot be decompressed"):
        UserDataset.from_tsv(tmp_path / "u.tsv.zst")
    (tmp_path / "u.parquet").write_bytes(b"user_id\tutterance\na\tok\n")
    with pytest.raises(FormatError, match="not a Parquet file"):
        UserDataset.open(tmp_path / "u.parquet")


def test_what_is_missing_can_be_left_out_and_counted(tmp_path: Path) -> None:
    """A null id or text of Parquet counts as missing too."""
    table = pa.table(
        {
            "user_id": ["a", None, "b", " ", "c"],
            "utterance": ["hello there", "lost", None, "lost", ""],
        }
    )
    pq.write_table(table, tmp_path / "u.parquet")
    with pytest.raises(FormatError, match=r"line 2: .*no user id"):
        UserDataset.open(tmp_path / "u.parquet")
    found = UserDataset.open(tmp_path / "u.parquet", missing="count").facts
    assert (found.users, found.rows_without_user, found.users_without_text) == (1, 2, 2)


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Before anything is read."""
    path = tsv(tmp_path / "u.tsv", ROWS)
    for settings in ({"missing": "ignore"}, {"cap_words": 0}, {"memory_bytes": 10}):
        with pytest.raises(ConfigError):
            UserDataset.from_tsv(path, **settings)
    with pytest.raises(FormatError, match="is a folder; expected a file"):
        UserDataset.from_tsv(tmp_path)
    dataset = UserDataset.from_tsv(path)
    for users in ([0, 0], [3], [-1]):
        with pytest.raises(ConfigError):
            dataset.select(users)
    with pytest.raises(ConfigError):
        dataset.split(1.5)
    with pytest.raises(IndexError):
        dataset.utterances(3)


def test_numbers_and_bytes_are_ids_where_they_tell_users_apart(tmp_path: Path) -> None:
    """Whole numbers that a join turned into floats, and text that is marked as bytes."""
    texts = ["one", "two", "three"]
    for ids in (np.array([7.0, 12.0, 7.0]), np.array([7, 12, 7]), [b"7", b"12", b"7"]):
        pq.write_table(pa.table({"user_id": ids, "utterance": texts}), tmp_path / "u.parquet")
        found = held(UserDataset.from_parquet(tmp_path / "u.parquet"))
        assert found == {"12": ["two"], "7": ["one", "three"]}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([1.0, np.nan]), "line 2: .*no user id"),
        (np.array([1.0, 0.5]), "row 2: the user id 0.5 .* float"),
        (np.array([2.0**53, 1.0]), "row 1: .* float"),
        ([["a"], ["b"]], "type list"),
        ([True, False], "type bool"),
        ([b"a", b"\xff"], "row 2: the user id is not UTF-8"),
    ],
)
def test_ids_that_tell_nobody_apart_are_refused(tmp_path: Path, ids: Any, message: str) -> None:
    """A missing number is no user of its own, who would be many."""
    table = pa.table({"user_id": ids, "utterance": ["one", "two"]})
    pq.write_table(table, tmp_path / "u.parquet")
    with pytest.raises(FormatError, match=message):
        UserDataset.from_parquet(tmp_path / "u.parquet")


def test_a_store_is_its_owners_alone(tmp_path: Path) -> None:
    """It holds what users said, and stands beside a model that anybody may have."""
    (tmp_path / "there").mkdir()
    for store in (tmp_path / "made", tmp_path / "there"):
        UserDataset.from_tsv(tsv(tmp_path / "u.tsv", ROWS), store=store)
        assert stat.S_IMODE((store / "users.arrow").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700


def test_a_store_that_was_changed_is_made_again(tmp_path: Path) -> None:
    """An id that is another one would be a user who has not taken part yet."""
    source = tsv(tmp_path / "u.tsv", ROWS)
    before = UserDataset.from_tsv(source, store=tmp_path / "store")
    file = tmp_path / "store" / "users.arrow"
    content = file.read_bytes()
    assert content.count(b"bea") == 1
    file.write_bytes(content.replace(b"bea", b"bee"))
    again = UserDataset.from_tsv(source, store=tmp_path / "store")
    assert again.user_ids() == ["al", "bea", "cy"]
    assert again.digest == before.digest
    assert file.read_bytes() == content


def test_who_reads_a_store_is_not_given_another_under_way(tmp_path: Path) -> None:
    """A second process that finds another file makes the store anew; the first keeps its own."""
    source = tsv(tmp_path / "u.tsv", ROWS)
    first = UserDataset.from_tsv(source, store=tmp_path / "store")
    second = UserDataset.from_tsv(tsv(source, ROWS[:1]), store=tmp_path / "store")
    assert held(second) == grouped(ROWS[:1])
    assert held(first) == grouped(ROWS)


@pytest.mark.parametrize("size", [(1 << 20) - 9, 1 << 20, (3 << 20) + 5])
def test_a_line_longer_than_a_block_is_one_line(tmp_path: Path, size: int) -> None:
    """Its end before, at and past the end of a block that is read."""
    rows = [("al", "x" * size), ("bea", "y " * 7), ("al", "z" * size)]
    assert held(UserDataset.from_tsv(tsv(tmp_path / "u.tsv", rows))) == grouped(rows)
