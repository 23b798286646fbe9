"""FNG's experiments with n-gram models of federated networks, on public data of two languages.

    python tests/benchmarks/fng.py --work runs/fng --minutes 20    # goes on if called again
    python tests/benchmarks/fng.py --work runs/fng --only en/      # items whose name holds this
    python tests/benchmarks/fng.py --work runs/fng --tables        # what is done so far, Markdown
    python tests/benchmarks/fng.py --work runs/fng --plot fng5.svg

English: people who spoke before the Supreme Court (scotus_oyez), n-grams of Wikipedia. Portuguese:
speeches of deputies in summaries (ptbr_camara_sumarios), n-grams of hearings in the Senate. A
network takes one to four minutes of CPU time, an approximation half a minute; `--list` shows what
there is. One process at a time. `fng_data.py`, `fng_train.py` and `fng_models.py` say what is made,
`fng_judge.py` how it is judged, `fng_tables.py` what is printed.

Paper   Chen et al. 2019 (FNG), sections 5 and 7; Suresh et al. 2021
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.fng_data import LanguageFiles
from benchmarks.fng_queue import Item, ResultFolder, run_queue
from benchmarks.fng_tables import plot, tables
from benchmarks.fng_train import KEPT_AT, NETWORKS, Network

NGRAMS, SIZES = 40_000, (10_000, 40_000, 160_000)
BASELINES = (f"kn-{NGRAMS}", f"wb-{NGRAMS}")  # that each model is compared with


class Plan:
    """All items, in the order in which they are done.

    Args
        work  folder of everything
    """

    def __init__(self, work: Path) -> None:
        self.work = work
        self.results = ResultFolder(work / "results")

    def items(self) -> Iterator[Item]:
        """The main comparison of either language first."""
        for language in ("en", "pt"):
            yield from self._data(language)
        yield from self._network("en", NETWORKS["words"], "eimrc")
        yield from self._network("en", NETWORKS["central"], "cti")
        yield from self._sizes("central")
        yield from self._network("en", NETWORKS["pieces"], "eimr")
        yield from self._network("en", NETWORKS["words-dp"], "eimr")
        yield from self._network("pt", NETWORKS["words"], "eimr")
        yield from self._network("pt", NETWORKS["pieces"], "eimr")
        yield from self._network("pt", NETWORKS["words-dp"], "eimr")
        yield from self._network("en", NETWORKS["pieces-dp"], "eimr")
        yield from self._network("pt", NETWORKS["pieces-dp"], "eimr")
        for name in ("words-small", "words-large"):
            yield from self._network("en", NETWORKS[name], "rc")

    def files(self, language: str) -> LanguageFiles:
        """Where a language's are."""
        return LanguageFiles((self.work / language).absolute())

    def _data(self, language: str) -> Iterator[Item]:
        def texts() -> dict[str, object]:
            from benchmarks.fng_data import write_texts

            return write_texts(files, language)

        def words() -> dict[str, object]:
            from benchmarks.fng_data import write_words

            return write_words(files)

        def ngrams() -> dict[str, object]:
            from benchmarks.fng_models import centralised

            return centralised(files)

        files = self.files(language)
        yield Item(f"{language}/texts", texts)
        yield Item(f"{language}/words", words, [f"{language}/texts"])
        yield Item(f"{language}/ngrams", ngrams, [f"{language}/words"])
        names = [f"{kind}-{size}" for size in (NGRAMS, *SIZES) for kind in ("kn", "wb")]
        for name in dict.fromkeys([*names, "kn-all", "wb-all", f"public-{NGRAMS}"]):
            yield self._judge(language, name, files.arpa(name), f"{language}/ngrams")

    def _network(self, language: str, network: Network, kinds: str) -> Iterator[Item]:
        def train() -> dict[str, object]:
            from benchmarks.fng_train import train

            return train(network, files)

        from benchmarks.fng_train import kept

        files = self.files(language)
        trained = f"{language}/train/{network.name}"
        run = files.run(network.name)
        yield Item(trained, train, [f"{language}/words"])
        for rounds in () if network.central else KEPT_AT[:-1]:
            yield self._judge(language, f"{network.name}@{rounds}", kept(run, rounds), trained)
        yield self._judge(language, network.name, run, trained)
        for kind in kinds:
            yield from self._distilled(language, network, kind, NGRAMS)

    def _sizes(self, name: str) -> Iterator[Item]:
        """A network on the n-grams of the centralised model, in other sizes (Suresh et al.)."""
        for size in SIZES:
            if size != NGRAMS:
                yield from self._distilled("en", NETWORKS[name], "c", size)

    def _distilled(self, language: str, network: Network, kind: str, ngrams: int) -> Iterator[Item]:
        def make() -> dict[str, object]:
            from benchmarks.fng_models import distilled

            return distilled(network, kind, files, ngrams)

        files = self.files(language)
        name = f"{network.name}-{kind}-{ngrams}"
        needs = [f"{language}/train/{network.name}", f"{language}/ngrams"]
        if network.pieces and kind in "mr":
            needs += [
                f"{language}/distill/{network.name}-{one}-{ngrams}"
                for one in ("ei" if kind == "m" else "m")
            ]
        yield Item(f"{language}/distill/{name}", make, needs)
        yield self._judge(language, name, files.arpa(name), f"{language}/distill/{name}")

    def _judge(self, language: str, name: str, path: Path, after: str) -> Item:
        def make() -> dict[str, object]:
            from benchmarks.fng_judge import figures, judged

            found = judged(path, files.held_out, files.words)
            against = {}
            for baseline in BASELINES:
                known = self.results.read(f"{language}/judge/{baseline}") or found
                against[baseline] = figures(found, known)
            return {**found, "figures": against}

        files = self.files(language)
        first = [f"{language}/judge/{one}" for one in BASELINES]
        needs = [after] if name in BASELINES else [after, *first]
        return Item(f"{language}/judge/{name}", make, needs)


def main() -> None:
    """Goes on with what is left, or prints what is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default="", help="items whose name holds this")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin none after so long")
    parser.add_argument("--list", action="store_true", help="print the items and what is done")
    parser.add_argument("--tables", action="store_true", help="print what is done, and end")
    parser.add_argument("--plot", type=Path, help="draw FNG Figure 5 as SVG, and end")
    given = parser.parse_args()
    plan = Plan(given.work)
    if given.tables:
        print(tables(plan.results))
    elif given.plot:
        given.plot.write_text(plot(plan.results), encoding="utf-8")
    elif given.list:
        for item in plan.items():
            done = plan.results.read(item.name)
            print(item.name, "" if done is None else f"{done['cpu_seconds']} CPU seconds")
    else:
        chosen = (item for item in plan.items() if given.only in item.name)
        failed = run_queue(chosen, plan.results, minutes=given.minutes)
        sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
