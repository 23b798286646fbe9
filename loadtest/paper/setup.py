"""The input of all experiments: the model, the trace, the folder for results, and sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dlm.progress import ProgressReporter


@dataclass
class Setup:
    """One evaluation.

    model      folder of a shard set of exact encoding, of one shard
    arpa       the same model as an ARPA file, compressed or not
    work       folder for results, and for shard sets and caches between runs; an experiment's files
               begin with its name
    servers    sizes of real clusters on this machine, ascending
    processes  client processes of a load
    quick      the smallest sizes that still make sense, for tests
    held_out   text for perplexities, a sentence per line, compressed or not; None leaves them out,
               with a note
    kenlm_bin  folder of KenLM's build_binary; None leaves out its rows, with a note
    """

    model: Path
    arpa: Path
    trace: Path
    work: Path
    servers: tuple[int, ...] = (1, 2, 3, 4)
    processes: int = 1
    seed: int = 1
    quick: bool = False
    held_out: Path | None = None
    kenlm_bin: Path | None = None
    progress: ProgressReporter = field(default_factory=lambda: ProgressReporter(lambda line: None))

    @property
    def kept(self) -> Path:
        return self.work / "kept"
