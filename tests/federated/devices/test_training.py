"""A run of devices in this process: what happens if its server is killed in a round."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")

from dlm.errors import UnavailableError
from dlm.federated.counting.settings import CollectionSettings
from dlm.federated.devices import training
from dlm.federated.devices.clocks import Clocks
from dlm.federated.devices.fleet import Fleet
from dlm.federated.devices.messages import from_bytes, to_bytes
from dlm.federated.devices.participant import DeviceAnswer, Participant, Request
from dlm.federated.devices.settings import OwnerLimits, ServerSettings
from dlm.federated.devices.training import CheckedIn, DeviceCollection, DeviceTraining
from dlm.federated.keys import Key
from dlm.federated.run.run_folder import RunFolder
from dlm.federated.training.settings import TrainingSettings
from federated.compiling import quickly
from federated.devices.toy_device import DEVICES, VOCABULARY, rounding, signer_of, text_of

SETTINGS = """
[run]
rounds = 4
[data]
vocabulary = "words.txt"
public = "the tests"
[model]
embedding_size = 4
hidden_size = 4
[local]
batch_size = 2
unroll = 4
[privacy]
clip_norm = 1.0
mechanism = "tree"
noise_multiplier = 0.5
delta = 1e-3
[sampling]
report_goal = 4
[aggregation]
secure = true
"""


class ServerKilled(BaseException):
    """Ends a server at once."""


class InProcess:
    """The devices; `kill` ends the server before a step, `forge` gives an answer before theirs."""

    def __init__(self, folder: Path, most: int) -> None:
        self.kill, self.forge = "", False
        keys = frozenset(signer_of(seed).public for seed in range(DEVICES))
        self.devices = {
            f"d{seed}": Participant(
                lambda task, seed=seed: lambda: text_of(seed),  # type: ignore[misc]
                Clocks(folder / f"d{seed}.clocks"),
                OwnerLimits(0.0, most),
                keys,
                signer_of(seed),
                os.urandom,
                rounding=rounding,
            )
            for seed in range(DEVICES)
        }

    def ask(
        self,
        requests: Mapping[str, bytes],
        hear: Callable[[str, bytes], bool],
        timeout_s: float,
        most_bytes: int,
    ) -> None:
        for name, data in requests.items():
            if self.kill and from_bytes(Request, data).step == self.kill:
                raise ServerKilled
            said = self.devices[name].answer(data)
            assert len(said) <= most_bytes
            if self.forge and (honest := from_bytes(DeviceAnswer, said)).content:
                changed = honest.content[:-1] + bytes([honest.content[-1] ^ 1])
                hear(name, to_bytes(replace(honest, content=changed)))
            hear(name, said)


@pytest.fixture(autouse=True)
def quick_compiling() -> Iterator[None]:
    """Much is compiled here, and little computed."""
    with quickly():
        yield


@pytest.fixture
def place(tmp_path: Path) -> Path:
    words = [f"w{number}" for number in range(3, VOCABULARY)]
    (tmp_path / "words.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "run.toml").write_text(SETTINGS)
    return tmp_path


def fleet_of(network: InProcess) -> Fleet:
    names = tuple(network.devices)
    return Fleet(names, {name: signer_of(int(name[1:])).public for name in names})


def opened(place: Path, network: InProcess) -> DeviceTraining:
    settings = TrainingSettings.read(place / "run.toml")
    folder = RunFolder(place / "run")
    return DeviceTraining(settings, fleet_of(network), folder, network, ServerSettings(wait_s=0.0))


def test_a_run_goes_on_after_a_round_that_its_server_was_killed_in(place: Path) -> None:
    """Devices take part once in it, so nobody is left: it is of noise, and the ledger says so."""
    network = InProcess(place, most=100)
    with opened(place, network) as training:
        rounds = training.run()
        next(rounds)
        network.kill = "survivors"
        with pytest.raises(ServerKilled):
            next(rounds)
    network.kill = ""
    with opened(place, network) as training:
        done = list(training.run())
        assert [one.diagnostics.round for one in done] == [1, 2, 3]
        assert training.ledger.cohort_sizes() == [4, 0, 4, 4]
        assert all(one.diagnostics.released_norm > 0 for one in done)


def test_owners_who_allow_no_more_rounds_end_a_run(place: Path) -> None:
    """It is not filled up with rounds of nobody."""
    network = InProcess(place, most=1)
    with opened(place, network) as training, pytest.raises(UnavailableError):
        list(training.run())
    assert training.ledger.cohort_sizes() == [4]


@pytest.mark.parametrize(("here", "drawn"), [(5, 4), (4, 4), (3, 3), (2, 0)])
def test_a_round_asks_more_devices_than_its_goal_if_they_come(here: int, drawn: int) -> None:
    """Of five devices, four for three inputs."""
    answers = [True] * here + [None] * (5 - here)
    sampler = CheckedIn(5, 4, Key.from_seed(1), goal=3, ready=lambda index: answers, wait_s=0.0)
    if not drawn:
        with pytest.raises(UnavailableError):
            sampler.cohort_when_ready(0, 0.0)
        return
    assert (sampler.describe()["asked"], sampler.describe()["report_goal"]) == (4, 3)
    users, _ = sampler.cohort_when_ready(0, 0.0)
    assert len(set(users.tolist()) & set(range(here))) == len(users) == drawn


def counting_of(place: Path, network: InProcess, output: str = "counts") -> DeviceCollection:
    return DeviceCollection(
        fleet_of(network),
        (place / "words.txt").read_text().split(),
        CollectionSettings(clip=5.0, rounds=40, report_goal=DEVICES),
        network,
        ServerSettings(wait_s=0.0),
        folder=RunFolder(place / output),
        list_record=None,
        on_outcome=lambda outcome: None,
    )


def test_answers_that_whoever_carries_them_has_changed_do_not_count(place: Path) -> None:
    """Not even where they come first: devices sign each."""
    network, totals = InProcess(place, most=100), []
    for forge in (False, True):
        network.forge = forge
        with counting_of(place, network, f"forged {forge}") as counting:
            list(counting.run(until=1))
            totals.append(counting.state.totals.tolist())
    assert totals[0] == totals[1] and any(totals[0])


def test_who_is_waited_for_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TELL_S", 0.0)
    monkeypatch.setattr(training, "POLL_S", 0.0)
    answers = iter([[True, None, True]] * 3 + [[True] * 3])
    told: list[Sequence[bool | None]] = []
    sampler = CheckedIn(
        3,
        3,
        Key.from_seed(1),
        goal=3,
        ready=lambda index: next(answers),
        wait_s=60.0,
        on_waiting=told.append,
    )
    users, _ = sampler.cohort_when_ready(0, 0.0)
    assert (len(users), told) == (3, [[True, None, True]])


def test_counts_are_saved_after_each_round(place: Path) -> None:
    """So devices are asked for no round again that they have done."""
    network = InProcess(place, most=100)
    with counting_of(place, network) as counting:
        rounds = counting.run()
        next(rounds)
        network.kill = "survivors"
        with pytest.raises(ServerKilled):
            next(rounds)
    network.kill = ""
    with counting_of(place, network) as counting:
        assert counting.rounds_done == 1
        list(counting.run(until=3))
        assert counting.ledger.cohort_sizes() == [DEVICES] * 3
