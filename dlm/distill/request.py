"""Describes what to distill and how, and checks that the options go together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dlm.checkpoint import CHECKPOINT
from dlm.distill.fitting.infer import MOST_ORDER
from dlm.distill.fitting.unigrams import check_weight
from dlm.distill.settings import DistillSettings
from dlm.distill.sources.source import is_object_name
from dlm.errors import ConfigError

SELF = "self"


@dataclass(frozen=True)
class DistillRequest(DistillSettings):
    """A request to `files.distill_files`; ConfigError for options that do not go together.

    Fields
        source        an ARPA file; the folder of a run of `dlm federate`; `module:factory`, a
                      Python object that implements `source.Source`
        topology      an ARPA file, whose values are ignored; `self` for n-grams that the source
                      produces; `self+FILE` for both
        output        ARPA file, compressed according to its suffix; None to only count into `work`
        samples       number of sentences to sample; None for the exact counts of an ARPA file
        text          file whose contexts are counted instead of samples, one sentence per line
        work          folder for counts; the same request resumes from it
        counts        the `work` folders of all parts; their counts are added up instead of counting
        capitalize    ARPA file of cased text, for a network of words in lower case
        unigrams      counts of words that replace the model's unigrams or, with a weight below 1,
                      are mixed with them
        public        who attests that inputs without a privacy record contain no user's text
        memory_bytes  memory limit; None means the free memory
    """

    source: str
    topology: str
    output: Path | None = None
    text: Path | None = None
    order: int = 3
    ngrams: int | None = None
    interpolated: bool = False
    part: tuple[int, int] = (1, 1)
    work: Path | None = None
    counts: tuple[Path, ...] = ()
    capitalize: Path | None = None
    unigrams: Path | None = None
    unigram_weight: float = 1.0
    public: str = ""
    memory_bytes: int | None = None
    threads: int = 2

    @property
    def kind(self) -> str:
        path = Path(self.source)
        if path.name == CHECKPOINT or (path / CHECKPOINT).exists():
            return "network"
        return "object" if not path.exists() and is_object_name(self.source) else "model"

    @property
    def infers(self) -> bool:
        """Whether the topology is, or includes, n-grams inferred from the source."""
        return self.topology == SELF or self.topology.startswith(f"{SELF}+")

    @property
    def external(self) -> Path | None:
        name = self.topology.removeprefix(SELF).removeprefix("+") if self.infers else self.topology
        return Path(name) if name else None

    @property
    def is_exact(self) -> bool:
        return self.kind == "model" and self.samples is None and not (self.text or self.counts)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads < 1:
            raise ConfigError(f"--threads is {self.threads}; expected 1 or more")
        if self.capitalize is not None and self.kind != "network":
            what = "a Python object" if self.kind == "object" else "an ARPA file"
            raise ConfigError(
                f"--capitalize needs a network; {self.source} is {what}, whose words are "
                "already cased"
            )
        if not self.source:
            raise ConfigError(
                "SOURCE is empty; give an ARPA file, a run of dlm federate, or module:factory"
            )
        check_weight(self.unigram_weight)
        self._check_sentences()
        self._check_topology()
        self._check_output()

    def _check_sentences(self) -> None:
        if sum((self.samples is not None, self.text is not None, bool(self.counts))) > 1:
            raise ConfigError("give only one of --samples, --text and --counts")
        if self.kind != "model" and self.samples is None and not (self.text or self.counts):
            what = "a network" if self.kind == "network" else "a Python object"
            raise ConfigError(
                f"{self.source} is {what}, which must be sampled; give --samples, such as 1e5"
            )

    def _check_topology(self) -> None:
        if not self.topology or self.topology == f"{SELF}+":
            raise ConfigError(
                f"--topology {self.topology or 'is empty'}: no file is named; give an ARPA file, "
                f"{SELF}, or {SELF}+FILE"
            )
        if self.infers and not 1 <= self.order <= MOST_ORDER:
            raise ConfigError(
                f"--order is {self.order} with --topology self; expected 1 to {MOST_ORDER}"
            )
        if not self.infers and (self.ngrams is not None or self.interpolated):
            raise ConfigError(
                "--ngrams and --interpolated need --topology self; to make a given topology "
                "smaller, use dlm prune"
            )
        if self.interpolated and self.external is None:
            raise ConfigError("--interpolated needs two topologies; give --topology self+FILE")
        if self.infers and self.samples is None:
            raise ConfigError(
                f"--topology {self.topology} is inferred from samples; give --samples, such as 1e5"
            )
        if self.infers and self.part != (1, 1):
            raise ConfigError(
                "all parts need the same topology, but --topology self would infer a different one "
                "for each; distill once with self, then give that model as the topology of the "
                "parts"
            )

    def _check_output(self) -> None:
        if self.is_exact and self.work is not None:
            raise ConfigError(
                "--work stores counts of --samples or --text; give one of them, or leave out --work"
            )
        if self.part != (1, 1) and (self.output is not None or self.is_exact or self.counts):
            raise ConfigError(
                "--part makes counts, not a model: give --work without --output, then pass the "
                "folders of all parts to --counts"
            )
        if self.output is None and (self.work is None or self.counts or self.infers):
            raise ConfigError("give --output; to only count, give --work with --samples or --text")
