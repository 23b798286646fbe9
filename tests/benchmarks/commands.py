"""What a command costs: wall time, CPU time and the most memory it held."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from benchmarks.settings import run

# The peak of a child starts at that of the process it was forked from, so a small process forks.
_MEASURE = """
import json, os, resource, subprocess, sys, time
began = time.monotonic()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
said = child.stderr.read()
_, status, used = os.wait4(child.pid, 0)
print(json.dumps([time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))
if status:
    sys.stderr.buffer.write(said)
    os._exit(1)
"""


@dataclass(frozen=True)
class Cost:
    """Of one run."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def cost(command: list[str]) -> Cost:
    """Runs a command and measures it, with the processes that it waited for.

    Raises
        RuntimeError  the command failed
    """
    return Cost(*json.loads(run([sys.executable, "-S", "-c", _MEASURE, *command])))
