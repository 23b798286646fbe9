"""A complete collection of unigrams: rounds of counting, their releases, and the report.

| file | contents |
| --- | --- |
| OUTPUT, OUTPUT.provenance.json | counts (`counts_file`) and their record |
| OUTPUT.ledger.json | who took part when, for the owner |
| OUTPUT.privacy.md, OUTPUT.privacy.json | the privacy report |
| OUTPUT.metrics.jsonl | the journal, one line per round; kept to detect an older copy of .work |
| OUTPUT.work | the run's folder (`run_folder`), until the run is over |
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dlm.checkpoint import Arrays
from dlm.errors import ConfigError, DlmError, FormatError, PrivacyError
from dlm.federated.counting.convergence import Moments
from dlm.federated.counting.settings import UnigramConfig
from dlm.federated.counting.unigrams import (
    NOISED_STEP_BITS,
    Floats,
    RoundMetrics,
    Split,
    UnigramState,
    UserCounts,
    apply,
    config_dict,
    init,
    round_sum,
    seen_threshold,
    step_bits,
)
from dlm.federated.keys import Key
from dlm.federated.report.report import PrivacyReport, build
from dlm.federated.run.cohorts import Cohorts, Population
from dlm.federated.run.run import FederatedRun
from dlm.federated.run.run_folder import RunBinding, RunFolder
from dlm.federated.run.sampling import (
    AvailabilitySampler,
    FixedGoalSampler,
    PoissonSampler,
    Sampler,
)
from dlm.federated.users import UserDataset, words_of
from dlm.record.counts_file import (
    DIGEST,
    JOURNAL,
    LEDGER,
    REPORT_JSON,
    REPORT_MD,
    WORK,
    WordCounts,
    counts_text,
    ranked,
    write_counts,
)
from dlm.record.provenance import Provenance, content_digest
from dlm.record.sidecar import SIDECAR_SUFFIX, sidecar
from dlm.units import counted

DELTA_OF_NOTHING = 1e-6  # for a report without noise, where delta means nothing
GRID = {
    "grid": f"2^-{NOISED_STEP_BITS} of lambda, which is rounded up to a power of two",
    "generator": "ChaCha20",
}


class Collection(FederatedRun[RoundMetrics]):
    """Counts the words of a dataset over rounds, from the start or from where a run stopped.

    Args
        gap, max_participations  enforced by the ledger; accounting of noise needs
                                 `max_participations` or, with Poisson sampling, q
        round_s      seconds from the start of a round to the next, for timers
        tokenizer    name of `split`, which must be the same when a run resumes
        list_record  record of the list of words, or of who attests that it is public; without a
                     record there is no guarantee
    Raises
        ConfigError    the folder's run has different users, words or settings
        PrivacyError   a cohort breaks the ledger's limits; noise without limits to account with, or
                       Poisson sampling with limits
    """

    state: UnigramState
    _parts: Mapping[str, str] = {}  # for the report: what sums the counts, if not this class

    def __init__(
        self,
        dataset: Population,
        wordlist: Sequence[str],
        config: UnigramConfig,
        sampler: Sampler,
        key: Key,
        *,
        gap: int | None = None,
        max_participations: int | None = None,
        split: Split = words_of,
        tokenizer: str = "whitespace",
        round_s: float = 0.0,
        folder: RunFolder | None = None,
        list_record: Provenance | None = None,
    ):
        noised, drawn = config.noise_multiplier is not None, sampler.describe()
        if noised and drawn["kind"] != "poisson" and max_participations is None:
            raise PrivacyError(
                "noise needs either Poisson sampling or max_participations; otherwise nothing "
                "limits how often a user is counted"
            )
        if drawn["kind"] == "poisson" and ((gap or 1) > 1 or max_participations is not None):
            raise PrivacyError(
                f"gap is {gap} and max_participations is {max_participations}, which cannot be "
                "enforced on Poisson-sampled users: cohorts with such limits are not Poisson "
                "samples. Leave the limits out, or use another sampler"
            )
        self.wordlist, self.config, self.key = tuple(wordlist), config, key
        self.cohorts = Cohorts(
            dataset,
            sampler,
            gap=gap,
            max_participations=max_participations,
            round_s=round_s,
            salt=bytes(key.fold("unigrams", "ledger").words(4).tobytes()),
        )
        self._counts = UserCounts(
            cast(UserDataset, dataset),  # only `_summed` reads the users
            self.wordlist,
            cap_words=config.cap_words,
            split=split,
        )
        self.rounds, self._list_record = config.rounds, list_record
        self.released = noised and not key.simulated
        self.save_every = 1 if noised else max(1, config.rounds // 20)
        self.binding = RunBinding(
            {
                "unigrams": config_dict(config),
                "tokenizer": tokenizer,
                "sampling": drawn,
                "enforced": {"gap": gap, "max_participations": max_participations},
                "round_s": round_s,
                # A public list's words are compared, but not who attests that the list is public.
                "vocabulary_record": None
                if list_record is None or list_record.is_public
                else list_record.digest,
                # A seed's fingerprint, so that a run is not resumed with another seed. A key from
                # the system has none, since a resumed run draws a new key.
                "key": key.fold("fingerprint").words(2).tolist() if key.simulated else "system",
            },
            {"users": dataset.digest},
            "".join(f"{word}\n" for word in self.wordlist).encode(),
        )
        self._begin(folder)

    def counts(self) -> WordCounts:
        least = seen_threshold(self.config, max(self.state.round, 1), len(self.wordlist))
        return ranked(self.wordlist, self.state.totals, least)

    def stage(self) -> dict[str, Any]:
        config = self.config
        return self.cohorts.stage(
            "unigrams",
            self.rounds_done,
            mechanism="none" if config.noise_multiplier is None else "gaussian",
            noise_multiplier=config.noise_multiplier,
            simulated=self.key.simulated,
            extras={
                "rounds_planned": config.rounds,
                "lambda": config_dict(config)["clip"],
                "l2_sensitivity": None if math.isinf(config.clip) else config.sensitivity,
                "words": len(self.wordlist),
                **({} if config.noise_multiplier is None else GRID),
                **self._parts,
                **self._releases(),
            },
        )

    def report(
        self,
        *,
        delta: float = DELTA_OF_NOTHING,
        held_out: int = 0,
        content: Mapping[str, str] | None = None,
        at: datetime | None = None,
        data_name: str = "",
    ) -> PrivacyReport:
        """Like `FederatedRun.report`, with the number of users held out for the OOV rate, and the
        `content` that the record is about (SHA-256 by name)."""
        return build(
            [self.stage()],
            delta=delta,
            ledgers={"unigrams": self.ledger},
            config=self.binding.settings,
            inputs={"the list of words": self._list_record},
            secure_aggregation=bool(self._parts),
            held_out=held_out,
            content=content,
            at=at,
            data=self.cohorts.data_set(data_name, str(self.binding.private["users"])),
        )

    def _first(self) -> None:
        self.state = init(self.config, len(self.wordlist))

    def _round(self, index: int, users: Sequence[int], is_last: bool) -> RoundMetrics:
        self.state = apply(self.state, self.config, self._summed(index, users), self.key)
        return self.state.history[-1]

    def _summed(self, index: int, users: Sequence[int]) -> Floats:
        clip, bits = self.config.clip, step_bits(self.config)
        return round_sum(map(self._counts.of, users), clip, len(self.wordlist), bits=bits)

    def _arrays(self) -> tuple[Arrays, Arrays, Mapping[str, Any]]:
        state = self.state
        moments = [state.moments, *(m for _, m in sorted(state.snapshots.items()))]
        public = [state.seen]
        for one in moments:
            public += [np.stack(one[:3]), np.array([one.length, one.sizes])]
        history = [dataclasses.astuple(metrics) for metrics in state.history]
        return public, [], {"snapshots": sorted(state.snapshots), "history": history}

    def _restore(self, public: Arrays, private: Arrays | None, facts: Mapping[str, Any]) -> None:
        seen, rest = public[0], public[1:]
        shape = (3, len(self.wordlist))
        if seen.shape != shape[1:] or any(rows.shape != shape for rows in rest[::2]):
            raise FormatError(
                "the checkpoint and the list have different numbers of words; give the list that "
                "the checkpoint was made with, or start again in another folder"
            )
        moments = [_moments(rows, sizes) for rows, sizes in zip(rest[::2], rest[1::2], strict=True)]
        history = tuple(RoundMetrics(*row) for row in facts["history"])
        snapshots = dict(zip(facts["snapshots"], moments[1:], strict=True))
        self.state = UnigramState(len(history), moments[0], seen, snapshots, history)

    def _line(self, done: RoundMetrics) -> dict[str, Any]:
        return {**dataclasses.asdict(done), "round": done.round - 1}


def _moments(rows: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64]) -> Moments:
    total, squares, cross = rows
    return Moments(total, squares, cross, float(sizes[0]), float(sizes[1]))


def make_sampler(
    users: int,
    key: Key,
    *,
    report_goal: int,
    poisson: float | None = None,
    gap: int | None = None,
    max_participations: int | None = None,
) -> Sampler:
    """Makes a sampler: users by probability `poisson`, or `report_goal` eligible ones per round."""
    if poisson is not None:
        return PoissonSampler(users, poisson, key)
    if gap is None and max_participations is None:
        return FixedGoalSampler(users, report_goal, key)
    return AvailabilitySampler(
        users, report_goal, key, gap=gap or 1, max_participations=max_participations
    )


def folder_of(output: Path, *, released: bool) -> RunFolder:
    """Opens the folder of the run for `output`; an existing run resumes. Raises ConfigError if a
    new run would replace a release or, if the new run is `released`, any output."""
    work = Path(f"{output}{WORK}")
    if not work.exists():  # an existing run resumes, or is refused
        _refuse_to_replace(output, released=released)
    return RunFolder(
        work,
        journal=Path(f"{output}{JOURNAL}"),
        reports=(Path(f"{output}{REPORT_MD}"), Path(f"{output}{REPORT_JSON}")),
        private=True,
    )


def _refuse_to_replace(output: Path, *, released: bool) -> None:
    endings = ("", LEDGER, REPORT_MD, REPORT_JSON, SIDECAR_SUFFIX, JOURNAL)
    there = [path for ending in endings if (path := Path(f"{output}{ending}")).exists()]
    if there and not released:
        # Outputs without a guarantee may be replaced.
        try:
            record = json.loads(sidecar(output).read_text(encoding="utf-8"))["provenance"]
            released = Provenance.from_dict(record).guarantee is not None
        except (DlmError, OSError, ValueError, KeyError, TypeError):
            return
    if there and released:
        more = f" (and {counted(len(there) - 1, 'other file')})" if len(there) > 1 else ""
        raise ConfigError(
            f"{there[0]}{more} already exists. Releasing users' counts cannot be undone, and "
            "another count would add to the privacy cost. Give another --output and keep both, or "
            "remove the old files"
        )


def write_release(
    collection: Collection,
    output: Path,
    *,
    delta: float | None,
    held_out: int,
    at: datetime | None = None,
    data_name: str = "",
) -> tuple[WordCounts, PrivacyReport]:
    """Writes ledger, report, counts and their record; a repeated call writes the same files."""
    counts = collection.counts()
    report = collection.report(
        delta=DELTA_OF_NOTHING if delta is None else delta,
        held_out=held_out,
        content={DIGEST: content_digest(counts_text(counts))},
        at=at,
        data_name=data_name,
    )
    collection.ledger.save(f"{output}{LEDGER}")
    report.write(Path(f"{output}{REPORT_MD}"), Path(f"{output}{REPORT_JSON}"))
    counts = dataclasses.replace(counts, provenance=report.provenance)
    write_counts(output, counts)
    return counts, report
