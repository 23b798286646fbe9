"""The text of a privacy report: its statements about a run for each point of the papers' checklist
(GDP Appendix A, BLT Appendix C), and statements of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlm.record.provenance import UnverifiedInput
from dlm.units import counted

# How an engine that asks real devices describes itself in a stage's extras.
ENGINE = "DevicesEngine"
REGISTERED = "secure aggregation with registered keys"
UNREGISTERED = "secure aggregation without registered keys"

SETTING = (
    "A central guarantee. Whoever runs the training (the provider) is trusted to run this program "
    "unchanged, and to keep its private files to itself.\n"
    "The adversary sees every intermediate model and everything else that is released, including "
    "this report, knows the program and its settings, and may know the text of every other user. "
    "The adversary does not see sums before noise is added, the keys, or the private files. Users "
    "are not protected from the provider."
)
SECURE_SETTING = (
    "\nUpdates were encoded for secure aggregation and added up in a simulation of it: no protocol "
    "hid individual updates from the server. The guarantee itself does not depend on that."
)
_DEVICES_SETTING = (
    "\nUpdates were added up by secure aggregation between devices and the server (Bonawitz et al. "
    "2017), which no outside cryptographer has reviewed. {keys} If secure aggregation fails, the "
    "provider sees individual updates, and nobody else sees more. The guarantee holds if all "
    "devices of a sum follow the protocol."
)
_KEYS = {
    True: "Devices held a list of each other's keys: unless a third or more of a round's devices "
    "help it, a dishonest server could learn only sums over devices that all had the same "
    "task. The server chooses the task and the devices, so it could make one user's update "
    "stand out in a sum.",
    False: "No keys were registered: secure aggregation hid individual updates from a server "
    "that followed the protocol, but not from one that lied about who took part.",
}
_ACCESSES = (
    "The text of every user who took part in this one run and followed the algorithm, including "
    "its participation limits. {others}\n"
    "Not covered: choosing settings by looking at users' data, choosing a checkpoint by metrics or "
    "A/B tests, and other runs. (dlm privacy compose gives the guarantee of several runs.)"
)
_OTHERS = "A user who does not follow the algorithm does not weaken anyone else's guarantee."
_OTHER_DEVICES = (
    "The others in a sum are covered if all its devices follow the algorithm: a device that sends "
    "numbers that the encoding does not allow can make the sum wrap around its modulus, by more "
    "than the noise. Also, a device's text must not influence whether and when it answers, since "
    "that decides whose inputs are in a sum, and whether there is a sum."
)
OUTPUT = (
    "The whole sequence of noised sums. So the guarantee holds for the final model, for every "
    "intermediate model (including those sent to devices), and for anything made from them without "
    "using users' data again."
)
UNIT_TEXT = (
    "One user id of the data set with all its text, however much. If ids are devices: for a user "
    "with one device this is user-level privacy; for a device shared by several people it is more; "
    "for a user with several devices it is less, and group privacy says how much."
)
ADJACENCY_TEXT = (
    "Zero-out: two data sets are neighbours if replacing everything that one user contributes by "
    "zeros turns one into the other (Kairouz et al. 2021, definition 1.1). This is a form of "
    "adding or removing one user."
)
TRANSPARENCY = (
    "The code that clips, adds noise, counts participations and computes these numbers is open "
    "source. The digests below name the settings and ledgers that the numbers were computed from. "
    "Whether the run used that code and these settings cannot be verified from outside: it is the "
    "provider's word, which a signature (dlm privacy sign) ties to a key."
)
CHECKS = (
    "Each command prints the rho below it, and each event is the equivalent for dp-accounting; for "
    "a Poisson-sampled stage, its RdpAccountant gives the stage's epsilon with the orders 2 to 128 "
    "and 136 to 512 (in steps of 8). The epsilon of this report is that of the last "
    'command, in its line "as a run reports it (discrete noise)". (If one of several stages has '
    "Poisson-sampled cohorts, dlm privacy verify composes the stages numerically.)"
)


def secure_setting(stages: Sequence[Mapping[str, Any]]) -> str:
    """Describes how updates that were encoded for secure aggregation were added up."""
    adding = [(stage.get("extras") or {}).get("aggregator", "") for stage in stages]
    if not any(_of_devices(stage) for stage in stages):
        return SECURE_SETTING
    return _DEVICES_SETTING.format(keys=_KEYS[not any(UNREGISTERED in one for one in adding)])


def accesses(stages: Sequence[Mapping[str, Any]]) -> str:
    others = _OTHER_DEVICES if any(map(_of_devices, stages)) else _OTHERS
    return _ACCESSES.format(others=others)


def _of_devices(stage: Mapping[str, Any]) -> bool:
    return ENGINE in str((stage.get("extras") or {}).get("engine", ""))


def sampling(kind: str, rate: float | None) -> str:
    if kind == "poisson":
        return f"each user independently with probability {rate}" if rate else "Poisson samples"
    return {
        "timer": "users who were available and whose last participation was long enough ago",
        "fixed": "a fixed number of users at random",
    }.get(kind, kind)


def noise(stages: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for stage in stages:
        name, extras = stage["stage"], stage.get("extras") or {}
        if stage.get("mechanism") == "none" or not stage.get("noise_multiplier"):
            lines.append(f"{name}: none.")
            continue
        seed = stage.get("simulated") is True
        text = [
            f"{name}: mechanism {stage['mechanism']}, noise multiplier {stage['noise_multiplier']}",
            f"discrete Gaussian, grid: {extras.get('grid', 'whole steps')}",
            f"generator: {extras.get('generator', 'not named')}",
            "keys: from a configured seed, so anyone who knows it can remove the noise"
            if seed
            else "keys: drawn from the operating system, and never written to a file",
        ]
        lines.append("; ".join(text) + ".")
    return "\n".join(lines)


def trusted(
    stages: Sequence[Mapping[str, Any]],
    public: Sequence[str],
    unverified: Sequence[UnverifiedInput],
) -> str:
    """Lists the assumptions of the guarantee that dlm cannot check."""
    lines = [
        "This program, the packages that it uses, the machine and its random numbers, and any "
        "other code in its process.",
        "That one id of the data set is one user.",
    ]
    lines += [f"That no user's text is in {one}." for one in public]
    lines += [
        f"That the record of {one} is the original one: it was not verified with a trusted key."
        for one in unverified
    ]
    for stage in stages:
        extras = stage.get("extras") or {}
        if "engine" in extras:
            lines.append(
                f"{stage['stage']}: updates were computed and clipped by {extras['engine']}, and "
                f"added up by {extras['aggregator']}."
            )
        if _of_devices(stage):
            lines.append(
                f"{stage['stage']}: that devices ran this program. Their updates are hidden, so "
                "nothing else bounds what a device hands in, or checks the clock that it keeps."
            )
    return _list(lines)


def enforced(
    stages: Sequence[Mapping[str, Any]],
    ledgers: Mapping[str, Mapping[str, Any]],
    config: Mapping[str, Any],
) -> str:
    lines = []
    for stage in stages:
        name, extras = str(stage["stage"]), stage.get("extras") or {}
        bound = extras.get("lambda") or (config.get("privacy") or {}).get("clip_norm")
        if name in ledgers and bound is not None:
            norm = "L1 norm of a user's counts" if "lambda" in extras else "L2 norm of an update"
            lines.append(f"{name}: the {norm} is at most {bound}; if not finite, zeros are used.")
        if name not in ledgers:
            continue
        kept = ledgers[name]["enforced"]
        if ledgers[name]["sampling"].get("kind") == "poisson":
            continue
        gap = "no gap" if kept["gap"] is None else f"a gap of {kept['gap']} rounds"
        most = (
            "no bound on participations"
            if kept["max_participations"] is None
            else f"at most {counted(kept['max_participations'], 'participation')}"
        )
        clock = (
            "each device also kept its own clock, and refused to exceed these limits"
            if _of_devices(stage)
            else "no timer on a device was involved"
        )
        lines.append(
            f"{name}: {gap} and {most} per user. The server refuses a cohort that "
            f"breaks this before anyone in it is counted; {clock}."
        )
    lines.append("Only one process at a time uses the run's folder; each round is released once.")
    return _list(lines)


def limits(held_out: int) -> str:
    lines = [
        "If somebody resumes a copy of the run's folder, the program does not detect it, and the "
        "same rounds are released twice. Given the reports of both runs, dlm privacy compose says "
        "so and counts both.",
        "That an input is public is somebody's word. Nothing checks it.",
    ]
    if held_out:
        lines.append(
            f"{held_out} held-out users are in no round and are evaluated without noise. Figures "
            "about them are exact, and they must have agreed to it."
        )
    return _list(lines)


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)
