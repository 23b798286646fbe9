"""The n-gram models of FNG's tables, all of one order and size.

The users' text in one place, and public text, are estimated by `dlm estimate` (modified Kneser-Ney)
and pruned by relative entropy. `<unk>` is a word like others in all of them, as it is in the
networks: a model that thinks little of unknown words would have more left for the known ones.

The networks become models as FNG Algorithm 1 has it: on the n-grams of public text (e), on their
own (i), by interpolation of these two (m), on the n-grams of the interpolation (r).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fng_data import LanguageFiles
from benchmarks.fng_estimated import kneser_ney, pruned, sampled_text

ORDER = 3
NGRAMS = 40_000
SAMPLES = 30_000  # sentences of a network


def vocabulary_of(words: Iterable[str]) -> Any:
    """The words of a network, with the ids that it gives to them."""
    from dlm.ngram.vocab import MARKS, Vocabulary

    return Vocabulary([*MARKS, *(word.encode() for word in words)], unk_in_model=True)


def as_ids(lines: Iterable[Iterable[str]], vocabulary: Any) -> Any:
    """Sentences one after the other, an end after each; (n,) uint32."""
    ids = vocabulary.ids
    said: list[int] = []
    for words in lines:
        said.extend(ids.get(word.encode(), 0) for word in words)
        said.append(vocabulary.end_id)
    return np.array(said, np.uint32)


def lines_of(file: Path) -> Iterable[list[str]]:
    """The words of each line."""
    return (line.split() for line in file.open(encoding="utf-8"))


def centralised(files: LanguageFiles) -> None:
    """Models of the users' text and of public text."""
    vocabulary = vocabulary_of(files.words.read_text(encoding="utf-8").split())
    files.arpa("users").parent.mkdir(parents=True, exist_ok=True)
    for name, file in (("users", files.text), ("public", files.public)):
        text = as_ids(lines_of(file), vocabulary)
        pruned(kneser_ney(text, vocabulary, files.folder), NGRAMS).write(files.arpa(name))


def said_in_words(run: Path, vocabulary: Any) -> Any:
    """What a network of wordpieces says, in the words of the models, as `as_ids` has them."""
    from dlm.distill.sources.network import NetworkSource

    source = NetworkSource(run)
    assert source.inventory is not None
    ids = sampled_text(source.visits(SAMPLES, 0), source.vocabulary)
    ends = np.flatnonzero(ids == source.vocabulary.end_id)
    lines = [part[part != source.vocabulary.end_id] for part in np.split(ids, ends + 1)[:-1]]
    return as_ids((source.inventory.decode(line.tolist()) for line in lines), vocabulary)


def distilled(run: Path, kind: str, files: LanguageFiles, *, pieces: bool) -> Path:
    """One approximation of the network of a run; what is there is not made again."""
    output, public = files.arpa(f"{run.name}-{kind}"), str(files.arpa("public"))
    if output.exists():
        return output
    if kind == "e":
        _distill(run, public, output)
    elif pieces:
        _of_pieces(run, kind, files, output)
    elif kind == "i":
        _distill(run, "self", output, ngrams=NGRAMS)
    else:
        # The counts of both are the same, and kept.
        _distill(
            run, f"self+{public}", output,
            ngrams=NGRAMS, work=files.folder / "counted" / run.name, interpolated=kind == "m",
        )  # fmt: skip
    return output


def _of_pieces(run: Path, kind: str, files: LanguageFiles, output: Path) -> None:
    """The same for wordpieces, whose own n-grams of words `dlm distill` does not infer."""
    from dlm.distill.fitting.infer import infer_topology, interpolate
    from dlm.estimate.columns import ModelColumns

    if kind == "i":
        vocabulary = vocabulary_of(files.words.read_text(encoding="utf-8").split())
        said = said_in_words(run, vocabulary)
        topology = files.arpa(f"{run.name}-topology")
        infer_topology(
            said, vocabulary, ORDER, ngrams=NGRAMS, scratch=output.parent
        ).write(topology)  # fmt: skip
        _distill(run, str(topology), output)
    elif kind == "m":
        either = [ModelColumns.read(distilled(run, one, files, pieces=True)) for one in "ei"]
        interpolate(either, ngrams=NGRAMS).write(output)
    else:
        _distill(run, str(distilled(run, "m", files, pieces=True)), output)


def _distill(run: Path, topology: str, output: Path, **more: Any) -> None:
    from dlm.distill.files import distill_files
    from dlm.distill.request import DistillRequest

    distill_files(
        DistillRequest(
            source=str(run),
            topology=topology,
            output=output,
            samples=SAMPLES,
            order=ORDER,
            **more,
        )
    )
