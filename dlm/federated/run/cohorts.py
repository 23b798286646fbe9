"""Draws the users of each round of a run, and records them before anybody is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from dlm.errors import ConfigError
from dlm.federated.run.sampling import AvailabilitySampler, PoissonSampler, Sampler
from dlm.federated.tokens import Ids
from dlm.record.ledger import ParticipationLedger


class Population(Protocol):
    """Users with text on this machine, or devices that keep their text."""

    def __len__(self) -> int: ...

    def user_id(self, user: int) -> str:
        """The name of a user in the ledger."""
        ...

    def tokens(
        self,
        user: int,
        encode: Callable[[list[str]], Any],
        *,
        cap: int | None = None,
        split: Callable[[str], list[str]] = str.split,
    ) -> list[Ids]:
        """A user's utterances as ids, at most `cap` in total; none if devices keep the text."""
        ...

    def split(self, fraction: float) -> tuple[Self, Self]:
        """Splits the users: returns (the rest, about `fraction` of the users)."""
        ...

    @property
    def digest(self) -> str:
        """A digest that identifies the population, compared when a run resumes."""
        ...


class Cohorts:
    """A sampler of users, its clock, and a ledger of the users drawn. The ledger enforces `gap` and
    `max_participations` unless they are None. `round_s` is the time from the beginning of one round
    to the next; only a sampler with timers uses it."""

    def __init__(
        self,
        users: Population,
        sampler: Sampler,
        *,
        gap: int | None = None,
        max_participations: int | None = None,
        round_s: float = 0.0,
        salt: bytes | None = None,
    ):
        if sampler.users != len(users):
            raise ConfigError(
                f"the sampler is for {sampler.users} users, but the dataset has {len(users)}; make "
                "a sampler for all users of the dataset"
            )
        self.users, self.sampler = users, sampler
        self.ledger = ParticipationLedger(
            len(users),
            gap=gap,
            max_participations=max_participations,
            sampling=sampler.describe(),
            salt=salt,
        )
        self.now_s = 0.0
        self._round_s = round_s

    def draw(self, index: int) -> list[int]:
        """Draws a round's users, records them in the ledger, and returns their indexes. Raises
        ConfigError if there is no cohort, PrivacyError if the cohort breaks the ledger's limits."""
        if isinstance(self.sampler, AvailabilitySampler):
            cohort, self.now_s = self.sampler.cohort_when_ready(index, self.now_s)
            self.now_s += self._round_s
        else:
            cohort = self.sampler.cohort(index)
        users: list[int] = cohort.tolist()
        self.ledger.record(index, (self.users.user_id(user) for user in users))
        return users

    def data_set(self, name: str, digest: str) -> dict[str, str]:
        return {"name": name or "not named", "digest": self.ledger.keyed_digest(digest)}

    def arrays(self) -> list[npt.NDArray[Any]]:
        state = self.sampler.state()
        return [np.asarray(state[name]) for name in sorted(state)]

    def restore(
        self, arrays: Sequence[npt.NDArray[Any]], ledger: ParticipationLedger, now_s: float
    ) -> None:
        self.sampler.restore(dict(zip(sorted(self.sampler.state()), arrays, strict=True)))
        self.ledger, self.now_s = ledger, now_s

    def bounds(self, rounds: int) -> tuple[int, int]:
        """Returns (gap, maximum participations of a user) for accounting: the enforced limits or,
        without limits, the worst case."""
        gap = self.ledger.gap or 1
        return gap, self.ledger.max_participations or max(-(-rounds // gap), 1)

    def stage(
        self,
        name: str,
        rounds: int,
        *,
        mechanism: str,
        noise_multiplier: float | None,
        simulated: bool,
        **more: Any,
    ) -> dict[str, Any]:
        """Makes a JSON `account.compose.StageRecord` for `rounds` rounds, done or planned."""
        gap, most = self.bounds(rounds)
        drawn = self.ledger.sampling
        # Amplification is known only for independent noise, and depends on how users were drawn.
        ours = type(self.sampler) is PoissonSampler
        amplified = ours and drawn["kind"] == "poisson" and mechanism == "gaussian"
        return {
            "stage": name,
            "mechanism": mechanism,
            "noise_multiplier": noise_multiplier,
            "rounds": rounds,
            "gap": gap,
            "max_participations": most,
            "sampling": drawn["kind"],
            "sampling_rate": drawn["q"] if amplified else None,
            "simulated": simulated,
            **more,
        }
