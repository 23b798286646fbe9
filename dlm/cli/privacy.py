"""`dlm privacy`: what noise costs, what it guarantees, and what to run for a target."""

from __future__ import annotations

import typer

from dlm.cli.privacy_account import account
from dlm.cli.privacy_audit import audit
from dlm.cli.privacy_compose import compose
from dlm.cli.privacy_exposure import exposure
from dlm.cli.privacy_mechanism import mechanism
from dlm.cli.privacy_plan import plan
from dlm.cli.records import sign, verify

app = typer.Typer(
    help="What noise costs, and what it guarantees.\n\n"
    "Example: dlm privacy plan --population 4000000 --rounds 2000 --target-rho 0.5",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command("sign")(sign)
app.command("verify")(verify)
app.command("account")(account)
app.command("mechanism")(mechanism)
app.command("plan")(plan)
app.command("compose")(compose)
app.command("audit")(audit)
app.command("exposure")(exposure)
