"""`dlm devices`: federated training on devices that keep their text, and the server of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.checks import READ, WRITE_FOLDER, check_reads
from dlm.cli.federate import round_teller
from dlm.cli.help import Group
from dlm.cli.options import Json, Options, Quiet, RunSettings
from dlm.cli.output import stage_printer
from dlm.cli.unigrams import COUNTING, CountsFile, Wordlist, count_teller, print_counted
from dlm.errors import ConfigError
from dlm.federated.counting.settings import CollectionSettings
from dlm.federated.devices.settings import OwnerLimits, ServerSettings
from dlm.units import counted

if TYPE_CHECKING:
    from dlm.federated.devices.engine import RoundOutcome

EXAMPLES = """\
dlm devices register alice --state alice
dlm devices device alice.txt --name alice --state alice \\
    --devices devices.tsv --sockets sockets
dlm devices server devices.tsv -c run.toml --sockets sockets -o runs/first"""

KEY, CLOCKS, LOCK = "key.pem", "clocks.json", "device.lock"
State = Annotated[
    Path,
    typer.Option("--state", metavar="DIR", help="The device's own folder: its key and its clock."),
]
Sockets = Annotated[
    Path,
    typer.Option(
        "--sockets", metavar="DIR", help="Folder of the local sockets on which devices listen."
    ),
]

Devices = Annotated[
    Path,
    typer.Argument(
        metavar="DEVICES", help="List of devices: names and, after a tab, registered keys."
    ),
    READ,
]
Asking = Annotated[ServerSettings, Options()]


def register(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the device.")],
    state: State,
) -> None:
    """Make a device's key, and print its line for the list of devices.

    The list must reach the server and all devices in a way that the server cannot tamper with. For
    a list without keys, write names only.

    Examples:
        dlm devices register alice --state alice
    """
    import os

    from dlm.federated.devices.fleet import check_name
    from dlm.federated.devices.primitives import Signer

    check_name(name)
    place = state / KEY
    if place.exists():
        raise ConfigError(f"{place} already exists, so this device has a key; give another --state")
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    signer = Signer.drawn(os.urandom)
    signer.write(place)
    print(f"{name}\t{signer.public.hex()}")


def device(
    text: Annotated[
        Path,
        typer.Argument(metavar="TEXT", help="One user's text, one utterance per line."),
        READ,
    ],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the device.")],
    state: State,
    sockets: Sockets,
    *,
    registered: Annotated[
        Path | None,
        typer.Option(
            "--devices",
            metavar="FILE",
            help="The list of devices, with their registered keys.",
        ),
    ] = None,
    unregistered: Annotated[
        bool,
        typer.Option(
            "--unregistered",
            help="Use no registered keys; a dishonest server can then read a single device's "
            "update.",
        ),
    ] = False,
    allowed: Annotated[OwnerLimits, Options()],
    quiet: Quiet = False,
) -> None:
    """Run a device that keeps a user's text and joins in rounds.

    The text never leaves the device; only an update does, which is clipped, rounded and masked. The
    device records in --state when it took part, and refuses a server that asks too often. It runs
    until SIGTERM.

    Examples:
        dlm devices device alice.txt --name alice --state alice \\
            --devices devices.tsv --sockets sockets
    """
    import os

    from dlm.federated.devices.fleet import Fleet, check_name
    from dlm.federated.devices.primitives import Signer

    check_name(name)
    keys = None if registered is None else Fleet.read(registered).keys
    if (keys is None) != unregistered:
        found = "neither" if keys is None else "both"
        raise ConfigError(
            f"expected exactly one of --devices (registered keys) and --unregistered; found "
            f"{found}. Without keys, a dishonest server can read this device's updates"
        )
    made = f"dlm devices register {name} --state {state}"
    if keys is not None and (name not in keys or not (state / KEY).exists()):
        lacks = f"{registered} has no device {name}" if name not in keys else f"no {state / KEY}"
        raise ConfigError(
            f"{lacks}; run `{made}`, and add the line that it prints to the --devices file"
        )
    signer = None if keys is None else Signer.read(state / KEY)
    if keys is not None and signer is not None and keys[name] != signer.public:
        raise ConfigError(
            f"the key of {name} in {registered} differs from {state / KEY}; expected the line that "
            f"`{made}` printed"
        )
    tell = stage_printer(quiet=quiet, timed=False)
    tell("importing jax")
    from dlm.federated.devices.clocks import Clocks
    from dlm.federated.devices.participant import DeviceText, Participant
    from dlm.federated.devices.sockets import DeviceSocket, socket_of
    from dlm.files import locked

    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    busy = ConfigError(f"another process already runs the device in {state}; stop it first")
    with locked(state / LOCK, busy):
        known = None if keys is None else frozenset(keys.values())
        clocks = Clocks(state / CLOCKS)
        participant = Participant(DeviceText(text), clocks, allowed, known, signer, os.urandom)
        listening = DeviceSocket(socket_of(sockets, name), participant.answer)
        try:
            tell(f"{name} listens")
            listening.serve()
        finally:
            listening.close()


def server(
    devices: Devices,
    config: RunSettings,
    sockets: Sockets,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Folder of the run; resumed if it exists."
        ),
        WRITE_FOLDER,
    ],
    *,
    stop_after: Annotated[
        int | None,
        typer.Option(metavar="ROUND", help="Stop after this round.  [default: run all rounds]"),
    ] = None,
    asking: Asking,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per round.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train a network in rounds on devices that listen.

    Settings, noise, ledger and report are those of dlm federate, with aggregation.secure = true.
    Each round asks devices that check in, and adds up at most sampling.report_goal updates by
    secure aggregation. No outside cryptographer has reviewed the protocol.

    Examples:
        dlm devices server devices.tsv -c run.toml --sockets sockets -o runs/first
    """
    stage_printer(quiet=quiet, timed=False)("importing jax")
    from dlm.federated.devices.fleet import Fleet
    from dlm.federated.devices.sockets import LocalSockets
    from dlm.federated.devices.training import DeviceTraining
    from dlm.federated.training.settings import TrainingSettings
    from dlm.federated.training.train_network import run_rounds

    settings = TrainingSettings.read(config, flags={"run": {"stop_after": stop_after}})
    check_reads("data.vocabulary", settings.data.vocabulary)
    fleet = Fleet.read(devices)
    tell = stage_printer(quiet=quiet, timed=settings.run.simulation)
    run_rounds(
        lambda folder: DeviceTraining(
            settings,
            fleet,
            folder,
            LocalSockets(sockets),
            asking,
            progress=tell,
            on_outcome=outcome_teller(tell),
        ),
        settings,
        output,
        data_name=devices.name,
        progress=tell,
        on_round=round_teller(tell, settings.run.rounds, as_json=as_json),
    )


def outcome_teller(tell: Callable[[str], None]) -> Callable[[RoundOutcome], None]:
    """Returns a function that prints how many devices took part, and why others did not."""

    def on_outcome(outcome: RoundOutcome) -> None:
        for name, fault in sorted(outcome.faults.items()):
            tell(f"  {name}: {fault}")
        if not outcome.asked:
            tell("  the server was killed in this round: no device counts, and the run goes on")
        elif outcome.abandoned:
            tell(f"  the round was abandoned, and released as noise alone: {outcome.abandoned}")
        else:
            tell(f"  {outcome.survivors} of {counted(outcome.asked, 'device')} took part")

    return on_outcome


def unigrams(
    devices: Devices,
    wordlist: Wordlist,
    sockets: Sockets,
    *,
    settings: Annotated[CollectionSettings, Options(COUNTING, required="report_goal")],
    output: CountsFile,
    asking: Asking,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Count how often the devices' users use the words of a list.

    Settings, noise, ledger and output are those of dlm unigrams; counts are added up as in dlm
    devices server.

    Examples:
        dlm devices unigrams devices.tsv --wordlist words.txt --sockets sockets \\
            --lambda 100 --rounds 5 --report-goal 4 --max-participations 5 \\
            --noise-multiplier 1.0 --delta 1e-3 --public-attested-by ACME \\
            --output counts.tsv
    """
    tell = stage_printer(quiet=quiet, timed=not settings.released)
    tell("importing jax")
    from dlm.federated.counting.count_unigrams import run_collection
    from dlm.federated.devices.fleet import Fleet
    from dlm.federated.devices.sockets import LocalSockets
    from dlm.federated.devices.training import DeviceCollection

    fleet = Fleet.read(devices)
    done = run_collection(
        lambda folder, words, record: DeviceCollection(
            fleet,
            words,
            settings,
            LocalSockets(sockets),
            asking,
            folder=folder,
            list_record=record,
            on_outcome=outcome_teller(tell),
            progress=tell,
        ),
        wordlist,
        output,
        settings,
        data_name=devices.name,
        progress=tell,
        on_round=count_teller(tell, settings.rounds),
    )
    print_counted(done, output, settings.capacity, as_json=as_json)


GROUP = Group(
    "Train on devices that keep their text.",
    EXAMPLES,
    {
        "register": ("Before a run", register),
        "device": ("On a device", device),
        "unigrams": ("On the server", unigrams),
        "server": ("On the server", server),
    },
)
