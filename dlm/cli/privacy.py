"""`dlm privacy`: what noise costs, what it guarantees, and what to run for a target."""

from __future__ import annotations

import typer

from dlm.cli.help import GroupHelp, add_command
from dlm.cli.privacy_account import account
from dlm.cli.privacy_audit import audit
from dlm.cli.privacy_compose import compose
from dlm.cli.privacy_erase import erase
from dlm.cli.privacy_mechanism import mechanism
from dlm.cli.privacy_plan import plan
from dlm.cli.records import sign, verify

EXAMPLES = """\
dlm privacy plan --population 4000000 --rounds 2000 --target-rho 0.5
dlm privacy verify runs/first --public-key key.pub"""

app = typer.Typer(
    cls=GroupHelp,
    help="Plan, account for and check privacy guarantees.",
    epilog=EXAMPLES,
    rich_markup_mode=None,
)

for name, heading, function in (
    ("plan", "Before a run", plan),
    ("mechanism", "Before a run", mechanism),
    ("account", "Guarantees", account),
    ("compose", "Guarantees", compose),
    ("erase", "End a run", erase),
    ("audit", "Measure a run", audit),
    ("sign", "Records", sign),
    ("verify", "Records", verify),
):
    add_command(app, name, heading, function)
