"""`dlm distill`: distills a model or network into an n-gram model."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.checks import READ, READ_ANY, SCRATCH_LATER, check_reads, check_writes, parsed
from dlm.cli.options import Json, Memory, Public, Quiet, Threads, option
from dlm.cli.output import print_answer, stage_printer
from dlm.distill.settings import DistillSettings
from dlm.units import counted


def distill(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Model to approximate: an ARPA file, a run folder of dlm federate, or "
            "module:factory, a Python object with vocabulary and log_probs.",
        ),
    ],
    topology: Annotated[
        str,
        typer.Option(
            help="N-grams of the new model: those of an ARPA file, whose values are ignored; self "
            "for n-grams that the source generates; self+FILE for both."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="ARPA file to write; .gz, .zst or .xz compresses it. Without it, only counts are "
            "written, to --work.",
        ),
    ] = None,
    samples: Annotated[float | None, option(DistillSettings, "samples")] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text, one sentence per line, whose contexts are counted instead of samples.",
        ),
        READ,
    ] = None,
    order: Annotated[int, typer.Option(help="Order with --topology self, 1 to 5.")] = 3,
    ngrams: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="N-grams to keep with --topology self, over all orders.  [default: all]",
        ),
    ] = None,
    interpolated: Annotated[
        bool,
        typer.Option(
            "--interpolated",
            help="With self+FILE: interpolate the models on both sets of n-grams, instead of "
            "fitting one model on all of them.",
        ),
    ] = False,
    seed: Annotated[int, option(DistillSettings, "seed")] = 0,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for counts. If the run is interrupted, the same command resumes from it.",
        ),
        SCRATCH_LATER,
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="I/N", help="Count only part I of N, and store it in --work.")
    ] = "1/1",
    counts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="The --work folder of one part; repeat the option for every part. The counts of "
            "all parts are added, and nothing more is counted.",
        ),
        READ_ANY,
    ] = None,
    prior: Annotated[float | None, option(DistillSettings, "prior")] = None,
    capitalize: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="ARPA file of cased text, for a network of lower-case words."
        ),
        READ_ANY,
    ] = None,
    unigrams: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Word counts (from dlm unigrams) to use instead of the model's unigrams.",
        ),
        READ,
    ] = None,
    unigram_weight: Annotated[
        float, typer.Option(help="Weight of --unigrams; the model's unigrams get the rest.")
    ] = 1.0,
    public: Public = "",
    memory: Memory = None,
    threads: Threads = 2,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Distill a model or network into an n-gram model.

    Of all models with the n-grams of --topology, the result is the closest to the source in
    relative entropy. It has all words of the source; n-grams with words that the source lacks are
    dropped. A network of wordpieces knows every word of the topology.

    An ARPA file yields its expected counts without text or samples. Other sources are sampled, and
    so is an ARPA file with --samples: at each history of a sampled sentence, every possible next
    word is counted with its probability. If the source or topology carries a privacy record, the
    records are composed. An input without one leaves the result without a guarantee, unless
    --public-attested-by NAME attests that it is public.

    --capitalize splits the probability of each word over its cased spellings, as in a model of
    public cased text. --unigrams takes word frequencies, and words that the network lacks, from
    counts; --capitalize splits these too.

    Examples:
        dlm distill model5.arpa --topology small.arpa.zst --output distilled.arpa.zst
        dlm distill runs/first --topology self --samples 1e5 -o net.arpa.zst
    """
    from dlm.distill.files import distill_files
    from dlm.distill.request import DistillRequest

    began = time.monotonic()
    counted_part = parsed("--part", part, _part, "I/N, such as 2/4")
    request = DistillRequest(
        source=source, topology=topology, output=output, samples=samples, text=text, order=order,
        ngrams=ngrams, interpolated=interpolated, seed=seed, part=counted_part, work=work,
        counts=tuple(counts or ()), prior=prior, capitalize=capitalize, unigrams=unigrams,
        unigram_weight=unigram_weight, public=public, threads=threads,
        memory_bytes=memory,
    )  # fmt: skip
    if request.kind == "object":
        sys.path.insert(0, str(Path.cwd()))  # as python -m does
    else:
        check_reads("SOURCE", source, folders=True)
    check_reads("--topology", request.external, folders=True)
    check_writes(
        "--output",
        output,
        arpa=True,
        inputs=(source, request.external, text, capitalize, unigrams, *request.counts),
    )
    made = distill_files(request, progress=stage_printer(quiet=quiet))
    if made is None:
        counted_now = f"counted this part; pass --counts {work} to the run that adds up all parts"
        facts = {"work": str(work), "part": part}
        print_answer(facts, [counted_now], as_json=as_json, quiet=quiet)
        return
    model = made.fit.model
    known = not math.isnan(made.entropy)
    figures = {
        "ngrams": list(model.counts),
        "source_perplexity": math.exp(made.entropy) if known else None,
        "perplexity": made.fit.perplexity,
        "relative_entropy_nats": made.relative_entropy if known else None,
        "steps": made.fit.steps,
        "residual": made.fit.residual,
        "excess_nats": None if math.isnan(made.fit.excess) else made.fit.excess,
        "rounding": made.fit.rounding,
        "unvisited_contexts": made.fit.unvisited,
        "seconds": round(time.monotonic() - began, 3),
    }
    said = f"perplexity on the source's own text: new model {made.fit.perplexity:.4f}"
    if known:
        said = (
            f"perplexity on the source's own text: source {figures['source_perplexity']:.4f}, "
            f"new model {made.fit.perplexity:.4f} "
            f"(KL {max(made.relative_entropy, 0.0):.4g} nats per word)"  # may round below 0
        )
    lines = [
        said,
        f"{counted(sum(model.counts), 'n-gram')}, at most "
        f"{counted(made.fit.steps, 'step')} per context",
    ]
    if figures["excess_nats"] is not None:
        lines.append(f"at most {made.fit.excess:.1g} nats per word above the optimum of its counts")
    print_answer(figures, lines, as_json=as_json)


def _part(text: str) -> tuple[int, int]:
    place, _, parts = text.partition("/")
    return int(place), int(parts)
