"""Secure aggregation, each device and the server a machine of its own; no network."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from dlm.errors import PrivacyError
from dlm.federated.devices import device as machine, shamir, summing
from dlm.federated.devices.primitives import KeyPair, MaskStream, Signer
from dlm.federated.devices.protocol import (
    Advertisement,
    Consents,
    InputSegment,
    MaskedInput,
    OpenedShares,
    RoundTerms,
    Survivors,
    add_mask,
    commitment_of,
    least_threshold,
    mask_seed,
    places_of,
)
from dlm.federated.devices.summing import RoundAbandoned, Step, SummingState

SEGMENTS = (InputSegment(50, 975_001), InputSegment(3, 1 << 62), InputSegment(5, (1 << 32) + 15))
DEVICES = 8


@dataclass
class Party:
    """All devices of a round and their server."""

    seed: int
    devices: int = DEVICES
    signed: bool = True
    threshold: int = 0
    goal: int = 100
    states: dict[int, machine.DeviceState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.draw: Callable[[int], bytes] = self.random.randbytes
        numbers = self.random.sample(range(1 << 60), self.devices)
        self.signers = {one: Signer.drawn(self.draw) for one in numbers} if self.signed else {}
        known = {one: signer.public for one, signer in self.signers.items()} or None
        threshold = self.threshold or least_threshold(self.devices, active=self.signed)
        self.terms = RoundTerms(b"round 1", threshold, SEGMENTS, known)
        rng = np.random.default_rng(self.seed)
        self.inputs = {
            one: [rng.integers(0, s.modulus, s.size, np.int64) for s in SEGMENTS] for one in numbers
        }
        self.server = SummingState(self.terms, self.goal)
        self.told: dict[int, summing.Reply] = {}

    def answer(self, device: int, message: object = None) -> summing.Message:
        """What a device sends in this step, having heard what it was told."""
        told = message or self.told.get(device)
        state = self.states.get(device)
        if state is None:
            signer = self.signers.get(device)
            self.states[device], said = machine.advertise(self.terms, device, signer, self.draw)
            return said
        if isinstance(told, summing.Roster):
            self.states[device], shares = machine.share(state, told, self.draw)
            return shares
        if isinstance(told, summing.SharesDelivery):
            self.states[device], masked = machine.mask(state, told, self.inputs[device])
            return masked
        if isinstance(told, Survivors):
            self.states[device], consent = machine.consent(state, told)
            return consent
        assert isinstance(told, Consents)
        self.states[device], opened = machine.open_shares(state, told)
        return opened

    def step(self, lost: set[int]) -> None:
        """One step with all devices that were told of it, but for those that are lost."""
        for device in list(self.told or self.inputs):
            if device not in lost:
                self.server = summing.hear(self.server, device, self.answer(device))
        self.server, self.told = summing.go_on(self.server)

    def until(self, step: Step) -> Party:
        while self.server.step < step:
            self.step(set())
        return self

    def plain_sum(self, devices: tuple[int, ...]) -> list[np.ndarray]:
        return [
            np.array(
                [sum(int(self.inputs[d][i][j]) for d in devices) % s.modulus for j in range(s.size)]
            )
            for i, s in enumerate(SEGMENTS)
        ]


def equal(found: tuple[np.ndarray, ...], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.promise("devices_sum")
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("lost_in", [None, *list(Step)[:5]])
def test_the_sum_is_that_of_the_devices_that_sent_an_input(
    signed: bool, lost_in: Step | None
) -> None:
    party = Party(seed=3, signed=signed)
    lost: set[int] = set()
    for step in list(Step)[:5]:
        if step is lost_in:
            lost = set(party.random.sample(sorted(party.inputs), 2))
        party.step(lost)
    found, survivors = summing.summed(party.server)
    sent = lost_in is None or lost_in > Step.INPUTS
    assert set(survivors) == set(party.inputs) - (set() if sent else lost)
    assert equal(found, party.plain_sum(survivors))


@pytest.mark.parametrize(
    ("asked", "goal", "answer", "counted"),
    [(8, 8, 8, 8), (8, 7, 8, 7), (8, 6, 6, 6), (8, 7, 6, 6), (8, 6, 5, 0), (12, 9, 12, 9)],
    ids=["all", "over the goal", "the goal", "below the goal", "too few", "many"],
)
def test_a_round_counts_the_first_inputs_up_to_its_goal(
    asked: int, goal: int, answer: int, counted: int
) -> None:
    """Later ones are refused; fewer are a round, down to the threshold of those asked."""
    party = Party(seed=16, devices=asked, goal=goal).until(Step.INPUTS)
    numbers = party.random.sample(sorted(party.inputs), answer)
    for place, device in enumerate(numbers):
        assert summing.is_enough(party.server) == (place >= goal)
        if place < goal:
            party.server = summing.hear(party.server, device, party.answer(device))
            continue
        with pytest.raises(PrivacyError):
            summing.hear(party.server, device, party.answer(device))
    if not counted:
        with pytest.raises(RoundAbandoned):
            summing.go_on(party.server)
        return
    party.server, party.told = summing.go_on(party.server)
    found, survivors = summing.summed(party.until(Step.ENDED).server)
    assert survivors == tuple(sorted(numbers[:counted]))
    assert equal(found, party.plain_sum(survivors))


@pytest.mark.parametrize("step", list(Step)[:5])
def test_a_round_with_too_few_devices_is_abandoned(step: Step) -> None:
    party = Party(seed=4).until(step)
    lost = set(sorted(party.inputs)[: DEVICES - party.terms.threshold + 1])
    with pytest.raises(RoundAbandoned):
        party.step(lost)


@pytest.mark.promise("devices_refuse")
def test_devices_of_one_half_and_of_the_other_cannot_be_told_of_other_survivors() -> None:
    """The attack that the consistency round is for: together the halves would open one input."""
    party = Party(seed=5).until(Step.CONSENTS)
    numbers = sorted(party.inputs)
    victim = numbers[-1]
    signatures = {}
    for device in numbers[:-1]:
        devices = tuple(one for one in numbers if device < numbers[4] or one != victim)
        told = Survivors(devices)
        party.states[device], consent = machine.consent(party.states[device], told)
        signatures[device] = consent.signature
    for device in numbers[:-1]:
        with pytest.raises(PrivacyError):
            machine.open_shares(party.states[device], Consents(signatures))
        seen = {d: s for d, s in signatures.items() if (d < numbers[4]) == (device < numbers[4])}
        with pytest.raises(PrivacyError):
            machine.open_shares(party.states[device], Consents(seen))


@pytest.mark.parametrize("step", list(Step)[1:5])
def test_no_device_takes_a_step_twice(step: Step) -> None:
    party = Party(seed=6).until(step)
    device = next(iter(party.told))
    party.answer(device)
    with pytest.raises(PrivacyError):
        party.answer(device)


def wrong_messages(party: Party, device: int, right: object) -> list[object]:
    if isinstance(right, Advertisement):
        return [replace(right, masking=bytes(31)), replace(right, signature=bytes(64))]
    if isinstance(right, summing.Shares):
        some = dict(list(right.sealed.items())[1:])
        return [replace(right, sealed=some), replace(right, commitments=some)]
    if isinstance(right, MaskedInput):
        high = np.full(SEGMENTS[0].size, SEGMENTS[0].modulus, SEGMENTS[0].dtype).tobytes()
        short = (right.segments[0][8:], *right.segments[1:])
        highest = b"\xff" * SEGMENTS[0].wire_bytes
        rest = right.segments[1:]
        return [MaskedInput(one) for one in ((high, *rest), short, (highest, *rest), ())]
    if isinstance(right, OpenedShares):
        return [replace(right, own={}), replace(right, vanished=right.own)]
    return [summing.Consent(bytes(64))]


@pytest.mark.parametrize("step", list(Step)[:5])
def test_a_wrong_message_is_refused_and_the_round_goes_on(step: Step) -> None:
    party = Party(seed=7).until(step)
    device = sorted(party.inputs)[2]
    right = party.answer(device)
    before = party.server
    for wrong in wrong_messages(party, device, right):
        with pytest.raises(PrivacyError):
            summing.hear(before, device, wrong)  # type: ignore[arg-type]
    heard = summing.hear(before, device, right)
    for sender in (device, 12345):
        with pytest.raises(PrivacyError):
            summing.hear(heard, sender, right)
    later = summing.Consent(b"") if step is not Step.CONSENTS else MaskedInput(())
    with pytest.raises(PrivacyError):
        summing.hear(before, device, later)
    party.server = heard
    party.step({device})
    party.told.setdefault(device, next(iter(party.told.values()), Survivors(())))
    assert party.server.step == step + 1


def test_keys_of_another_device_or_of_none_are_refused() -> None:
    """Else every device would refuse the roster, and one ends the round."""
    party = Party(seed=15, signed=False)
    one, other = sorted(party.inputs)[:2]
    keys = party.answer(one)
    assert isinstance(keys, Advertisement)
    server = summing.hear(party.server, one, keys)
    for copied in (
        keys,
        Advertisement(bytes(31) + b"1", keys.masking),
        Advertisement(*[KeyPair.drawn(party.draw).public] * 2),
        Advertisement(bytes(32), KeyPair.drawn(party.draw).public),
    ):
        with pytest.raises(PrivacyError):
            summing.hear(server, other, copied)


@pytest.mark.promise("devices_sum")
@pytest.mark.parametrize("step", [Step.SHARES, Step.OPENED])
def test_wrong_shares_fail_no_round_that_has_enough_right_ones(step: Step) -> None:
    """As many devices as may vanish open wrong shares, or each seals garbage for as many."""
    party = Party(seed=8, devices=20).until(step)
    numbers = sorted(party.inputs)
    may_vanish = len(numbers) - party.terms.threshold
    for place, device in enumerate(numbers):
        said = party.answer(device)
        if isinstance(said, OpenedShares) and place < may_vanish:
            own = {one: bytes([0, *of[1:-1], of[-1] ^ 1]) for one, of in said.own.items()}
            said = replace(said, own=own)
        elif isinstance(said, summing.Shares):
            others = [numbers[(place + one) % len(numbers)] for one in range(1, may_vanish + 1)]
            said = replace(said, sealed={**said.sealed, **dict.fromkeys(others, bytes(82))})
        party.server = summing.hear(party.server, device, said)
    party.server, party.told = summing.go_on(party.server)
    found, survivors = summing.summed(party.until(Step.ENDED).server)
    assert survivors == tuple(numbers)
    assert equal(found, party.plain_sum(survivors))


def test_too_many_wrong_shares_abandon_the_round() -> None:
    party = Party(seed=9).until(Step.OPENED)
    for device in party.told:
        opened = party.answer(device)
        assert isinstance(opened, OpenedShares)
        wrong = dict.fromkeys(opened.own, bytes(shamir.SHARE_BYTES))
        party.server = summing.hear(party.server, device, replace(opened, own=wrong))
    party.server, _ = summing.go_on(party.server)
    with pytest.raises(RoundAbandoned):
        summing.summed(party.server)


def test_fewer_shares_than_the_threshold_fit_any_secret() -> None:
    """t-1 places hold whatever a coalition saw, and each secret has a polynomial through them."""
    draw = random.Random(1).randbytes
    secret, other = draw(32), draw(32)
    shares = shamir.split(secret, range(1, 8), 4, draw)
    seen = {place: shares[place] for place in (2, 5, 7)}
    for wanted in (secret, other):
        values = {0: int.from_bytes(wanted, "big")}
        values |= {place: int.from_bytes(share, "big") for place, share in seen.items()}
        fourth = interpolated(values, 1).to_bytes(shamir.SHARE_BYTES, "big")
        assert shamir.join({**seen, 1: fourth}, 4) == wanted
    with pytest.raises(PrivacyError):
        shamir.join(seen, 4)


def interpolated(values: Mapping[int, int], at: int) -> int:
    total = 0
    for place, value in values.items():
        for other in values:
            if other != place:
                value = value * (at - other) * pow(place - other, -1, shamir.PRIME) % shamir.PRIME
        total += value
    return total % shamir.PRIME


def test_the_prime_is_one() -> None:
    """Fermat's test to 40 bases; a composite number passes with chance below 4^-40."""
    draw, prime = random.Random(2), shamir.PRIME
    odd, twos = prime - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(40):
        x = pow(draw.randrange(2, prime - 1), odd, prime)
        assert x in (1, prime - 1) or any(pow(x, 1 << i, prime) == prime - 1 for i in range(twos))


def test_server_and_colluders_below_the_threshold_see_uniform_numbers() -> None:
    """All keys and shares of t-1 devices, and all that the server heard, take every mask away but
    those between the others: what is left of one honest input cannot be told from noise, and only
    the honest sum is."""
    party = Party(seed=10).until(Step.ENDED)
    numbers = sorted(party.inputs)
    colluding = numbers[: party.terms.threshold - 1]
    honest = [one for one in numbers if one not in colluding]
    sent = {}
    for device in honest:
        state = party.states[device]
        total = [np.array(one, np.int64) for one in party.inputs[device]]
        # What stays after the colluders' pairwise masks and, by the opened shares, the own mask.
        for other in honest:
            if other != device:
                seed = mask_seed(party.terms, state.masking, state.roster[other].masking)
                add_mask(total, seed, SEGMENTS, 1 if device > other else -1)
        sent[device] = total
    for device in honest:
        assert not equal(tuple(sent[device]), party.inputs[device])
    summed = [
        sum(sent[d][i] % s.modulus for d in honest) % s.modulus for i, s in enumerate(SEGMENTS[:1])
    ]
    assert np.array_equal(summed[0], party.plain_sum(tuple(honest))[0])


def test_a_mask_has_one_seed_and_every_number_is_as_likely() -> None:
    taken = MaskStream(bytes(range(32))).take(300_000, 975_001)
    counts = np.bincount(taken * 100 // 975_001, minlength=100)
    assert ((counts - 3000.0) ** 2 / 3000.0).sum() < 160  # chi squared, 99 degrees: 1 in 10^4
    with pytest.raises(ValueError, match="31 bytes"):
        MaskStream(bytes(31))


def test_keys_of_low_order_are_refused() -> None:
    pair = KeyPair.drawn(random.Random(3).randbytes)
    with pytest.raises(PrivacyError):
        pair.agree(bytes(32), "mask")


def test_no_key_mask_or_share_is_used_twice() -> None:
    parties = [Party(seed=seed).until(Step.ENDED) for seed in (11, 12)]
    states = [state for party in parties for state in party.states.values()]
    secrets = [one for s in states for one in (s.masking.secret, s.sealing.secret, s.own_seed)]
    shares = [share for state in states for share in state.shares.values()]
    masks = {
        mask_seed(state.terms, state.masking, state.roster[other].masking)
        for state in states
        for other in state.shares
    }
    assert len(set(secrets)) == len(secrets)
    assert len(set(shares)) == len(shares)
    assert len(masks) == len(parties) * DEVICES * (DEVICES - 1) // 2
    assert {len(one) for one in secrets} == {32}


def test_secrets_are_not_shown() -> None:
    party = Party(seed=13).until(Step.OPENED)
    for state in party.states.values():
        shown = repr(state)
        for secret in (state.masking.secret, state.own_seed, state.sealing.secret):
            assert repr(secret)[2:-1] not in shown
    assert places_of([9, 4]) == {4: 1, 9: 2}
    assert commitment_of(bytes(32)) != commitment_of(bytes(31) + b"1")
