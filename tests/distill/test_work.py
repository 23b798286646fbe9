"""Counts on disk: killed and gone on with, refused, added up."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forked
from distill.plain import PlainSource, a_source
from dlm import checkpoint
from dlm.distill.counts import sampling as sampling_module, visits, work
from dlm.distill.counts.sampling import GivenText, Sampling
from dlm.distill.fitting.topology import closed, restricted
from dlm.distill.sampled import SampledSource, SentenceCollection, collect_sentences, count_source
from dlm.errors import ConfigError, FormatError
from dlm.estimate.columns import ModelColumns

ROOT = Path(__file__).parents[2]
LINES = [f"{'a ' * (i % 5)}b {'c ' * (i % 7)}" for i in range(5000)]
TEXT = GivenText("lines", "1" * 64, lambda: ["\n".join(LINES).encode()])


class Killed(Exception):
    """In place of a signal."""


def a_pair(seed: int, folder: Path, kind: str) -> tuple[SampledSource, ModelColumns]:
    """A source of a kind, and a topology of its words."""
    plain, columns, _ = a_source(seed, folder)
    _, other, _ = a_source(seed + 100, folder)
    source = SampledSource(columns if kind == "backoff" else PlainSource(plain))
    return source, closed(restricted(other, source.vocabulary).model)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few sentences make many."""
    monkeypatch.setattr(sampling_module, "DRAWN", 100)
    monkeypatch.setattr(visits, "ASKED", 100)
    monkeypatch.setattr(sampling_module, "GIVEN", 100)


def killed(blocks: Iterator[Iterator[int]], steps: int | None) -> Iterator[Iterator[int]]:
    """Blocks of which so many steps are taken."""
    done = itertools.count()

    def each(block: Iterator[int]) -> Iterator[int]:
        for begun in block:
            if next(done) == steps:
                raise Killed
            yield begun

    return map(each, blocks)


def counted(
    source: SampledSource, topology: ModelColumns, sampling: Sampling, file: Path | None,
    steps: int | None = None, every_s: float = 3.0,
) -> list[np.ndarray]:  # fmt: skip
    """All sums; killed after so many steps, saving every so many blocks."""
    counting = source.counting(topology)
    settings = {"source": source.identity(), "topology": work.ngrams_digest(topology)}
    clock = itertools.count()
    work.count_all(
        killed(counting.blocks(sampling), steps),
        counting,
        settings | sampling.settings(),
        file=file,
        saved_every_s=every_s,
        clock=lambda: float(next(clock)),
    )
    return [array.copy() for array in counting.sums()]


@pytest.mark.promise("counting_resumes")
@pytest.mark.parametrize("kind", ["backoff", "protocol"])
@pytest.mark.parametrize("given", ["samples", "text"])
def test_counting_that_is_killed_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, kind: str, given: str, small_blocks: None
) -> None:
    """Between two savings; what is done is not finished again."""
    source, topology = a_pair(1, tmp_path, kind)
    sampling = Sampling(text=TEXT) if given == "text" else Sampling(700, seed=5)
    whole = counted(source, topology, sampling, None)
    file = tmp_path / "work" / work.COUNTS
    kills = 0
    while True:
        try:
            steps = 4 if kind == "backoff" else 250
            found = counted(source, topology, sampling, file, steps, every_s=2.0)
            break
        except Killed:
            kills += 1
            assert kills < 100
    assert kills > 0
    for a, b in zip(found, whole, strict=True):
        np.testing.assert_array_equal(a, b)
    again = counted(source, topology, sampling, file, steps=0)  # nothing is left to do
    np.testing.assert_array_equal(again[-1], whole[-1])


@pytest.mark.parametrize("kind", ["backoff", "protocol", "its own samples"])
def test_sentences_are_collected_again_from_where_it_was_killed(
    tmp_path: Path, kind: str, small_blocks: None
) -> None:
    """Those of the blocks that were whole are kept."""
    plain, columns, _ = a_source(2, tmp_path)
    own = PlainSource(plain)
    if kind == "its own samples":
        own.sample = lambda seed, n: [[2 + (seed + i) % 3] * (i % 4) for i in range(n)]  # type: ignore[attr-defined]
    source = SampledSource(columns if kind == "backoff" else own)
    sampling = Sampling(3000 if kind == "its own samples" else 1000, seed=1)
    whole = collect_sentences(source, sampling)
    file = tmp_path / work.SENTENCES
    settings = {"source": source.identity(), **sampling.settings()}
    for steps in (3, 2, None):
        collection, clock = SentenceCollection(source.sentences()), itertools.count()
        limit = None if steps is None else steps * (1 if kind != "protocol" else 200)
        try:
            work.count_all(
                killed(collection.blocks(sampling), limit), collection, settings, file=file,
                saved_every_s=1.0, clock=lambda clock=clock: float(next(clock)),  # type: ignore[misc]
            )  # fmt: skip
        except Killed:
            continue
    (said,) = collection.sums()
    np.testing.assert_array_equal(said, whole)
    np.testing.assert_array_equal(collect_sentences(source, sampling, folder=tmp_path), whole)


@pytest.mark.promise("counting_resumes")
def test_another_source_topology_or_seed_is_refused_by_name(tmp_path: Path) -> None:
    """And so are a damaged file, and one of something else."""
    source, topology = a_pair(3, tmp_path, "backoff")
    count_source(source, topology, Sampling(50, seed=1), folder=tmp_path)
    other, theirs = a_pair(4, tmp_path, "backoff")
    for given, shape, sampling, named in (
        (other, topology, Sampling(50, seed=1), "source.model was"),
        (source, theirs, Sampling(50, seed=1), "topology was"),
        (source, topology, Sampling(50, seed=2), "share.seed was 1 and is 2"),
        (source, topology, Sampling(60, seed=1), "share.samples was 50 and is 60"),
        (source, topology, Sampling(text=TEXT), "text was None"),
    ):
        with pytest.raises(ConfigError, match=named):
            count_source(given, shape, sampling, folder=tmp_path)
    file = tmp_path / work.COUNTS
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(FormatError, match="cut off"):
        count_source(source, topology, Sampling(50, seed=1), folder=tmp_path)


@pytest.mark.parametrize("kind", ["backoff", "protocol"])
def test_the_counts_of_parts_add_up(tmp_path: Path, kind: str, small_blocks: None) -> None:
    """As those of one process do that counts all parts; unfinished, foreign and doubled ones are
    refused."""
    source, topology = a_pair(5, tmp_path, kind)
    folders = [tmp_path / f"part{i}" for i in (1, 2, 3)]
    parts = [Sampling(100, part=(i, 3)) for i in (1, 2, 3)]
    alone = [
        count_source(source, topology, part, folder=folder)
        for part, folder in zip(parts, folders, strict=True)
    ]
    counts, entropy = count_source(source, topology, None, added=folders)
    expected = alone[0][0] + alone[1][0] + alone[2][0]
    for a, b in zip(
        [*counts.ngrams, *counts.contexts], [*expected.ngrams, *expected.contexts], strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    assert entropy == pytest.approx(sum(one for _, one in alone), rel=1e-9)
    for added, said in (
        ([folders[0], folders[0]], "counted the same sentences"),
        ([tmp_path / "none"], "does not exist"),
    ):
        with pytest.raises(ConfigError, match=said):
            count_source(source, topology, None, added=added)
    other, theirs = a_pair(6, tmp_path, kind)
    foreign = tmp_path / "foreign"
    count_source(other, theirs, Sampling(10), folder=foreign)
    with pytest.raises(ConfigError, match="cannot be added to the other counts"):
        count_source(source, topology, None, added=[*folders, foreign])
    count_source(source, topology, Sampling(text=TEXT), folder=foreign / "text")
    # A text is never added to samples unseen: the record of the model depends on it.
    for added in ([foreign / "text", folders[0]], [folders[0], foreign / "text"]):
        with pytest.raises(ConfigError, match="text was"):
            count_source(source, topology, None, added=added)
    unfinished = tmp_path / "unfinished" / work.COUNTS
    with pytest.raises(Killed):
        steps = 2 if kind == "backoff" else 900
        counted(source, topology, Sampling(60_000), unfinished, steps, 1.0)
    with pytest.raises(ConfigError, match="is not finished"):
        count_source(source, topology, None, added=[unfinished])


def edited(
    folder: Path, to: Path, change: Callable[[dict[str, Any], dict[str, Any], list[Any]], None]
) -> Path:
    """Counts that somebody changed, with a checksum of what they are now."""
    found = checkpoint.read(folder / work.COUNTS)
    settings, facts = checkpoint.canonical(found.settings), checkpoint.canonical(found.facts)
    arrays = [array.copy() for array in found.arrays]
    change(settings, facts, arrays)
    to.mkdir()
    checkpoint.save(to / work.COUNTS, arrays, settings, facts=facts)
    return to


def test_counts_that_were_edited_are_refused(tmp_path: Path) -> None:
    """What is no number of visits, another shape, a part copied under another seed; and nothing of
    it is taken up."""
    source, topology = a_pair(7, tmp_path, "protocol")
    part = Sampling(30, part=(1, 2))
    count_source(source, topology, part, folder=tmp_path / "part")

    def filled(value: float) -> Callable[..., None]:
        return lambda settings, facts, arrays: arrays[1].fill(value)

    def other_seed(settings: dict[str, Any], facts: object, arrays: object) -> None:
        settings["share"]["seed"] = 99

    wrong: dict[str, Callable[..., None]] = {
        "nan": filled(np.nan),
        "negative": filled(-1.0),
        "infinite": filled(np.inf),
        "array less": lambda settings, facts, arrays: arrays.pop(),
        "short array": lambda settings, facts, arrays: arrays.append(arrays.pop(0)[:1]),
        "text": lambda settings, facts, arrays: arrays.append(arrays.pop().astype("S8")),
        "share": lambda settings, facts, arrays: settings.update(share=5),
    }
    for name, change in wrong.items():
        with pytest.raises(FormatError):
            count_source(
                source, topology, None, added=[edited(tmp_path / "part", tmp_path / name, change)]
            )
    copy = edited(tmp_path / "part", tmp_path / "copy", other_seed)
    with pytest.raises(ConfigError, match="have identical counts"):
        count_source(source, topology, None, added=[tmp_path / "part", copy])
    with pytest.raises(FormatError, match="Remove it to count again"):
        count_source(source, topology, part, folder=tmp_path / "array less")


def test_counts_are_for_their_owner_alone(tmp_path: Path) -> None:
    """They may be of a text, and hold words of it."""
    source, topology = a_pair(7, tmp_path, "protocol")
    count_source(source, topology, Sampling(3), folder=tmp_path / "part")
    assert (tmp_path / "part" / work.COUNTS).stat().st_mode & 0o777 == 0o600


def test_parts_that_are_not_given_are_named() -> None:
    """Of samples by their seed, and of a text; none where all are there."""
    samples = [Sampling(90, seed=seed, part=part).settings() for seed, part in
               ((0, (1, 3)), (0, (3, 3)), (4, (1, 1)), (5, (2, 2)))]  # fmt: skip
    assert work.missing_parts(samples) == ["2/3 of seed 0", "1/2 of seed 5"]
    assert work.missing_parts(samples[2:3]) == []
    text = [Sampling(text=TEXT, part=(2, 2)).settings()]
    assert work.missing_parts(text) == ["1/2 of the text"]


WORKER = """
import sys
from pathlib import Path
from dlm.distill import sampled
from dlm.distill.counts import work
from dlm.distill.counts.sampling import Sampling
from dlm.distill.fitting.topology import closed
from dlm.estimate.columns import ModelColumns
work.SAVED_EVERY_S = work.count_all.__kwdefaults__["saved_every_s"] = 0.0
model = ModelColumns.read(sys.argv[1])
source = sampled.SampledSource(model)
counts, _ = sampled.count_source(
    source, closed(model), Sampling(int(sys.argv[2])), folder=Path(sys.argv[3])
)
print(*(value.hex() for value in counts.contexts[1]))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_for_good_loses_no_bit(tmp_path: Path) -> None:
    """SIGKILL in the midst of saving and counting; two at once are refused."""
    _, columns, _ = a_source(8, tmp_path)

    def start(samples: int, folder: Path) -> subprocess.Popen[str]:
        return forked.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path / "8.arpa"), str(samples), str(folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    whole, _ = count_source(SampledSource(columns), closed(columns), Sampling(1_500_000))
    process = start(1_500_000, tmp_path / "work")
    file = tmp_path / "work" / work.COUNTS
    while not file.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    second = start(1_500_000, tmp_path / "work")
    if process.poll() is None:
        _, said = second.communicate(timeout=120)
        assert second.returncode == 0 or "another process is counting" in said
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    third = start(1_500_000, tmp_path / "work")
    printed, said = third.communicate(timeout=300)
    assert third.returncode == 0, said
    assert printed.split() == [float(value).hex() for value in whole.contexts[1]]
    assert not [path for path in file.parent.iterdir() if path.name.endswith(".partial")]
