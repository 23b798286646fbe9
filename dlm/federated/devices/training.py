"""Runs whose users are devices, which keep their text; the server knows only pseudonyms. Such runs
do what `dlm federate` and `dlm unigrams` do, but add up inputs by secure aggregation."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dlm.errors import ConfigError, UnavailableError
from dlm.federated.counting.collect import Collection
from dlm.federated.counting.count_unigrams import key_of
from dlm.federated.counting.settings import CollectionSettings
from dlm.federated.counting.unigrams import Floats, RoundMetrics, steps_per_count
from dlm.federated.devices.encoding import SecureAggregator
from dlm.federated.devices.engine import (
    DeviceCohort,
    DeviceRounds,
    DevicesEngine,
    Network,
    RoundOutcome,
)
from dlm.federated.devices.fleet import Fleet
from dlm.federated.devices.participant import counts_segment
from dlm.federated.devices.protocol import least_threshold
from dlm.federated.devices.settings import LEAST_DEVICES, MOST_DEVICES, ServerSettings
from dlm.federated.keys import Key
from dlm.federated.run.run import Done, FederatedRun
from dlm.federated.run.run_folder import RunFolder
from dlm.federated.run.sampling import AvailabilitySampler, Sampler, Users, check_population
from dlm.federated.training.engine import Aggregator, Engine
from dlm.federated.training.settings import TrainingSettings
from dlm.federated.training.train import RoundReport, Training
from dlm.federated.words import WordList
from dlm.record.provenance import Provenance

MOST_ABANDONED = 3  # abandoned rounds in a row, after which the operator must find the cause
POLL_S = 1.0  # seconds between two check-in requests to the devices
CHECK_IN_S = 60.0  # seconds that devices have to answer a check-in request
MOST_NAMED = 10  # maximum number of missing devices named in a message
MOST_WORDS = 1 << 53  # the cap on a user's words if all words are counted
TELL_S = 10.0  # seconds of waiting after which missing devices are reported


class CheckedIn(AvailabilitySampler):
    """Samples `asked` devices as soon as that many have checked in and can take part or, when the
    wait is over, at least `goal`. For each device, `ready` returns whether the device's own clock
    lets it take part in a round, or None if it is not connected."""

    def __init__(
        self,
        users: int,
        asked: int,
        key: Key,
        *,
        goal: int,
        ready: Callable[[int], Sequence[bool | None]],
        wait_s: float,
        on_waiting: Callable[[Sequence[bool | None]], None] = lambda heard: None,
        **limits: Any,
    ) -> None:
        super().__init__(users, asked, key, **limits)
        self._goal, self._ready, self._wait_s = goal, ready, wait_s
        self._heard: Sequence[bool | None] = ()
        self._on_waiting = on_waiting

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "report_goal": self._goal, "asked": self.report_goal}

    def available(self, round: int, now: float) -> npt.NDArray[np.bool_]:  # noqa: A002
        """The devices that answer, and whose own clocks let them take part."""
        self._heard = self._ready(round)
        return np.array([one is True for one in self._heard])

    def cohort_when_ready(
        self,
        round: int,  # noqa: A002
        now: float,
        **_: Any,
    ) -> tuple[Users, float]:
        """Returns (devices, Unix time in seconds); UnavailableError if too few devices come.

        The cohort is empty if enough connected devices refuse this round, but would accept the
        round one gap later: they sent inputs in this round before the server was killed.
        """
        end_s, tell_s = time.monotonic() + self._wait_s, time.monotonic() + TELL_S
        while True:
            over = time.monotonic() >= end_s
            try:
                now = time.time()
                return self.cohort(round, now, self._goal if over else 0), now
            except UnavailableError as exc:
                willing = sum(one is True for one in self._heard)
                if willing < self._goal and (over or None not in self._heard):
                    later = sum(one is True for one in self._ready(round + self.gap))
                    if later >= self._goal:
                        self._round = round
                        return np.zeros(0, np.int64), time.time()
                if over:
                    refusing = sum(one is False for one in self._heard)
                    exc.add_note(
                        f"waited {self._wait_s:g} s (--wait-s); {refusing} more devices are "
                        "connected, but refuse to take part until their own pause has passed; run "
                        "the same command again when more devices are available"
                    )
                    raise
            if time.monotonic() >= tell_s:
                self._on_waiting(self._heard)
                tell_s = math.inf
            time.sleep(POLL_S)


class OnDevices(FederatedRun[Done]):
    """A run whose users are the devices of a fleet."""

    _devices: DeviceRounds

    def _meet(
        self,
        fleet: Fleet,
        given: ServerSettings,
        goal: int,
        on_outcome: Callable[[RoundOutcome], None],
        tell: Callable[[str], None],
    ) -> None:
        """Stores the settings; ConfigError if devices cannot run rounds with `goal` inputs."""
        self._fleet, self._given, self._goal = fleet, given, goal
        self._on_outcome, self._abandoned, self._tell = on_outcome, 0, tell
        asked = given.asked(goal)
        if not LEAST_DEVICES <= goal <= asked <= MOST_DEVICES:
            raise ConfigError(
                f"report_goal is {goal}, so {asked} devices are asked to join; expected "
                f"{LEAST_DEVICES} to {MOST_DEVICES} devices, since each device shares secrets with "
                "every other one"
            )
        if (least := least_threshold(asked, active=fleet.keys is not None)) > goal:
            raise ConfigError(
                f"over_selection is {given.over_selection:g}: {asked} devices are asked for {goal} "
                f"inputs, but {least} of these devices must stay to the end; lower over_selection"
            )

    def _asked(self, index: int, users: Sequence[int]) -> DeviceCohort:
        return DeviceCohort(self._run_id, index, [self._fleet.names[user] for user in users])

    def _cohort(self, index: int) -> list[int]:
        """Returns the round's cohort; UnavailableError if the last rounds were abandoned, which
        means that they released only noise."""
        if self._abandoned == MOST_ABANDONED:
            raise UnavailableError(
                f"{MOST_ABANDONED} rounds in a row were abandoned, up to round {index - 1} "
                "(counted from 0). The lines above say why devices dropped out; run the same "
                "command again to continue"
            )
        return super()._cohort(index)

    def _heard(self, outcome: RoundOutcome) -> None:
        if outcome.asked:
            self._abandoned = self._abandoned + 1 if outcome.abandoned else 0
        self._on_outcome(outcome)

    @property
    def _run_id(self) -> str:
        assert self.folder is not None
        return self.folder.run_id

    @property
    def _cohort_size(self) -> int:
        return self._given.asked(self._goal)

    def _checked_in(self, key: Key, **limits: Any) -> CheckedIn:
        return CheckedIn(
            len(self._fleet),
            self._cohort_size,
            key,
            goal=self._goal,
            ready=self._ready,
            wait_s=self._given.wait_s,
            on_waiting=self._waits,
            **limits,
        )

    def _waits(self, heard: Sequence[bool | None]) -> None:
        silent = [name for name, one in zip(self._fleet.names, heard, strict=True) if one is None]
        more = ", ..." if len(silent) > MOST_NAMED else ""
        named = f"; no answer from {', '.join(silent[:MOST_NAMED])}{more}" if silent else ""
        self._tell(
            f"  waiting for {self._cohort_size} devices: {sum(one is True for one in heard)} can "
            f"take part now{named}"
        )

    def _ready(self, index: int) -> list[bool | None]:
        names = self._fleet.names
        found = self._devices.ready(self._run_id, index, names, CHECK_IN_S)
        return list(map(found.get, names))


class DeviceTraining(OnDevices[RoundReport], Training):
    """`Training` on the devices of a fleet that a network reaches. Also raises ConfigError for
    settings that need text or users on this machine."""

    def __init__(
        self,
        settings: TrainingSettings,
        fleet: Fleet,
        folder: RunFolder,
        network: Network,
        given: ServerSettings,
        *,
        progress: Callable[[str], None] = lambda line: None,
        on_outcome: Callable[[RoundOutcome], None] = lambda outcome: None,
    ) -> None:
        _check(settings)
        self._meet(fleet, given, settings.sampling.report_goal, on_outcome, progress)
        self._network = network
        super().__init__(settings, fleet, folder, progress=progress)
        self.save_every = 1  # every round is saved, since devices refuse to repeat one

    def _make_engine(self, aggregator: Aggregator | None) -> Engine:
        assert isinstance(aggregator, SecureAggregator) and self._vocabulary is not None
        settings = self.settings
        engine = DevicesEngine(
            self.model,
            settings.local,
            aggregator,
            self._network,
            keys=self._fleet.keys,
            vocabulary=self._vocabulary.content,
            text={"tokenizer": settings.data.tokenizer, "max_tokens": settings.data.max_tokens},
            gap=settings.privacy.gap,
            most=settings.privacy.max_participations or settings.run.rounds,
            step_s=self._given.step_s,
            on_outcome=self._heard,
        )
        self._devices = engine
        return engine

    def _make_sampler(self) -> Sampler:
        privacy = self.settings.privacy
        return self._checked_in(
            self._root.fold("sampling"),
            gap=privacy.gap,
            max_participations=privacy.max_participations or None,
            timer_s=self.settings.sampling.timer_s,
        )


def _check(settings: TrainingSettings) -> None:
    sampling = settings.sampling
    wrong = {
        f"aggregation.secure is {settings.aggregation.secure}; expected true: devices send nothing "
        "unencrypted": not settings.aggregation.secure,
        f"sampling.kind is {sampling.kind}; expected timer, since the server does not choose which "
        "devices check in": sampling.kind != "timer",
        "sampling.low, .high and .zones apply only to simulated devices; leave them out": (
            sampling.diurnal() is not None
        ),
        f"local.users_at_once is {settings.local.users_at_once}; expected 1: a device has one "
        "user": settings.local.users_at_once != 1,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(what)


class DeviceCollection(OnDevices[RoundMetrics], Collection):
    """`Collection` on the devices of a fleet. Also raises ConfigError if lambda is not finite."""

    def __init__(
        self,
        fleet: Fleet,
        words: Sequence[str],
        settings: CollectionSettings,
        network: Network,
        given: ServerSettings,
        *,
        folder: RunFolder,
        list_record: Provenance | None,
        on_outcome: Callable[[RoundOutcome], None],
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._meet(fleet, given, settings.goal, on_outcome, progress)
        self._segment = counts_segment(settings.config, len(words), settings.goal)
        self._list = WordList(tuple(words))
        self._asks = {
            "model": {"vocab_size": self._list.size},
            "text": {
                "tokenizer": settings.tokenizer,
                "max_tokens": settings.cap_words or MOST_WORDS,
            },
            "counting": dataclasses.asdict(settings.config),
            "goal": settings.goal,
        }
        self._devices = DeviceRounds(
            network,
            keys=fleet.keys,
            gap=settings.gap or 1,
            most=settings.max_participations or settings.rounds,
            step_s=given.step_s,
            on_outcome=self._heard,
        )
        self._parts = {"engine": "DevicesEngine", "aggregator": self._devices.protocol}
        key = key_of(settings)
        limits: Any = {"gap": settings.gap or 1, "max_participations": settings.max_participations}
        check_population(len(fleet), self._cohort_size, settings.rounds, **limits)
        super().__init__(
            fleet,
            words,
            settings.config,
            self._checked_in(key.fold("unigrams", "sampling"), **limits),
            key,
            tokenizer=settings.tokenizer,
            folder=folder,
            list_record=list_record,
            **limits,
        )
        self.save_every = 1  # every round is saved, since devices refuse to repeat one

    def _summed(self, index: int, users: Sequence[int]) -> Floats:
        vectors, _ = self._devices.summed(
            self._asked(index, users),
            (self._segment,),
            self._goal,
            self._asks,
            self._list.content,
        )
        steps = vectors[0] if vectors else np.zeros(len(self.wordlist))
        return steps / steps_per_count(self.config)
