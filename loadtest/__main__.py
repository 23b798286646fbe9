"""Runs `python -m loadtest`."""

import sys

try:  # Ctrl-C may also come while modules are imported
    from loadtest.cli.main import main

    main()
except KeyboardInterrupt:
    sys.exit(130)
