"""`spark-submit .../dlm/cli/submit.py estimate ...`: the command `dlm` as a program of Spark's."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The folder of a script is searched first, and modules here have names of the standard library.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [place for place in sys.path if str(Path(place).resolve()) != here]
    from dlm.cli.main import main

    main()
