"""`dlm transcribe`: transcribes speech, with any model that dlm opens."""

from __future__ import annotations

import math
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.asr.settings import BeamSettings
from dlm.cli.checks import READ
from dlm.cli.options import Options, PhraseList, PiecesFile, Quiet, ServedModel
from dlm.cli.output import compile_kernels, print_json_line, stage_printer
from dlm.errors import AudioError, ConfigError, DlmError
from dlm.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlm.asr.speech.transcribe import Transcript

CLUSTER = "cluster.toml"


def transcribe(
    audio: Annotated[
        list[Path],
        typer.Argument(
            metavar="AUDIO...",
            help="Audio that libsndfile reads, such as WAV, FLAC, OGG and MP3, at any rate.",
        ),
        READ,
    ],
    *,
    lm: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Model: cluster.toml, the folder of a shard set, an ARPA or KenLM binary file.  "
            "[default: cluster.toml in this folder, else a small model that comes with dlm]",
        ),
    ] = None,
    model: ServedModel = None,
    settings: Annotated[BeamSettings, Options("lm_weight word_score hypotheses nbest")],
    max_words: Annotated[
        int,
        typer.Option(
            metavar="N", help="Size of the lexicon: the N most probable words of the model."
        ),
    ] = 60_000,
    phrases: PhraseList = None,
    acoustic: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Python function that makes the acoustic model.  [default: a model of English]",
        ),
    ] = None,
    pieces: PiecesFile = None,
    deadline: Annotated[
        float, typer.Option(help="Time limit per call to servers, in seconds.")
    ] = 2.0,
    bigram_fallback: Annotated[
        bool,
        typer.Option(
            "--bigram-fallback/--no-bigram-fallback",
            help="If servers fail, continue with the client's 2-grams, and report it.",
        ),
    ] = True,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object per segment: words with times, scores, the n-best list.",
        ),
    ] = False,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Read audio as it arrives, and print a line whenever the words change."
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Transcribe speech (English, unless --acoustic is given).

    Prints the words of each file as they are found; with several files, each line begins with the
    file's name and a tab. Long audio is cut at pauses, and each segment is printed when it is
    done. A file that is not audio is reported and the others are transcribed; the command then
    exits with 1.

    With --phrases, names and topics become more probable, even if the model does not know them:
    FILE has one phrase per line, in the model's spelling. A tab and its bonus may follow (log10, 2
    by default), and then, after further tabs, the sounds of a word, as WORD=s aʊ n d z.

    With --acoustic, FUNCTION returns an object with labels, frame_s (seconds per frame) and
    log_probs(samples). If the labels are pieces of words, --pieces names their SentencePiece model.

    AUDIO may be - for standard input, such as WAV from a microphone; this implies --stream: a
    line that ends in ... (with --json, an object with "partial") is replaced by the next one.

    With --nbest, the objects of --json are what `dlm rescore` reads.

    Examples:
        dlm transcribe a.flac
        dlm transcribe a.flac b.flac --lm cluster.toml
        dlm transcribe a.flac --phrases names.tsv
        arecord -q -f S16_LE -r 16000 | dlm transcribe -
        dlm transcribe a.flac --acoustic my_model:make --pieces spm.model
        dlm transcribe a.flac --nbest 10 --json > nbest.jsonl
    """
    from dlm.asr.open import open_model
    from dlm.asr.phrase_file import known_words, read_phrases
    from dlm.asr.speech.acoustic import load_acoustic
    from dlm.asr.speech.audio import promised_s, read_audio, stream_audio
    from dlm.asr.speech.transcribe import PARTIAL_S, Transcriber
    from dlm.cli.scoring import any_bytes_on_stdout
    from dlm.client import ClientConfig
    from dlm.client.table import KERNELS
    from dlm.progress import ProgressReporter

    config = ClientConfig(bigram_fallback=bigram_fallback, deadline_s=deadline)
    if settings.nbest > 1 and not as_json:
        raise ConfigError(
            f"--nbest is {settings.nbest}, but only --json prints more than the best sentence; add "
            "--json"
        )
    stream = stream or Path("-") in audio
    for file in [] if as_json or len(audio) == 1 else audio:
        if any(char in str(file) for char in "\t\n\r"):
            raise ConfigError(
                f"AUDIO is {str(file)!r}, which contains a tab or a line break and would garble "
                "the output. Add --json, or rename the file"
            )
    listed = None if phrases is None else read_phrases(phrases)
    any_bytes_on_stdout()  # a file name need not be UTF-8
    tell = stage_printer(quiet=quiet)
    began, heard_s, in_fallback, refused = time.monotonic(), 0.0, 0, 0
    with ExitStack() as stack:
        named = _default_model(stack) if lm is None else lm
        compile_kernels(KERNELS)
        client = stack.enter_context(open_model(named, config=config, model=model, tell=tell))
        if listed is not None:
            tell(known_words(listed.phrases, client))
        transcriber = Transcriber(
            client,
            settings,
            words=max_words,
            tell=tell,
            phrases=None if listed is None else listed.phrases,
            sounds=None if listed is None else listed.sounds,
            acoustic=None if acoustic is None else load_acoustic(acoustic),
            pieces=pieces,
        )
        progress = ProgressReporter(tell)
        whole_s = round(sum(map(promised_s, audio)))
        progress.stage(f"transcribing with {named}", whole_s, "s of audio")
        for file in audio:
            try:
                blocks = stream_audio(file) if stream else [read_audio(file)]
            except (AudioError, OSError) as exc:
                refused += 1
                print(f"dlm: {exc}", file=sys.stderr)
                continue
            name = file if as_json or len(audio) > 1 else None
            heard = transcriber.stream(blocks, PARTIAL_S if stream else math.inf)
            for segment, whole in _printed(heard, file, name, as_json=as_json, stream=stream):
                in_fallback += segment.bigram_fallback
                length_s = (segment.end_s - segment.start_s) * whole
                heard_s += length_s
                if as_json or stream:  # otherwise, the printed words show progress
                    progress.step(round(length_s))
            if not as_json and not stream:
                progress.step(round(segment.end_s))
        tell(f"{heard_s:,.1f} s of audio in {time.monotonic() - began:,.1f} s")
        if in_fallback:
            tell(f"servers failed: 2-grams answered {counted(in_fallback, 'query')} instead")
    if refused:
        raise typer.Exit(1)


def _printed(
    segments: Iterator[tuple[Transcript, bool]],
    file: Path,
    name: Path | None,
    *,
    as_json: bool,
    stream: bool,
) -> Iterator[tuple[Transcript, bool]]:
    """Prints a file's segments as they arrive; adds to an error the time up to which it printed."""

    at_s, whole, shown = 0.0, False, ""
    before = "" if name is None else f"{name}\t"
    try:
        for segment, is_whole in segments:
            text = segment.text + ("" if is_whole else " ...")
            if as_json:
                print_json_line(_facts(file, segment) | ({} if is_whole else {"partial": True}))
            elif stream and text != shown:
                print(before + text, flush=True)
            elif segment.text and not stream:
                print(before + segment.text, end="", flush=True)
                before = " "
            at_s, shown = segment.end_s if is_whole else at_s, text
            yield segment, is_whole
        whole = True
    except DlmError as exc:
        exc.add_note(f"{file} was transcribed and printed up to {at_s:.2f} s")
        raise
    finally:
        if not (as_json or stream) and (whole or before == " "):  # end a line that was begun
            print("" if before == " " else before, flush=True)


def _default_model(stack: ExitStack) -> str:
    """Returns cluster.toml if this folder has one, or else the model in dlm's own data."""
    from importlib.resources import as_file, files

    if Path(CLUSTER).exists():
        return CLUSTER
    packed = files("dlm").joinpath("data", "books20k.arpa.zst")
    return str(stack.enter_context(as_file(packed)))


def _facts(file: Path, segment: Transcript) -> dict[str, Any]:
    from dlm.units import LN_10

    best = segment.sentences[0] if segment.sentences else None
    return {
        "id": str(file) if segment.start_s == 0.0 else f"{file}:{segment.start_s:.2f}",
        "file": str(file),
        "start_s": round(segment.start_s, 3),
        "end_s": round(segment.end_s, 3),
        "text": segment.text,
        "mode": segment.mode,
        "bigram_fallback": segment.bigram_fallback,
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
                **({"bonus": round(one.bonus * LN_10, 4)} if one.bonus else {}),
            }
            for one in segment.sentences
        ],
    }
