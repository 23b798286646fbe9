"""Runs the command `dlm`, or `python -m dlm`; handles Ctrl-C before it imports anything else."""

from __future__ import annotations

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # avoids a traceback during the next import

from dlm.signals import end_signals


def main() -> None:
    try:
        end_signals.install()
        from dlm.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
