"""`dlm transcribe`: speech becomes words, with any model that dlm opens behind the search."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.progress import stage_printer

if TYPE_CHECKING:
    from dlm.asr.transcribe import Transcript

CLUSTER = "cluster.toml"


def transcribe(
    audio: Annotated[
        list[Path],
        typer.Argument(help="Audio that libsndfile reads, such as WAV, FLAC, OGG, MP3; any rate."),
    ],
    lm: Annotated[
        str | None,
        typer.Option(
            help="The model: cluster.toml, a shard set's folder, or an ARPA file. Without it, "
            "cluster.toml in this folder, else a small model that comes with dlm."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Which model of the servers: the first 6 digits of its id, or more."),
    ] = None,
    lm_weight: Annotated[
        float, typer.Option(help="Of the model's log10 P beside the acoustic ln P.")
    ] = 2.0,
    word_score: Annotated[
        float, typer.Option(help="Added for each word; above 0 favours short words.")
    ] = 0.0,
    beam: Annotated[int, typer.Option(help="Hypotheses kept at a time.")] = 100,
    words: Annotated[
        int, typer.Option(help="Words of the model that can be recognised, the likeliest.")
    ] = 60_000,
    nbest: Annotated[int, typer.Option(help="Sentences per segment, with --json.")] = 1,
    deadline: Annotated[float, typer.Option(help="Seconds that servers have for a call.")] = 2.0,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial/--no-partial",
            help="Where servers fail, go on with the 2-grams that are here, and say so.",
        ),
    ] = True,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="One object per segment: words with times, scores, the n-best list."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the stages.")] = False,
) -> None:
    """Recognise English speech.

    Prints the words of each file, as they are found; of several files, each after its name and a
    tab. Long audio is cut at pauses, and each segment printed when it is done. A file that is not
    audio is reported, the others are still done, and the exit status is 1.

    With --nbest, the objects of --json are what `dlm rescore` reads.
    Example: dlm transcribe a.flac --lm cluster.toml
    """
    from dlm.asr.audio import SAMPLE_RATE, read_audio
    from dlm.asr.ctc import BeamSettings
    from dlm.asr.open import open_model
    from dlm.asr.transcribe import Transcriber
    from dlm.cli.compiling import compile_kernels
    from dlm.client import ClientConfig
    from dlm.client.warm import KERNELS
    from dlm.errors import AudioError
    from dlm.progress import ProgressReporter

    settings = BeamSettings(lm_weight=lm_weight, word_score=word_score, beam=beam, nbest=nbest)
    config = ClientConfig(partial=partial, deadline_s=deadline)
    tell = stage_printer(quiet=quiet)
    began, heard_s, in_partial, refused = time.monotonic(), 0.0, 0, 0
    with ExitStack() as stack:
        named = _default_model(stack) if lm is None else lm
        compile_kernels(KERNELS)
        client = stack.enter_context(open_model(named, config=config, model=model, tell=tell))
        transcriber = Transcriber(client, settings, words=words, tell=tell)
        tell(f"listening, with {named}")
        progress = ProgressReporter(tell)
        for file in audio:
            try:
                samples = read_audio(file)
            except (AudioError, OSError) as exc:
                refused += 1
                print(f"dlm: {exc}", file=sys.stderr)
                continue
            progress.stage(str(file), len(samples) // SAMPLE_RATE, "s of audio")
            before = "" if len(audio) == 1 else f"{file}\t"
            for segment in transcriber.transcribe(samples):
                if as_json:
                    print(_json(file, segment), flush=True)
                elif segment.text:
                    print(before + segment.text, end="", flush=True)
                    before = " "
                progress.step(round(segment.end_s - segment.start_s))
                in_partial += segment.partial
            if not as_json:
                print("" if before == " " else before)
            heard_s += len(samples) / SAMPLE_RATE
        tell(f"{heard_s:,.1f} s of audio in {time.monotonic() - began:,.1f} s")
        if in_partial:
            tell(f"servers failed: 2-grams answered {in_partial:,} queries in their place")
    if refused:
        raise typer.Exit(1)


def _default_model(stack: ExitStack) -> str:
    """cluster.toml in this folder, else the model of dlm's own data."""
    from importlib.resources import as_file, files

    if Path(CLUSTER).exists():
        return CLUSTER
    packed = files("dlm").joinpath("data", "books20k.arpa.zst")
    return str(stack.enter_context(as_file(packed)))


def _json(file: Path, segment: Transcript) -> str:
    """The segment as an object; `id` and `hyps` are those of an n-best list."""
    from dlm.units import LN_10

    best = segment.sentences[0] if segment.sentences else None
    facts = {
        "id": str(file) if segment.start_s == 0.0 else f"{file}:{segment.start_s:.2f}",
        "file": str(file),
        "start_s": round(segment.start_s, 3),
        "end_s": round(segment.end_s, 3),
        "text": segment.text,
        "mode": segment.mode,
        "partial": segment.partial,
        "score": None if best is None else round(best.score, 4),
        "words": [
            {
                "word": word.word,
                "start_s": word.start_s,
                "end_s": word.end_s,
                "acoustic": round(word.acoustic_score, 4),
                "lm": round(log10_prob * LN_10, 4),
                "source": source,
            }
            for word, log10_prob, source in zip(
                () if best is None else best.words,
                segment.log10_probs,
                segment.sources,
                strict=True,
            )
        ],
        "hyps": [
            {
                "words": one.text,
                "acoustic": round(one.acoustic_score, 4),
                "lm": round(one.log10_prob * LN_10, 4),
            }
            for one in segment.sentences
        ],
    }
    return json.dumps(facts, ensure_ascii=False)
