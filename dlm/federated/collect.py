"""A whole collection of unigrams: rounds, ledger and checkpoint, stopped and resumed at will."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.federated.convergence import Moments
from dlm.federated.counts_file import WordCounts, ranked
from dlm.federated.keys import Key
from dlm.federated.ledger import ParticipationLedger
from dlm.federated.provenance import digest_of
from dlm.federated.run_folder import locked
from dlm.federated.sampling import AvailabilitySampler, Sampler
from dlm.federated.unigrams import (
    RoundMetrics,
    Split,
    UnigramConfig,
    UnigramState,
    UserCounts,
    apply,
    config_dict,
    init,
    round_sum,
    seen_threshold,
)
from dlm.federated.users import UserDataset, words_of
from dlm.files import replacing

CHECKPOINT_VERSION = 2  # 2: rounds' sizes, and not their squares alone


class Collection:
    """Rounds of counting over a dataset, from its beginning or from a checkpoint.

    Args
        gap, max_part   what the ledger enforces; with noise both have to be given, since accounting
                        rests on them (with Poisson sampling on q instead)
        round_s         seconds from the beginning of a round to that of the next, for timers
        tokenizer       a name for `split`, so that a checkpoint tells one from another
    Guarantees
        a run that was stopped and resumed with the same seed ends in the same bits; with noise, a
        round is in the checkpoint, ledger included, before anything is told of it
    Raises
        ConfigError    a checkpoint of other users, words or settings
        PrivacyError   a cohort that breaks what the ledger enforces; noise without bounds to
                       account with, or Poisson sampling with bounds
    """

    def __init__(
        self,
        dataset: UserDataset,
        whitelist: Sequence[str],
        config: UnigramConfig,
        sampler: Sampler,
        key: Key,
        *,
        gap: int | None = None,
        max_part: int | None = None,
        split: Split = words_of,
        tokenizer: str = "whitespace",
        round_s: float = 0.0,
        checkpoint: str | Path | None = None,
    ):
        if sampler.users != len(dataset):
            raise ConfigError(
                f"the sampler is of {sampler.users} users, the dataset of {len(dataset)}"
            )
        drawn = sampler.describe()
        if config.noise_multiplier is not None and drawn["kind"] != "poisson" and max_part is None:
            raise PrivacyError(
                "with noise, either users are drawn by Poisson sampling or max_part is enforced: "
                "otherwise nothing bounds how often a user is counted"
            )
        if drawn["kind"] == "poisson" and ((gap or 1) > 1 or max_part is not None):
            raise PrivacyError(
                f"a gap of {gap} and at most {max_part} participations are to be enforced, and "
                "users are Poisson-sampled: cohorts that keep to bounds are no Poisson samples"
            )
        self.dataset, self.whitelist, self.config = dataset, tuple(whitelist), config
        self.sampler, self.key = sampler, key
        self.ledger = ParticipationLedger(len(dataset), gap=gap, max_part=max_part, sampling=drawn)
        self.state = init(config, len(self.whitelist))
        self.now = 0.0
        self._round_s = round_s
        self._counts = UserCounts(dataset, self.whitelist, cap_words=config.cap_words, split=split)
        self._path = None if checkpoint is None else Path(checkpoint)
        self.settings: dict[str, Any] = {
            "unigrams": config_dict(config),
            "tokenizer": tokenizer,
            "sampling": drawn,
            "enforced": {"gap": gap, "max_part": max_part},
            "round_s": round_s,
            "users": dataset.digest,
            "whitelist": digest_of({"words": list(self.whitelist)}),
            # Of a seed a fingerprint, so that a run is not resumed with another; of a key of the
            # system nothing at all: a resumed run draws a new one.
            "key": key.fold("fingerprint").words(2).tolist() if key.simulated else "system",
        }
        self.resumed = self._path is not None and self._path.exists()
        self._held: bytes | None = None
        if self.resumed:
            self._load()

    @property
    def done(self) -> bool:
        """Whether all rounds are."""
        return self.state.round >= self.config.rounds

    def run(
        self, told: Callable[[RoundMetrics], None] | None = None, *, stop_after: int | None = None
    ) -> UnigramState:
        """Does the rounds that are left, or `stop_after` of them; returns the state."""
        if self._path is None:
            return self._rounds(told, stop_after)
        handle = locked(self._path.with_name(self._path.name + ".lock"))
        try:
            if self._on_disk() != self._held:
                raise ConfigError(
                    f"another process went on with {self._path}: what this one has of it is of an "
                    "earlier round, which would be released again. Begin again from the file"
                )
            return self._rounds(told, stop_after)
        finally:
            os.close(handle)

    def _on_disk(self) -> bytes | None:
        """A digest of the checkpoint that is there."""
        if self._path is None or not self._path.exists():
            return None
        return hashlib.sha256(self._path.read_bytes()).digest()

    def _rounds(
        self, told: Callable[[RoundMetrics], None] | None, stop_after: int | None
    ) -> UnigramState:
        every = 1 if self.config.noise_multiplier is not None else max(1, self.config.rounds // 20)
        left = self.config.rounds if stop_after is None else stop_after
        saved = self.state.round
        try:
            while not self.done and left > 0:
                self._round()
                left -= 1
                if self.state.round % every == 0 or self.done:
                    self._save()
                    saved = self.state.round
                if told is not None:
                    told(self.state.history[-1])
        finally:
            if self.state.round != saved:
                self._save()
        return self.state

    def _round(self) -> None:
        number = self.state.round
        if isinstance(self.sampler, AvailabilitySampler):
            cohort, self.now = self.sampler.cohort_when_ready(number, self.now)
        else:
            cohort = self.sampler.cohort(number, self.now)
        users = cohort.tolist()
        # Recorded before anybody is counted: what the ledger refuses is never looked at.
        self.ledger.record(number, (self.dataset.user_id(user) for user in users))
        summed = round_sum(map(self._counts.of, users), self.config.clip, len(self.whitelist))
        self.state = apply(self.state, self.config, summed, self.key)
        self.now += self._round_s

    def counts(self) -> WordCounts:
        """The words seen so far and their counts, most frequent first."""
        least = seen_threshold(self.config, max(self.state.round, 1), len(self.whitelist))
        return ranked(self.whitelist, self.state.totals, least)

    def stage(self) -> dict[str, Any]:
        """What accounting takes of this stage: an `account.compose.StageRecord` as JSON."""
        raw = self.config.noise_multiplier is None
        drawn = self.sampler.describe()
        return {
            "stage": "unigrams",
            "mechanism": "none" if raw else "gaussian",
            "noise_multiplier": self.config.noise_multiplier,
            "rounds": self.config.rounds,
            "gap": self.ledger.gap or 1,
            # Where nothing is enforced, a user may be in every round.
            "max_part": self.ledger.max_part or self.config.rounds,
            "sampling": drawn["kind"],
            "sampling_rate": None if raw else drawn.get("q"),
            "simulated": self.key.simulated,
            "extras": {
                "lambda": self.settings["unigrams"]["clip"],
                "l2_sensitivity": None if math.isinf(self.config.clip) else self.config.sensitivity,
                "words": len(self.whitelist),
            },
        }

    def _save(self) -> None:
        if self._path is None:
            return
        state = self.state
        head = {
            "version": CHECKPOINT_VERSION,
            "settings": self.settings,
            "round": state.round,
            "now": self.now,
            "snapshots": sorted(state.snapshots),
            "sizes": [
                [kept.length, kept.sizes]
                for kept in (state.moments, *(m for _, m in sorted(state.snapshots.items())))
            ],
            "history": [dataclasses.astuple(metrics) for metrics in state.history],
        }
        arrays = {
            "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
            "ledger": np.frombuffer(self.ledger.to_bytes(), np.uint8),
            "moments": np.stack(state.moments[:3]),
            "seen": np.packbits(state.seen),
            **{f"snapshot{k}": np.stack(kept[:3]) for k, kept in state.snapshots.items()},
            **{f"sampler_{name}": value for name, value in self.sampler.state().items()},
        }
        # The ledger is in it: for the owner alone.
        with replacing(self._path, mode=0o600) as file:
            np.savez(file, **arrays)
        self._held = self._on_disk()

    def _load(self) -> None:
        assert self._path is not None
        try:
            content = self._path.read_bytes()
            self._held = hashlib.sha256(content).digest()
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                arrays = dict(file)
            head = json.loads(arrays["head"].tobytes())
            if head["version"] != CHECKPOINT_VERSION:
                raise ValueError(f"version {head['version']}")
            found = head["settings"]
            mine = json.loads(json.dumps(self.settings))
            if found != mine:
                parts = sorted(k for k in {*found, *mine} if found.get(k) != mine.get(k))
                raise ConfigError(
                    f"{self._path} is of a run with other settings ({', '.join(parts)}): give "
                    "those of that run, or another output to begin anew"
                )
            ledger = ParticipationLedger.from_bytes(arrays["ledger"].tobytes(), str(self._path))
            if ledger.rounds != head["round"]:
                raise PrivacyError(
                    f"{self._path} holds {head['round']} rounds and a ledger of {ledger.rounds}"
                )
            words = len(self.whitelist)
            self.state = UnigramState(
                head["round"],
                _moments(arrays["moments"], head["sizes"][0]),
                np.unpackbits(arrays["seen"], count=words).astype(bool),
                {
                    k: _moments(arrays[f"snapshot{k}"], size)
                    for k, size in zip(head["snapshots"], head["sizes"][1:], strict=True)
                },
                tuple(RoundMetrics(*row) for row in head["history"]),
            )
            if len(self.state.totals) != words:
                raise ValueError("another number of words")
            self.sampler.restore(
                {
                    n.removeprefix("sampler_"): v
                    for n, v in arrays.items()
                    if n.startswith("sampler_")
                }
            )
            self.ledger, self.now = ledger, head["now"]
        except (KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno is not None:
                raise
            raise FormatError(f"{self._path} is no checkpoint of unigrams: {exc!r}") from exc


def _moments(rows: npt.NDArray[np.float64], sizes: Sequence[float]) -> Moments:
    total, squares, cross = rows
    length, squared = sizes
    return Moments(total, squares, cross, length, squared)
