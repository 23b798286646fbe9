"""`dlm estimate --engine spark` on two local executors: the local engine's model, to the byte."""

from __future__ import annotations

import bz2
import gzip
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import Result

from cli.trained import told
from dlm.cli.main import program
from dlm.errors import ConfigError, DlmError, EstimationError
from dlm.estimate.pipeline import estimate as estimate_locally
from dlm.estimate.settings import EstimationSettings
from dlm.index.making import build_shard_set
from dlm.ngram.arpa import PARTS_INDEX, ArpaReader, parts_index
from dlm.progress import ProgressReporter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # pyspark's own
]

FALLBACK = (0.5, 1.0, 1.5)

app = program(["estimate"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some hundred lines, some of them empty, the last without line end."""
    r = random.Random(0)
    lines = []
    for _ in range(500):
        picked = (min(int(r.paretovariate(0.6)), 400) for _ in range(r.randint(0, 12)))
        lines.append(" ".join(f"wörd{i}" for i in picked))
    path = tmp_path_factory.mktemp("corpus") / "text"
    path.write_text("\n".join([*lines, "the end"]), encoding="utf-8")
    return path


def estimate_by_spark(
    spark: Any, sources: list[Any], folder: Path | str, settings: EstimationSettings
) -> None:
    """With little at once, so that blocks are many."""
    from dlm.spark.engine import estimate

    estimate(spark, [*map(str, sources)], str(folder), settings, block_tokens=1000)


def made(
    spark: Any, sources: list[Any], folder: Path, settings: EstimationSettings
) -> tuple[str, int]:
    """Hash and size of the text of the model, once it has been read as one."""
    estimate_by_spark(spark, sources, folder, settings)
    return read(folder)


def read(path: Path) -> tuple[str, int]:
    """Of a model in whatever form."""
    with ArpaReader(path) as reader:
        for _ in reader.batches():
            pass
        return reader.text_xxh3, reader.text_bytes


@pytest.mark.promise("spark")
@pytest.mark.parametrize(
    ("order", "prune", "half", "fallback"),
    [
        (1, (), False, FALLBACK),
        (2, (0, 1), True, FALLBACK),
        (3, (), False, None),
        (4, (1,), False, FALLBACK),
        (5, (0, 0, 1, 2), True, FALLBACK),
    ],
)
def test_the_model_is_the_local_engine_s_to_the_byte(
    spark: Any,
    text: Path,
    tmp_path: Path,
    order: int,
    prune: tuple[int, ...],
    half: bool,
    fallback: tuple[float, float, float] | None,
) -> None:
    """All orders; pruned or not; with a vocabulary; whatever the partitions."""
    words = sorted(set(text.read_bytes().split()))
    settings = EstimationSettings(
        order=order,
        prune=prune,
        vocabulary=frozenset(words[::2]) if half else None,
        fallback=fallback,
        workspace_bytes=64 << 20,
    )
    summary = estimate_locally([str(text)], tmp_path / "local.arpa", settings)
    assert all(summary.counts)
    assert made(spark, [text], tmp_path / "parts", settings) == read(tmp_path / "local.arpa")


def test_compressed_files_and_parquet_are_read_as_by_the_local_engine(
    spark: Any, text: Path, tmp_path: Path
) -> None:
    """Several sources in their order; lines with faults are left out and counted alike."""
    lines = text.read_bytes().split(b"\n")
    faulty = [b"a <s> b", b"", b"\xff", *lines[:40], b"nul \0", b"spaced\t \rout"]
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"\n".join(faulty)))
    (tmp_path / "b.bz2").write_bytes(bz2.compress(b"\n".join(lines[40:70])))
    rows = pa.array([*lines[70:100], None, b"two\nlines"], pa.binary())
    pq.write_table(pa.table({"sentence": rows}), tmp_path / "c.parquet")
    # Twice the same text: what is told of it is the same, and counts twice.
    sources = [tmp_path / name for name in ("b.bz2", "c.parquet", "a.gz", "b.bz2")]
    settings = EstimationSettings(
        order=3, fallback=FALLBACK, skip=True, column="sentence", workspace_bytes=64 << 20
    )
    names = [str(source) for source in sources]
    local = estimate_locally(names, tmp_path / "local.arpa", settings)
    assert sum(local.totals.skipped.values()) == 4
    assert made(spark, sources, tmp_path / "parts", settings) == read(tmp_path / "local.arpa")


def run(*arguments: object) -> Result:
    """The command; what it raised is raised here too."""
    return told("estimate", *arguments, "--engine", "spark")


def test_the_command_s_parts_are_sharded_as_one_model_and_replaced_by_the_next(
    spark: Any, text: Path, tmp_path: Path
) -> None:
    """What was there stays until the index is another; no part of an earlier run is left."""
    folder = tmp_path / "m.arpa.d"
    done = run(text, "--order", 2, "--output", folder)
    assert done.exit_code == 0
    assert "interpolating and writing" in done.stderr
    assert "501 lines" in done.stdout
    (folder / "run-killed").mkdir()
    run(text, "--order", 2, "--output", folder, "--prune", "0,1")
    assert len([path for path in folder.iterdir() if path.name.startswith("run-")]) == 1
    settings = EstimationSettings(order=2, prune=(0, 1), workspace_bytes=64 << 20)
    estimate_locally([str(text)], tmp_path / "local.arpa", settings)
    for name in ("m.arpa.d", "local.arpa"):
        build_shard_set(tmp_path / name, tmp_path / f"{name}.shards", 2)
    for path in (tmp_path / "local.arpa.shards").glob("*.arrow"):
        assert (tmp_path / "m.arpa.d.shards" / path.name).read_bytes() == path.read_bytes()


def test_text_is_read_and_parts_are_written_on_another_file_system(
    spark: Any, text: Path, tmp_path: Path, mounted: Path
) -> None:
    """By the address of a file, a folder or a pattern; the model is replaced there too."""
    settings = EstimationSettings(order=2, workspace_bytes=64 << 20)
    estimate_locally([str(text)], tmp_path / "text.arpa", settings)
    (mounted / "text").mkdir()
    shutil.copy(text, mounted / "text/text")
    place = "viewfs://lm/mounted"
    for source, name in ((f"{place}/text/t*", "t*"), (f"{place}/text", "text")):
        estimate_by_spark(spark, [source], f"{place}/m.arpa.d", settings)
        with ArpaReader(mounted / "m.arpa.d") as reader:
            assert f'"sources": ["{name}"]' in reader.comments[0]
    assert read(mounted / "m.arpa.d") == read(tmp_path / "text.arpa")
    assert len(list((mounted / "m.arpa.d").glob("run-*"))) == 1


STAGES = [
    "reading words",
    "counting n-grams and adjusting counts",
    "adding up what follows each context",
    "interpolating and writing",
    "writing the index of the parts",
]


def test_a_run_that_ends_at_any_stage_leaves_the_model_before_and_a_rerun_succeeds(
    spark: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it cleans up nothing else is left; where it was killed, the next run does that."""
    from dlm.spark.engine import estimate
    from dlm.spark.folder import ModelFolder

    before, after = (
        EstimationSettings(order=1, workspace_bytes=64 << 20),
        EstimationSettings(order=2),
    )
    folder = tmp_path / "m"

    def ended(stage: str) -> None:
        def tell(line: str) -> None:
            if line == stage:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            estimate(spark, [str(text)], str(folder), after, progress=ProgressReporter(tell))

    ended(STAGES[-1])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
    with pytest.raises((DlmError, OSError)):
        ArpaReader(folder)
    estimate_locally([str(text)], tmp_path / "before.arpa", before)
    assert made(spark, [text], folder, before) == read(tmp_path / "before.arpa")
    monkeypatch.setattr(ModelFolder, "discard", lambda self: None)
    for stage in STAGES:
        ended(stage)
        assert read(folder) == read(tmp_path / "before.arpa")
    assert len(list(folder.glob("run-*"))) == 2
    estimate_locally([str(text)], tmp_path / "after.arpa", after)
    assert made(spark, [text], folder, after) == read(tmp_path / "after.arpa")
    assert len(list(folder.glob("run-*"))) == 1


def test_an_interruption_once_the_index_is_there_keeps_the_parts(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renamed or written there: they are the model, though what was before could not be removed."""
    from dlm.spark.folder import ModelFolder

    for renamed, last in ((True, False), (False, False), (True, True)):
        folder = ModelFolder(spark, str(tmp_path / "m"))
        if not renamed:  # a file system of which Hadoop knows no such way
            folder._configuration = spark._jvm.org.apache.hadoop.conf.Configuration(False)
        assert (folder._renaming_context() is not None) == renamed
        (Path(folder.run_path) / "order=1").mkdir(parents=True)
        (Path(folder.run_path) / "order=1/part-0").write_text("-1\t<unk>\n-1\t<s>\n-1\t</s>\n")
        index = parts_index([f"interrupted: {last}"], [3], [folder.parts(1)])
        if last:
            monkeypatch.setattr(folder, "_names", interrupted)
            with pytest.raises(KeyboardInterrupt):
                folder.commit(index)
            folder.discard()
        else:
            folder.commit(index)
        read(tmp_path / "m")
    with ArpaReader(tmp_path / "m") as reader:
        assert reader.comments == ["interrupted: True"]
    assert len(list((tmp_path / "m").glob("run-*"))) == 2


def interrupted(_: object) -> None:
    """As Ctrl-C."""
    raise KeyboardInterrupt


def test_parts_are_in_the_order_of_their_numbers(spark: Any, tmp_path: Path) -> None:
    """Which may have more than the five digits that Spark writes."""
    from dlm.spark.folder import ModelFolder

    folder = ModelFolder(spark, str(tmp_path / "m"))
    place = Path(folder.run_path) / "order=1"
    place.mkdir(parents=True)
    names = ["part-00002-x.c000.txt", "part-99999-x.c000.txt", "part-100000-x.c000.txt"]
    for name in reversed(names):
        (place / name).write_text("")
    assert [name.split("/")[-1] for name, _ in folder.parts(1)] == names


# Kills itself and what it started, the engine of Spark, while parts are being written.


def test_what_cannot_be_is_refused(spark: Any, text: Path, tmp_path: Path) -> None:
    """With what to do."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/other").write_text("kept")
    (tmp_path / "folder/_hidden").write_text("passed over")
    (tmp_path / "empty").write_text("")
    (tmp_path / "bad").write_bytes(b"good\na <s>\n")
    for suffix in ("xz", "lz4"):
        shutil.copy(text, tmp_path / f"text.{suffix}")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(text.read_bytes())[:-9])
    pq.write_table(pa.table({"n": [1]}), tmp_path / "n.parquet")
    out = ("--output", tmp_path / "m")
    with pytest.raises(ConfigError, match=r"/file .*--output"):
        run(text, "--output", tmp_path / "file")
    with pytest.raises(ConfigError, match="other files"):
        run(text, "--output", tmp_path / "folder")
    with pytest.raises(ConfigError, match="standard output"):
        run(text, "--output", "-")
    with pytest.raises(ConfigError, match="standard input"):
        run("-", *out)
    with pytest.raises(ConfigError, match=r"(?i)path does not exist|path_not_found"):
        run(f"file:{tmp_path}/nothing", *out)
    with pytest.raises(ConfigError, match="/_hidden"):
        run(tmp_path / "folder/_hidden", *out)
    with pytest.raises(ConfigError, match="xz"):
        run(tmp_path / "text.xz", *out)
    with pytest.raises(ConfigError, match="lz4"):
        run(tmp_path / "text.lz4", *out)
    with pytest.raises(EstimationError, match=r"/cut\.gz.*end of input"):
        run(tmp_path / "cut.gz", *out)
    with pytest.raises(ConfigError, match=r"'text'; .* n"):
        run(tmp_path / "n.parquet", *out)
    with pytest.raises(ConfigError, match="bigint"):
        run(tmp_path / "n.parquet", "--text-column", "n", *out)
    with pytest.raises(ConfigError, match="--executor-memory"):
        run(text, "--memory", "4G", *out)
    with pytest.raises(EstimationError, match="no line"):
        run(tmp_path / "empty", *out)
    with pytest.raises(EstimationError, match=r"/bad, line 2 .*<s>"):
        run(tmp_path / "bad", *out)
    assert not list(tmp_path.rglob("part-*"))


@pytest.mark.parametrize(
    ("raised", "error", "says"),
    [
        (ModuleNotFoundError("No module named 'numba'"), ConfigError, "no numba"),
        (OSError(28, "No space left on device"), EstimationError, "counting.*spark.local.dir"),
    ],
)
def test_what_an_executor_lacks_is_named(
    spark: Any, raised: Exception, error: type[DlmError], says: str
) -> None:
    """A package, or room, with the stage."""
    from dlm.spark.jobs import JobStages, between, explained

    def stage(part: int, values: Any) -> Any:
        raise raised

    stages = JobStages(spark, ProgressReporter(lambda _: None))
    with pytest.raises(error, match=says), explained(stages, "the model"):
        stages.begin("counting")
        between(spark.sparkContext.parallelize([1], 1), 2, stage).collect()


def test_the_program_for_spark_submit_is_the_command() -> None:
    """Though modules beside it have names of the standard library."""
    import dlm.cli.submit

    done = subprocess.run(
        [sys.executable, str(dlm.cli.submit.__file__), "estimate", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--engine" in done.stdout


def test_the_index_is_named_as_the_readme_says() -> None:
    """What an operator looks for."""
    assert PARTS_INDEX == "model.json"
