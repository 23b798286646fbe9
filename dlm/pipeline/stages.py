"""The stages of a pipeline, with the inputs and outputs of each. A stage calls the same function as
the command of the same name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict

from dlm.checkpoint import CHECKPOINT
from dlm.distill.counts.work import COUNTS
from dlm.federated.users import TOKENIZERS, UserDataset
from dlm.files import write_whole
from dlm.pipeline.quality import shown
from dlm.pipeline.settings import PipelineSettings
from dlm.pipeline.stage import Places, Stage, stage_plan
from dlm.pipeline.user_stages import federate_stage, pieces_stage, unigrams_stage
from dlm.progress import ProgressReporter
from dlm.resources import available_bytes

BLOCK_BYTES = 1 << 20
HELD_OUT_NOTE = "computed from held-out users' text without noise; no guarantee covers it"


def stages_of(settings: PipelineSettings) -> list[Stage]:
    """Returns the stages in order. `estimate`, which may fail, is first: it uses no users' text,
    so its failure costs no privacy."""
    at = Places(settings.run.folder)
    made = [_estimate(settings, at), unigrams_stage(settings, at), pieces_stage(settings, at)]
    made += [federate_stage(settings, at), _distill(settings, at), _prune(settings, at)]
    made += [_measure(settings, at), _shard(settings, at)]
    return [stage for stage in made if stage is not None]


def _estimate(settings: PipelineSettings, at: Places) -> Stage | None:
    given, text = settings.estimate, settings.inputs.text
    if given is None or text is None:
        return None
    memory = settings.run.memory_bytes
    asked = given.settings(
        available_bytes() // 2 if memory is None else memory, settings.run.threads
    )

    def run(progress: ProgressReporter) -> None:
        from dlm.estimate.pipeline import estimate

        estimate([str(text)], at.topology, asked, progress=progress)

    return Stage(
        stage_plan(at, "estimate", asdict(given), {"inputs.text": text}, at.topology),
        f"take the {given.order}-grams of the public text {text.name} as the topology",
        run,
    )


def _distill(settings: PipelineSettings, at: Places) -> Stage:
    given, public = settings.distill, settings.inputs.public
    assert given.samples is not None  # `settings.DEFAULTS` has a default number
    topology = settings.inputs.topology or at.topology
    output = at.model if settings.prune is None else at.distilled

    def run(progress: ProgressReporter) -> None:
        from dlm.distill.files import distill_files
        from dlm.distill.request import DistillRequest

        request = DistillRequest(
            str(at.network),
            str(topology),
            output,
            samples=given.samples,
            seed=given.seed,
            prior=given.prior,
            work=at.counting,
            public=public,
            memory_bytes=settings.run.memory_bytes,
            threads=settings.run.threads,
        )
        made = distill_files(request, progress=progress.tell)
        assert made is not None
        known = f"{math.exp(made.entropy):.4f} under the network, " if made.entropy > 0 else ""
        progress.tell(
            f"perplexity of text from the network: {known}{made.fit.perplexity:.4f} under the model"
        )

    return Stage(
        stage_plan(
            at,
            "distill",
            {**asdict(given), "samples": int(given.samples), "public": public},
            {"the network": at.network / CHECKPOINT, "the topology": topology},
            output,
            goes_on=True,
        ),
        f"distill {given.samples:,.0f} sentences of the network onto the topology's n-grams",
        run,
        at.counting / COUNTS,
        (at.counting,),
        at.counting,
    )


def _prune(settings: PipelineSettings, at: Places) -> Stage | None:
    given = settings.prune
    if given is None:
        return None

    def run(progress: ProgressReporter) -> None:
        from dlm.estimate.prune import prune_file

        done = prune_file(
            at.distilled,
            at.model,
            given.goal,
            keep_suffixes=given.keep_suffixes,
            memory_bytes=settings.run.memory_bytes,
            threads=settings.run.threads,
            progress=progress.tell,
        )
        before, after = sum(done.result.counts_before), sum(done.result.counts)
        progress.tell(f"{before:,} to {after:,} n-grams")

    asked = {
        f"{_grouped(given.ngrams)} n-grams": given.ngrams,
        f"{given.size} bytes": given.size,
        f"a threshold of {given.threshold}": given.threshold,
    }
    how = next(text for text, value in asked.items() if value is not None)
    settings_of = {**given.goal.facts(), "keep_suffixes": given.keep_suffixes}
    return Stage(
        stage_plan(at, "prune", settings_of, {"the distilled model": at.distilled}, at.model),
        f"prune the model to {how}",
        run,
    )


def _grouped(number: str | int | None) -> str:
    return f"{int(str(number)):,}" if str(number).isdecimal() else str(number)


def _measure(settings: PipelineSettings, at: Places) -> Stage | None:
    held_out = settings.inputs.held_out
    if held_out is None:
        return None
    before = at.model if settings.prune is None else at.distilled
    inputs = settings.inputs

    def run(progress: ProgressReporter) -> None:
        from dlm.estimate.columns import ModelColumns
        from dlm.estimate.prune import measure

        progress.tell(f"scoring {held_out}")
        users = UserDataset.open(
            held_out,
            user_column=inputs.user_column,
            text_column=inputs.text_column,
            missing=inputs.missing,
        )
        first = ModelColumns.read(before)
        last = first if before == at.model else ModelColumns.read(at.model)
        split = TOKENIZERS[inputs.tokenizer]
        found = measure(first, last, _blocks(users, split))
        del first, last
        public = ModelColumns.read(inputs.topology or at.topology)
        alone = measure(public, public, _blocks(users, split)).with_oovs[1]
        body = {
            "note": HELD_OUT_NOTE,
            "users": len(users),
            "tokens": found.tokens,
            "oovs": found.oovs,
            "perplexity_before_pruning": found.with_oovs[0],
            "perplexity": found.with_oovs[1],
            "perplexity_without_oovs_before_pruning": found.without_oovs[0],
            "perplexity_without_oovs": found.without_oovs[1],
            "perplexity_of_topology": alone,
        }
        write_whole(at.held_out, (json.dumps(body, indent=1) + "\n").encode())
        with_oovs, without_oovs = shown(found.with_oovs[1]), shown(found.without_oovs[1])
        progress.tell(
            f"perplexity of {len(users):,} held-out users' text: {with_oovs}, without unknown "
            f"words ({found.oovs / found.tokens:.1%}) {without_oovs}; with the topology alone "
            f"{shown(alone)} ({HELD_OUT_NOTE})"
        )

    told = {"tokenizer": inputs.tokenizer, "columns": [inputs.user_column, inputs.text_column]}
    reads = {"inputs.held_out": held_out, "the distilled model": before, "the model": at.model}
    return Stage(
        stage_plan(at, "measure", {**told, "missing": inputs.missing}, reads, at.held_out),
        f"measure the perplexity of the text of {held_out.name}",
        run,
    )


def _shard(settings: PipelineSettings, at: Places) -> Stage:
    given = settings.shard

    def run(progress: ProgressReporter) -> None:
        from dlm.index.making.shard_set import KERNELS, build_shard_set
        from dlm.jit import compile_ahead

        compile_ahead(KERNELS)
        build_shard_set(
            at.model,
            at.shards,
            given.shards,
            encoding=given.encoding,
            bits=given.bits,
            memory_bytes=settings.run.memory_bytes,
            threads=settings.run.threads,
            progress=progress.tell,
        )

    return Stage(
        stage_plan(
            at, "shard", asdict(given), {"the model": at.model}, at.shards / "manifest.json"
        ),
        f"split the model into {given.shards} shard{'s' * (given.shards > 1)}, {given.encoding}",
        run,
        None,
        (at.shards,),
    )


def _blocks(users: UserDataset, split: Callable[[str], list[str]]) -> Iterator[bytes]:
    lines: list[str] = []
    size = 0
    for user in range(len(users)):
        for utterance in users.utterances(user):
            lines.append(" ".join(split(utterance)))
            size += len(lines[-1])
        if size >= BLOCK_BYTES:
            yield "\n".join(lines).encode()
            lines, size = [], 0
    if lines:
        yield "\n".join(lines).encode()
