"""`dlm wer`: word error rates with intervals, per speaker, and compared between recognisers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.options import Json
from dlm.cli.output import print_answer
from dlm.units import counted

FEW_GROUPS = 5  # a bootstrap over fewer groups gives too narrow an interval

if TYPE_CHECKING:
    from dlm.asr.speech.wer import Interval, WordErrors


def wer(
    reference: Annotated[
        Path,
        typer.Argument(
            metavar="REF",
            help="Reference transcripts: a tab-separated table with a header (text, file or id, "
            "optionally speaker), lines of name, tab and text, Kaldi's lines of name and "
            "text, or text only.",
        ),
    ],
    hypothesis: Annotated[
        Path,
        typer.Argument(
            metavar="HYP",
            help="Recognised text: in the same formats, or the output of dlm transcribe, or n-best "
            "lists from dlm rescore.",
        ),
    ],
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Output of another recogniser on the same audio, to compare with."
        ),
    ] = None,
    by_speaker: Annotated[
        bool, typer.Option("--by-speaker", help="Print one line per speaker.")
    ] = False,
    alignments: Annotated[
        bool,
        typer.Option("--alignments", help="Print each utterance that has errors, word by word."),
    ] = False,
    subset: Annotated[
        bool,
        typer.Option(
            "--subset",
            help="Score only the utterances that are in HYP (and in --against, if given).",
        ),
    ] = False,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Compare words unchanged, with case and punctuation."),
    ] = False,
    spellings: Annotated[
        Path | None,
        typer.Option(
            "--map",
            metavar="FILE",
            help="Spellings that count as equal: one line `mr => mister` for each, as in NIST's "
            "global mapping files. They are replaced in all transcripts; a word with nothing "
            "after => is dropped.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute word error rates, with intervals.

    The 95 % interval is a bootstrap over speakers, or over utterances if the reference names no
    speakers; with fewer than five speakers it is too narrow, and with one there is none; the output
    says so. An utterance that HYP lacks is an error, since leaving it out would lower the rate;
    --subset leaves it out.

    With --against, the difference is HYP minus the other recogniser, on paired samples: if it is
    below zero, HYP is better, and significantly so if the interval excludes zero.

    Examples:
        dlm wer transcripts.tsv hypotheses.tsv --by-speaker
        dlm wer transcripts.tsv hypotheses.tsv --against others.tsv --json
    """
    from dlm.asr.speech.wer import (
        align,
        by_group,
        error_rate,
        paired,
        rate_difference,
        read_spellings,
        read_transcripts,
        respelled,
        spoken_words,
        total,
        with_kaldi_names,
        word_errors as errors_of,
    )
    from dlm.errors import TextError

    said = read_transcripts(reference)
    words_of = str.split if exact else spoken_words
    others_of = {} if spellings is None else read_spellings(spellings, words_of)

    def split(text: str) -> list[str]:
        return respelled(words_of(text), others_of)

    def judged(path: Path) -> tuple[dict[str, tuple[list[str], list[str]]], dict[str, WordErrors]]:
        heard = read_transcripts(path)
        named = with_kaldi_names(said, heard)
        if named != (said, heard):
            print(f"{path}: the first word of each line is its name, as in Kaldi", file=sys.stderr)
        texts = paired(*named, subset=subset)
        pairs = {name: (split(one), split(other)) for name, (one, other) in texts.items()}
        return pairs, {name: errors_of(*pair) for name, pair in pairs.items()}

    pairs, errors = judged(hypothesis)
    if against is not None:
        _, others = judged(against)
        both = errors.keys() & others.keys()
        if not both:
            raise TextError(
                f"{hypothesis} and {against} have no utterance in common; give two transcripts of "
                "the same audio"
            )
        errors = {name: one for name, one in errors.items() if name in both}
        others = {name: others[name] for name in errors}
    groups = {name: said.speakers.get(name, name) for name in errors}
    speakers = {name: one for name, one in by_group(errors, groups).items() if one.words}
    whole = total(errors.values())
    grouped = list(speakers.values())
    facts: dict[str, Any] = {
        "utterances": len(errors),
        "left_out": len(said.texts) - len(errors),
        "speakers": len(speakers) if said.speakers else None,
        **_counts(whole),
        "interval": _facts(error_rate(grouped)) if len(grouped) > 1 else None,
    }
    if against is not None:
        other = [one for one in by_group(others, groups).values() if one.words]
        facts["against"] = _counts(total(others.values()))
        facts["difference"] = _facts(rate_difference(other, grouped)) if len(grouped) > 1 else None
    if by_speaker:
        facts["by_speaker"] = {name: _counts(one) for name, one in speakers.items()}
    if alignments:
        facts["alignments"] = {name: align(*pairs[name]) for name in errors}
    units = counted(len(grouped), "speaker" if said.speakers else "utterance")
    if 1 < len(grouped) < FEW_GROUPS:
        units += f"; the interval is too narrow with fewer than {FEW_GROUPS}"
    lines = _lines(facts, whole, units)
    for name, steps in facts.get("alignments", {}).items():
        if errors[name].errors:
            lines += [f"\n{name}", _aligned(steps)]
    print_answer(facts, lines, as_json=as_json)


def _counts(errors: WordErrors) -> dict[str, Any]:
    return {
        "wer": errors.rate,
        "words": errors.words,
        "substitutions": errors.substitutions,
        "deletions": errors.deletions,
        "insertions": errors.insertions,
    }


def _facts(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def _lines(facts: dict[str, Any], whole: WordErrors, units: str) -> list[str]:
    lines = [
        f"WER\t{_percent(whole.rate)}\t{counted(whole.errors, 'error')} in "
        f"{counted(whole.words, 'word')}: "
        f"{whole.substitutions:,} substituted, {whole.deletions:,} deleted, "
        f"{whole.insertions:,} inserted"
    ]
    if facts["left_out"]:
        total = facts["utterances"] + facts["left_out"]
        lines.append(f"scored\t{facts['utterances']:,} of {counted(total, 'utterance')}")
    lines.append(_interval(facts["interval"], units))
    if "against" in facts:
        lines.append(f"against\t{_percent(facts['against']['wer'])}")
        if facts["difference"] is not None:
            lines.append(f"difference\t{100 * facts['difference']['value']:+.2f} points")
        lines.append(_interval(facts["difference"], f"{units}, paired"))
    for name, one in facts.get("by_speaker", {}).items():
        lines.append(f"{name}\t{_percent(one['wer'])}\t{counted(one['words'], 'word')}")
    return lines


def _interval(interval: dict[str, float] | None, units: str) -> str:
    if interval is None:
        return f"95 %\tundefined\tby {units}; an interval needs at least 2"
    low, high = 100 * interval["low"], 100 * interval["high"]
    return f"95 %\t{low:.2f} to {high:.2f}\tby {units}"


def _percent(rate: float | None) -> str:
    return "undefined" if rate is None else f"{100 * rate:.2f} %"


def _aligned(steps: list[tuple[str, str | None, str | None]]) -> str:
    """Three rows, one column per step: reference, hypothesis, kind of error."""
    rows = []
    for title, place in (("said", 1), ("heard", 2), ("", 0)):
        cells = []
        for step in steps:
            width = max(len(word or "*") for word in step[1:])
            cell = step[place] if place else step[0].replace("=", " ")
            cells.append((cell or "*" * width).ljust(width))
        rows.append(f"{title:<6}" + " ".join(cells).rstrip())
    return "\n".join(rows)
