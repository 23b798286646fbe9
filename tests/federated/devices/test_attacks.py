"""What a server that lies, and a device that lies, get from honest devices through the bytes that
these answer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")

from dlm.federated.counting.settings import UnigramConfig  # noqa: E402
from dlm.federated.counting.unigrams import steps_per_count  # noqa: E402
from dlm.federated.devices import summing  # noqa: E402
from dlm.federated.devices.clocks import Clocks  # noqa: E402
from dlm.federated.devices.encoding import SecureAggregator  # noqa: E402
from dlm.federated.devices.engine import (  # noqa: E402
    DeviceCohort,
    DeviceRounds,
    RoundOutcome,
)
from dlm.federated.devices.messages import from_bytes, to_bytes  # noqa: E402
from dlm.federated.devices.participant import (  # noqa: E402
    DeviceAnswer,
    DeviceText,
    Participant,
    Request,
    Task,
    counts_segment,
    leaves_of,
    segments_of,
)
from dlm.federated.devices.primitives import Vector  # noqa: E402
from dlm.federated.devices.protocol import MaskedInput, SharesDelivery  # noqa: E402
from dlm.federated.devices.settings import OwnerLimits  # noqa: E402
from dlm.federated.devices.summing import RoundAbandoned, Step, SummingState  # noqa: E402
from dlm.federated.keys import Key  # noqa: E402
from dlm.federated.training import rnn  # noqa: E402
from dlm.federated.training.local import LocalConfig  # noqa: E402
from federated.compiling import quickly  # noqa: E402
from federated.devices.toy_device import signer_of  # noqa: E402

NUMBERS = range(1, 5)
KEYS = {number: signer_of(number).public for number in NUMBERS}
WORDS = [f"w{number}" for number in range(9)]
NOBODYS = [f"x{number}" for number in range(9)]
MODEL = rnn.RnnConfig(len(WORDS) + 3, 4, 4)
LOCAL = LocalConfig(batch_size=2, unroll=4, shuffle=False)
DAY_S = 86_400.0


def vocabulary(words: list[str]) -> bytes:
    return "".join(f"{word}\n" for word in words).encode()


@pytest.fixture(autouse=True)
def quick_compiling() -> Iterator[None]:
    with quickly():
        yield


@dataclass
class Fleet:
    """Devices by their numbers, each with a user's text; all know what time it is."""

    folder: Path
    allowed: OwnerLimits = field(default_factory=lambda: OwnerLimits(rest_s=0.0))
    registered: bool = True
    silent: tuple[int, ...] = ()  # their users wrote nothing
    rounding: Callable[[Task], Key] = field(default=lambda task: Key.from_system())
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.devices = {number: self._device(number) for number in NUMBERS}

    def _device(self, number: int) -> Participant:
        words = np.random.default_rng(number).choice(WORDS, (0 if number in self.silent else 4, 5))
        text = self.folder / f"{number}.txt"
        text.write_text("".join(f"{' '.join(line)}\n" for line in words))
        return Participant(
            DeviceText(text),
            Clocks(self.folder / f"{number}.clocks", lambda: self.now_s),
            self.allowed,
            frozenset(KEYS.values()) if self.registered else None,
            signer_of(number) if self.registered else None,
            os.urandom,
            rounding=self.rounding,
        )

    def ask(self, number: int, step: str, content: object) -> DeviceAnswer:
        data = to_bytes(Request(step, to_bytes(content)))
        return from_bytes(DeviceAnswer, self.devices[number].answer(data))


@dataclass
class Found:
    """What a server that checks nothing got of some tasks: inputs, and their sum."""

    refused: dict[int, str] = field(default_factory=dict)
    inputs: int = 0
    total: tuple[Vector, ...] = ()


def asked(fleet: Fleet, tasks: Mapping[int, Task]) -> Found:
    found, terms = Found(), tasks[1].terms
    state = SummingState(replace(terms, verifying=None))
    said: Mapping[int, object] = tasks
    while state.step is not Step.ENDED:
        step, kind = summing.ASKED[state.step]
        for number, one in said.items():
            answer = fleet.ask(number, step, one)
            if answer.error:
                found.refused[number] = answer.error
                continue
            found.inputs += kind is MaskedInput
            state = summing.hear(state, number, from_bytes(kind, answer.content))
        with suppress(RoundAbandoned):
            state, said = summing.go_on(state)
            continue
        return found
    with suppress(RoundAbandoned):
        found.total, _ = summing.summed(state)
    return found


def counting(run: str = "run", index: int = 0) -> Task:
    config = UnigramConfig(100.0, 1)
    settings = {
        "model": {"vocab_size": MODEL.vocab_size},
        "text": {"tokenizer": "whitespace", "max_tokens": 100},
        "counting": asdict(config),
        "goal": len(NUMBERS),
        "gap": 1,
        "most": 100,
    }
    segment = counts_segment(config, len(WORDS), len(NUMBERS))
    content = vocabulary(WORDS)
    return Task(run, index, 0, 3, (segment,), KEYS, json.dumps(settings), content)


def aggregator() -> SecureAggregator:
    return SecureAggregator(1.0, 1000.0, len(NUMBERS))


def training(learning_rate: float = 0.5) -> Task:
    settings = {
        "model": asdict(MODEL),
        "local": asdict(replace(LOCAL, learning_rate=learning_rate)),
        "aggregator": {"clip_norm": 1.0, "scale": 1000.0, "report_goal": len(NUMBERS)},
        "text": {"tokenizer": "whitespace", "max_tokens": 100},
        "gap": 1,
        "most": 100,
    }
    segments = segments_of(aggregator().encoding(rnn.network_size(MODEL)))
    leaves = leaves_of(rnn.init(jax.random.key(1), MODEL))
    return Task(
        "run", 0, 0, 3, segments, KEYS, json.dumps(settings), vocabulary(WORDS), leaves, 1.0, 0.5,
        bytes(32),
    )  # fmt: skip


def to_all(task: Task, victims: Task | None = None) -> dict[int, Task]:
    """Of each device; the first may have another than the others."""
    tasks = {number: replace(task, me=number) for number in NUMBERS}
    return tasks if victims is None else {**tasks, 1: replace(victims, me=1)}


FORMS: dict[str, Callable[[], tuple[Task, Task]]] = {
    "counts of words that nobody says": lambda: (
        counting(),
        replace(counting(), vocabulary=vocabulary(NOBODYS)),
    ),
    "updates at a rate of 1e-30": lambda: (training(), training(1e-30)),
}


@pytest.mark.promise("devices_refuse")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_server_that_gives_one_device_another_task_gets_no_input(
    tmp_path: Path, form: Callable[[], tuple[Task, Task]]
) -> None:
    """The sum would be that device's alone: the others' are zero. Each finds it in the others'
    signatures; the same devices then take part in an honest round."""
    fleet = Fleet(tmp_path)
    real, empty = form()
    mixed = asked(fleet, to_all(empty, real))
    assert set(mixed.refused) == set(NUMBERS)
    assert all(said.startswith("PrivacyError") for said in mixed.refused.values())
    assert mixed.inputs == 0
    honest = asked(fleet, to_all(real))
    assert not honest.refused
    assert honest.inputs == len(NUMBERS)


def test_what_devices_sign_names_each_part_of_a_task_but_their_own_number() -> None:
    task = training()
    changed: dict[str, object] = {
        "run": "another",
        "round": 1,
        "threshold": 4,
        "segments": task.segments[:1],
        "verifying": {**KEYS, 3: KEYS[4], 4: KEYS[3]},
        "settings": json.dumps({**json.loads(task.settings), "most": 99}),
        "vocabulary": vocabulary(NOBODYS),
        "parameters": tuple(bytes(len(one)) for one in task.parameters),
        "bound": 0.25,
        "tracked": 0.25,
        "key": bytes(31) + b"1",
    }
    assert {"me", *changed} == {one.name for one in fields(Task)}
    names = {replace(task, **{name: value}).terms.name for name, value in changed.items()}  # type: ignore[arg-type]
    assert len({task.terms.name, *names}) == 1 + len(changed)
    assert replace(task, me=2).terms.name == task.terms.name


@dataclass
class Meddling:
    """A network that gives the first device other words to count."""

    fleet: Fleet

    def ask(
        self,
        requests: Mapping[str, bytes],
        hear: Callable[[str, bytes], bool],
        timeout_s: float,
        most_bytes: int,
    ) -> None:
        for name, data in requests.items():
            if (request := from_bytes(Request, data)).step == "task" and name == "1":
                task = replace(from_bytes(Task, request.content), vocabulary=vocabulary(NOBODYS))
                data = to_bytes(Request("task", to_bytes(task)))
            hear(name, self.fleet.devices[int(name)].answer(data))


def test_a_device_whose_task_was_changed_on_its_way_is_left_out(tmp_path: Path) -> None:
    outcomes: list[RoundOutcome] = []
    rounds = DeviceRounds(
        Meddling(Fleet(tmp_path)),
        keys={str(number): key for number, key in KEYS.items()},
        gap=1,
        most=100,
        step_s=60.0,
        on_outcome=outcomes.append,
    )
    cohort = DeviceCohort("run", 0, list(map(str, NUMBERS)))
    settings = json.loads(counting().settings)
    (total,), _ = rounds.summed(
        cohort, counting().segments, len(NUMBERS), settings, vocabulary(WORDS)
    )
    assert [set(one.faults) for one in outcomes] == [{"1"}]
    np.testing.assert_array_equal(total, sum(counts_of(tmp_path, n) for n in NUMBERS[1:]))


@pytest.mark.parametrize("mixed", [False, True])
def test_without_keys_inputs_of_different_tasks_do_not_add_up(tmp_path: Path, mixed: bool) -> None:
    """Nothing is signed, so all hand in an input; but no share opens, and no mask between two
    devices cancels. (Such a server can play the other devices instead.)"""
    fleet = Fleet(tmp_path, registered=False)
    real = replace(counting(), verifying=None)
    others = replace(real, vocabulary=vocabulary(NOBODYS)) if mixed else real
    found = asked(fleet, to_all(others, real))
    assert found.inputs == len(NUMBERS)
    if mixed:
        assert not found.total
    else:
        np.testing.assert_array_equal(found.total[0], sum(counts_of(tmp_path, n) for n in NUMBERS))


def counts_of(folder: Path, number: int) -> np.ndarray:
    """How often a user says each word, in steps."""
    words = (folder / f"{number}.txt").read_text().split()
    config = UnigramConfig(**json.loads(counting().settings)["counting"])
    return np.array([words.count(word) for word in WORDS]) * int(steps_per_count(config))


@pytest.mark.promise("devices_refuse")
def test_a_server_that_renames_its_runs_gets_a_device_seldom_and_never_for_good(
    tmp_path: Path,
) -> None:
    """It asks twelve times a day for 40 days, each time for a new run."""
    fleet = Fleet(tmp_path, OwnerLimits())
    taken = []
    for hour in range(0, 24 * 40, 2):
        fleet.now_s = 3600.0 * hour
        if asked(fleet, to_all(counting(f"run {hour}"))).inputs:
            taken.append(fleet.now_s)
    assert np.diff(taken).min() >= DAY_S
    for end_s in taken:
        month = [one for one in taken if end_s - 30 * DAY_S < one <= end_s]
        assert len(month) <= OwnerLimits.max_participations
    assert taken[-1] > 30 * DAY_S


def test_a_server_does_not_know_how_a_device_rounds(tmp_path: Path) -> None:
    """It knows the rotation and may choose a coarse grid: with the rounding, it could tell from the
    sum which numbers of one device were rounded up."""
    task = training()
    totals = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        totals.append(asked(Fleet(tmp_path / folder), to_all(task)).total[0])
    assert np.any(totals[0] != totals[1])
    encoding = aggregator().encoding(rnn.network_size(MODEL))
    signs = encoding.signs(Key.given(task.key))
    first, second = (encoding.decode(one, len(NUMBERS), signs) for one in totals)
    np.testing.assert_allclose(first, second, atol=len(NUMBERS) * 4 / 1000.0)


@pytest.mark.parametrize("goal", [0, len(NUMBERS)])
def test_no_error_tells_which_device_says_a_word(tmp_path: Path, goal: int) -> None:
    """Also where a server asks for sums that no count fits into: all answer alike."""
    task = counting()
    settings = {**json.loads(task.settings), "goal": goal}
    segment = counts_segment(UnigramConfig(100.0, 1), len(WORDS), goal)
    task = replace(task, settings=json.dumps(settings), segments=(segment,))
    found = asked(Fleet(tmp_path, silent=(2,)), to_all(task))
    assert not found.refused
    assert found.inputs == len(NUMBERS)


@pytest.mark.promise("devices_refuse")
def test_a_step_that_fails_ends_the_round_and_counts_once_at_most(tmp_path: Path) -> None:
    """Otherwise a server could use up a device's participations within one round."""
    fleet = Fleet(tmp_path, OwnerLimits(rest_s=0.0, max_participations=3))
    assert not fleet.ask(1, "task", replace(counting(), me=1)).error
    for _ in range(5):
        assert fleet.ask(1, "delivery", SharesDelivery({})).error
    assert not asked(fleet, to_all(counting("another"))).refused


@pytest.mark.parametrize("change", ["epochs", "unroll", "batch_size", "run"])
def test_a_task_without_end_is_refused(tmp_path: Path, change: str) -> None:
    """A device answers one server at a time."""
    task = training()
    settings = json.loads(task.settings)
    if change == "run":
        task = replace(task, run="r" * 900_000)
    else:
        settings["local"][change] = 500_000_000
    answer = Fleet(tmp_path).ask(1, "task", replace(task, me=1, settings=json.dumps(settings)))
    assert answer.error
