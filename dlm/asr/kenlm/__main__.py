"""`python -m dlm.asr.kenlm script.py ...`: runs a program with dlm as its kenlm and pyctcdecode."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from dlm.asr.kenlm import install

USAGE = "usage: python -m dlm.asr.kenlm (script.py | -m MODULE) [ARGUMENT ...]\n"


def main() -> None:
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if is_module:
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stderr.write(USAGE)
        sys.exit(0 if arguments else 2)
    if not is_module and not Path(arguments[0]).exists():
        sys.stderr.write(f"python -m dlm.asr.kenlm: no such file: {arguments[0]}\n{USAGE}")
        sys.exit(2)
    install()
    sys.argv = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = arguments[0].rpartition("/")[0]
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
