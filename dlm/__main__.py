"""The command `dlm`, and `python -m dlm`: Ctrl-C is handled before anything else is imported."""

from __future__ import annotations

import sys

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
