"""The n-gram models of the experiment, all of one order and of a few sizes.

Centralised text and public text are estimated by `dlm estimate` (modified Kneser-Ney) and by
Witten-Bell, whose lower orders are raw counts, and pruned by relative entropy. `<unk>` is a word
like others in all of them, as it is in the networks: a model that thinks little of unknown words
would have more left for the known ones.

The networks become models as FNG Algorithm 1 has it: on the n-grams of public text (e), on their
own (i), by interpolation of these two (m), on the n-grams of the interpolation (r); and, for the
comparison of Suresh et al., on those of the centralised Kneser-Ney model, the contexts those of
samples (c) or of the text that it was estimated from (t).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fng_data import LanguageFiles
from benchmarks.fng_estimated import kneser_ney, pruned, sampled_text, witten_bell
from benchmarks.fng_train import Network

ORDER = 3
SIZES = (10_000, 40_000, 160_000)
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


def centralised(files: LanguageFiles) -> dict[str, Any]:
    """Models of centralised and of public text, in all sizes."""
    vocabulary = vocabulary_of(files.words.read_text(encoding="utf-8").split())
    folder = files.arpa("kn").parent
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    text = as_ids(lines_of(files.text), vocabulary)
    wholes = {
        "kn": kneser_ney(text, vocabulary, folder),
        "wb": witten_bell(text, vocabulary),
    }
    for name, whole in wholes.items():
        found[f"{name}-all"] = sum(whole.counts)
        whole.write(files.arpa(f"{name}-all"))
        for size in SIZES:
            small = pruned(whole, size)
            small.write(files.arpa(f"{name}-{size}"))
            found[f"{name}-{size}"] = sum(small.counts)
    public = as_ids(lines_of(files.public), vocabulary)
    small = pruned(kneser_ney(public, vocabulary, folder), NGRAMS)
    small.write(files.arpa(f"public-{NGRAMS}"))
    found[f"public-{NGRAMS}"] = sum(small.counts)
    return {"ngrams": found}


def said_in_words(run: Path, vocabulary: Any) -> Any:
    """What a network of wordpieces says, in the words of the models, as `as_ids` has them."""
    from dlm.distill.sources.network import NetworkSource

    source = NetworkSource(run)
    assert source.inventory is not None
    ids = sampled_text(source.visits(SAMPLES, 0), source.vocabulary)
    ends = np.flatnonzero(ids == source.vocabulary.end_id)
    lines = [part[part != source.vocabulary.end_id] for part in np.split(ids, ends + 1)[:-1]]
    return as_ids((source.inventory.decode(line.tolist()) for line in lines), vocabulary)


def distilled(network: Network, kind: str, files: LanguageFiles, ngrams: int) -> dict[str, Any]:
    """One approximation of a network."""
    output = files.arpa(f"{network.name}-{kind}-{ngrams}")
    public = files.arpa(f"public-{NGRAMS}")
    if kind == "e":
        return _distill(network, str(public), output, files)
    if kind in "ct":
        contexts = {"samples": None, "text": files.text} if kind == "t" else {}
        return _distill(network, str(files.arpa(f"kn-{ngrams}")), output, files, **contexts)
    if not network.pieces:
        more: dict[str, Any] = {"ngrams": ngrams}
        if kind == "i":
            return _distill(network, "self", output, files, **more)
        # The counts of both are the same, and kept.
        more |= {"work": files.folder / "counted" / network.name, "interpolated": kind == "m"}
        return _distill(network, f"self+{public}", output, files, **more)
    return _of_pieces(network, kind, files, ngrams, output)


def _of_pieces(
    network: Network, kind: str, files: LanguageFiles, ngrams: int, output: Path
) -> dict[str, Any]:
    """The same for wordpieces, whose own n-grams of words `dlm distill` does not infer."""
    from dlm.distill.fitting.infer import infer_topology, interpolate
    from dlm.estimate.columns import ModelColumns

    vocabulary = vocabulary_of(files.words.read_text(encoding="utf-8").split())
    if kind == "i":
        said = said_in_words(files.run(network.name), vocabulary)
        own = infer_topology(said, vocabulary, ORDER, ngrams=ngrams, scratch=output.parent)
        topology = files.arpa(f"{network.name}-topology-{ngrams}")
        own.write(topology)
        return _distill(network, str(topology), output, files)
    either = [files.arpa(f"{network.name}-{one}-{ngrams}") for one in "ei"]
    if kind == "m":
        mixed = interpolate([ModelColumns.read(file) for file in either], ngrams=ngrams)
        mixed.write(output)
        return {"ngrams": sum(mixed.counts)}
    between = files.arpa(f"{network.name}-m-{ngrams}")
    return _distill(network, str(between), output, files)


def _distill(
    network: Network, topology: str, output: Path, files: LanguageFiles, **more: Any
) -> dict[str, Any]:
    from dlm.distill.files import distill_files
    from dlm.distill.request import DistillRequest

    request = DistillRequest(
        source=str(files.run(network.name)), topology=topology, output=output,
        **{"samples": SAMPLES, "order": ORDER, **more},
    )  # fmt: skip
    made = distill_files(request, progress=lambda line: print(f"  {line}", flush=True))
    assert made is not None
    return {"ngrams": sum(made.fit.model.counts), "nats_above_network": made.relative_entropy}
