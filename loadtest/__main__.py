"""`python -m loadtest`."""

import sys

try:  # also for Ctrl-C while modules are imported
    from loadtest.cli.main import main

    main()
except KeyboardInterrupt:
    sys.exit(130)
