"""What the page says of Flower, as bash reads it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import dlm.federated.devices

PAGE = Path(dlm.federated.devices.__file__).with_name("README.md")


def test_each_node_of_the_page_has_a_port_and_a_device() -> None:
    """Bash expands the words of a command with `&` in another process."""
    (line,) = re.findall(r"^\$ (.*flower-supernode.*)$", PAGE.read_text(), re.MULTILINE)
    prints = 'flower-supernode() { printf "%s\\n" "$*"; }'
    done = subprocess.run(
        ["bash", "-c", f"{prints}; {line}; wait"], capture_output=True, text=True, check=True
    )
    assert len(set(re.findall(r"--port (\d+)", done.stdout))) == 4
    found = re.findall(r'device="(\w+)"', done.stdout)
    assert sorted(found) == ["ann", "bob", "cyd", "dee"]
