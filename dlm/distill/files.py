"""Distills a model from files to a file: what `dlm distill` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlm.checkpoint import CHECKPOINT
from dlm.distill.counts import work
from dlm.distill.counts.sampling import GivenText, Sampling
from dlm.distill.fitting.fit import DistilledModel
from dlm.distill.fitting.unigrams import Unigrams, read_unigrams, with_unigrams
from dlm.distill.request import SELF, DistillRequest
from dlm.distill.sampled import (
    Inference,
    SampledSource,
    count_restricted,
    distill_inferred,
    distill_samples,
)
from dlm.distill.sources.backoff import distill_backoff
from dlm.distill.sources.source import load_object
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns, memory_bytes as model_bytes
from dlm.estimate.pipeline import resident_bytes
from dlm.estimate.text import Reader
from dlm.federated.account.records import merged_record
from dlm.kenlm.open import open_ngrams
from dlm.ngram.arpa import provenance_line
from dlm.record.counts_file import traces_of_users
from dlm.record.inputs import check_public
from dlm.record.provenance import Provenance, file_digest
from dlm.record.sidecar import read_beside, sidecar
from dlm.resources import available_bytes
from dlm.units import counted

Tell = Callable[[str], None]


def distill_files(
    request: DistillRequest, *, progress: Tell = lambda line: None
) -> DistilledModel | None:
    """Writes the model nearest to a source on a topology, or only writes counts and returns
    None. The same inputs and options give the same bytes. The output is replaced whole or not at
    all, and has a record composed from those of the inputs.

    Raises
        ConfigError   models too big for memory; mismatched words; stored counts of different inputs
        SourceError   a Python object that does not return distributions
        FormatError, PrivacyError  a file or a record that cannot be read
    """
    limit = available_bytes() if request.memory_bytes is None else request.memory_bytes
    _check_memory(request, limit)
    inputs = _read(request, progress)
    if request.is_exact:
        assert inputs.topology is not None
        about: dict[str, Any] = {"method": "relative entropy, exact counts"}
        topology, inputs.topology = inputs.topology, None
        made = distill_backoff(inputs.source, topology, threads=request.threads, progress=progress)
    else:
        source = SampledSource(inputs.source, request.source, _digest(request))
        text = None if request.text is None else _given(request.text, request.public)
        parts = [work.settings_of(given) for given in request.counts]
        if missing := work.missing_parts(parts):
            progress(f"note: some parts are missing from --counts: {', '.join(missing)}")
        about = {"method": "relative entropy, samples", **_about(request, text, parts)}
        if "text" in about:
            what, line = "the text that was counted", ""
            if parts:
                line = str(parts[0].get("text_record", ""))
            if text is not None:
                what, line = f"the text {text.name}", text.record
            inputs.comments[what] = [line or _record(what, None, request.public).line]
        sampled = _sampled(request, inputs, source, text, limit, progress)
        if sampled is None:
            return None
        made = sampled
    if made.dropped:
        progress(
            f"dropped {counted(made.dropped, 'n-gram')} of the topology, which contain "
            f"{counted(made.foreign_words, 'word')} that {request.source} does not know"
        )
    assert request.output is not None
    if inputs.counted is not None:
        model = with_unigrams(
            made.fit.model,
            inputs.counted,
            request.unigram_weight,
            cased=inputs.cased,
            progress=progress,
        )
        made = replace(made, fit=replace(made.fit, model=model))
    model = made.fit.model
    progress(f"writing {counted(sum(model.counts), 'n-gram')} to {request.output}")
    privacy = merged_record(inputs.comments, [], request.public, step="distill")
    for line in privacy:
        progress(f"privacy: {Provenance.from_json(line).statement(with_standing=False)}")
    lines = [provenance_line("distill", **about, inputs=inputs.facts), *privacy]
    model.write(request.output, comments=lines)
    return made


@dataclass
class _Inputs:
    source: Any = None
    topology: ModelColumns | None = None
    cased: ModelColumns | None = None
    counted: Unigrams | None = None
    facts: list[dict[str, object]] = field(default_factory=list)
    comments: dict[str, list[str]] = field(default_factory=dict)


def needed_bytes(counts: Sequence[int]) -> int:
    # Each n-gram of the union also takes some float64 columns and sampling states.
    return 2 * model_bytes(counts) + 130 * sum(counts)


def _check_memory(request: DistillRequest, limit: int) -> None:
    paths = [Path(request.source)] if request.kind == "model" else []
    paths += [path for path in (request.external, request.capitalize) if path is not None]
    counts = []
    for path in paths:
        with open_ngrams(path) as reader:
            counts.append(tuple(reader.counts))
    needed = sum(map(needed_bytes, counts))
    if needed > limit:
        raise ConfigError(
            f"{' and '.join(map(str, paths))}: {counted(sum(map(sum, counts)), 'n-gram')} need "
            f"about {needed:,} bytes of memory to distill; the limit is {limit:,}. Raise --memory, "
            "or prune the models first"
        )


def _read(request: DistillRequest, tell: Tell) -> _Inputs:
    inputs = _Inputs()
    tell(f"reading {request.source}")
    if request.kind == "network":
        from dlm.distill.sources.network import NetworkSource  # needs jax

        network = inputs.source = NetworkSource(Path(request.source))
        name = Path(request.source).name
        facts: dict[str, object] = {"name": name, "as": "network", "rounds": network.rounds}
        if network.inventory is not None:
            facts["pieces"] = network.inventory.size
        inputs.facts.append(facts)
        inputs.comments[f"the network {name}"] = [network.record.line]
    elif request.kind == "object":
        inputs.source = load_object(request.source)
        what = f"the source {request.source}"
        own = getattr(inputs.source, "record", None)
        if not isinstance(own, Provenance | None):
            raise ConfigError(
                f"the record of {request.source} is a {type(own).__name__}; expected a Provenance "
                "(dlm.record.provenance), or None"
            )
        record = _record(what, own, request.public)
        inputs.facts.append({"name": request.source, "as": "object"})
        inputs.comments[what] = [record.line]
    else:
        inputs.source = _model(inputs, "source", Path(request.source))
    if request.external is not None:
        tell(f"reading {request.external}")
        inputs.topology = _model(inputs, "topology", request.external)
    if request.capitalize is not None:
        tell(f"reading {request.capitalize}")
        inputs.cased = _model(inputs, "capitaliser", request.capitalize)
    if request.unigrams is not None:
        _read_unigrams(inputs, request, request.unigrams)
    if request.kind == "network":
        from dlm.distill.sources.pieces_to_words import in_words

        inputs.source = in_words(inputs.source, inputs.topology, inputs.cased, tell)
    return inputs


def _read_unigrams(inputs: _Inputs, request: DistillRequest, path: Path) -> None:
    inputs.counted = read_unigrams(path, request.public)
    record = inputs.counted.record
    inputs.comments[f"the unigrams {path.name}"] = [] if record is None else [record.line]
    inputs.facts.append({"name": path.name, "as": "unigrams", "weight": request.unigram_weight})


def _model(inputs: _Inputs, role: str, path: Path) -> ModelColumns:
    columns = ModelColumns.read(path)
    inputs.facts.append(
        {
            "name": path.name,
            "as": role,
            "counts": list(columns.counts),
            "comments": columns.comments,
        }
    )
    inputs.comments[f"the {role} {path.name}"] = columns.comments
    return columns


def _record(what: str, record: Provenance | None, public: str) -> Provenance:
    if record is not None:
        return record
    if public:
        return Provenance.public(public, what)
    return Provenance.none(f"{what} has no record, so nothing says whose text it comes from")


def _digest(request: DistillRequest) -> str | None:
    """Returns the SHA-256 of a network's checkpoint and casing model, or None for a source that is
    identified by its answers."""
    path = Path(request.source)
    if request.kind != "network":
        return None
    found = file_digest(path if path.is_file() else path / CHECKPOINT)
    if request.capitalize is not None:
        found += f"+{file_digest(request.capitalize)}"
    return found


def _given(path: Path, public: str) -> GivenText:
    """Names a text whose contexts are counted; PrivacyError if users' text is declared public."""

    def blocks() -> Iterator[bytes]:
        return (b.lines for b in Reader([str(path)], scored=True).read() if b.size)

    sha256, what = file_digest(path), f"the text {path.name}"
    record: Provenance | None = None
    if sidecar(path).exists():
        record = read_beside(path, sha256)
    elif public:
        check_public(path, public, "--public-attested-by")
    elif beside := traces_of_users(path):
        record = Provenance.none(f"{beside[0].name} says that {what} comes from users")
    return GivenText(path.name, sha256, blocks, "" if record is None else record.line)


def _about(
    request: DistillRequest, text: GivenText | None, counted: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    about: dict[str, Any] = {}
    if text is not None:
        about["text"] = {"name": text.name, "sha256": text.sha256}
    if counted:
        about["parts"] = [part[work.SHARE] for part in counted]
        if "text" in counted[0]:
            about["text"] = {"sha256": counted[0]["text"]}
    if request.samples is not None:
        about |= {"samples": int(request.samples), "seed": request.seed}
    if request.infers:
        about |= {
            "topology": SELF if request.external is None else f"{SELF}+topology",
            "order": request.order,
            "ngrams": request.ngrams,
            "interpolated": request.interpolated,
        }
    return about


def _sampled(
    request: DistillRequest,
    inputs: _Inputs,
    source: SampledSource,
    text: GivenText | None,
    limit: int,
    tell: Tell,
) -> DistilledModel | None:
    topology, inputs.topology = inputs.topology, None
    sampling: Sampling | None = None
    if not request.counts:
        sampling = Sampling(int(request.samples or 0), request.seed, request.part, text)
    if request.infers:
        assert sampling is not None
        assert request.output is not None
        return distill_inferred(
            source,
            Inference(request.order, request.ngrams, request.interpolated),
            sampling,
            external=topology,
            prior=request.prior,
            threads=request.threads,
            folder=request.work,
            scratch=request.output.absolute().parent,
            memory_bytes=(limit - resident_bytes()) // 2,
            progress=tell,
        )
    assert topology is not None
    if request.output is None:
        count_restricted(
            source, topology, sampling, folder=request.work, threads=request.threads, progress=tell
        )
        return None
    return distill_samples(
        source,
        topology,
        sampling=sampling,
        prior=request.prior,
        threads=request.threads,
        folder=request.work,
        added=request.counts,
        progress=tell,
    )
