"""Words counted by devices, which keep their text: what `dlm unigrams` counts, added up by secure
aggregation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlm.federated.collect import Collection
from dlm.federated.count_unigrams import key_of
from dlm.federated.devices.engine import DeviceRounds, Network, RoundOutcome
from dlm.federated.devices.fleet import Fleet
from dlm.federated.devices.participant import counts_segment
from dlm.federated.devices.settings import ServerSettings
from dlm.federated.devices.training import OnDevices
from dlm.federated.run_folder import RunFolder
from dlm.federated.sampling import check_population
from dlm.federated.unigram_settings import CollectionSettings
from dlm.federated.unigrams import Floats, RoundMetrics, steps_per_count
from dlm.federated.words import WordList
from dlm.record.provenance import Provenance

MOST_WORDS = 1 << 53  # of a user who is counted in full


class DeviceCollection(OnDevices[RoundMetrics], Collection):
    """As `Collection`, of the devices of a fleet that a network reaches.

    Raises  ConfigError  also without a finite lambda
    """

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
        self.save_every = 1  # so that devices are asked for none again

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
