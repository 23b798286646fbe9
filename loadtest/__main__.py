"""`python -m loadtest`."""

import sys

try:  # Ctrl-C while modules are imported, too
    from loadtest.cli.main import main

    main()
except KeyboardInterrupt:
    sys.exit(130)
