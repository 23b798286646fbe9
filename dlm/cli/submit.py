"""`spark-submit .../dlm/cli/submit.py estimate ...`: the command `dlm` as a Spark application."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python searches a script's folder first, and some modules here have names of standard modules.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [place for place in sys.path if str(Path(place).resolve()) != here]
    from dlm.cli.main import main

    main()
