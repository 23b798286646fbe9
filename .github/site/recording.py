"""A recording of a command as a picture that moves: its lines appear when they were printed.

    python .github/site/recording.py .github/demo.svg

runs `dlm demo --kill` twice; the first run compiles. Nothing is added to what it prints or left
out, and the time is that of the run.
"""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys
import time
from html import escape
from pathlib import Path

WIDTH, ROW, TOP = 96, 19, 46  # characters of the terminal; pixels per line, above the first
CHARACTER = 8.2  # pixels
HOLD_S = 3.0  # the end stays this long, and then it starts again

STYLE = """
  .screen { fill: #10171f; }
  .bar { fill: #1b2530; }
  text { font: 13.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d5dfe8; }
  .typed { fill: #ffffff; font-weight: 600; }
  .bad { fill: #ff9a7a; }
  .good { fill: #8fe08f; font-weight: 600; }
"""


def recorded(command: list[str], environ: dict[str, str]) -> list[tuple[float, str]]:
    """(seconds, line) of what a command prints on a terminal.

    Raises  CalledProcessError  it failed
    """
    ours, theirs = pty.openpty()
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    lines: list[tuple[float, str]] = []
    rest = b""
    while True:
        try:
            read = os.read(ours, 4096)
        except OSError:  # the terminal of a process that has ended
            read = b""
        if not read:
            break
        *whole, rest = (rest + read).split(b"\n")
        now = time.monotonic() - begun
        lines += [
            (now, part)
            for line in (raw.decode().rstrip() for raw in whole)
            for part in (line[at : at + WIDTH] for at in range(0, max(len(line), 1), WIDTH))
        ]
    os.close(ours)
    if status := process.wait():
        raise subprocess.CalledProcessError(status, command)
    return lines


def kind(line: str) -> str:
    """What a line is drawn as."""
    if "killed" in line or "client.server" in line:
        return "bad"
    return "good" if "bit for bit" in line else ""


def drawn(command: str, lines: list[tuple[float, str]]) -> str:
    """The picture; where motion is not wanted, its end."""
    lasts = max(at for at, _ in lines) + HOLD_S
    rows = [f'<text class="typed" x="16" y="{TOP}">$ {escape(command)}</text>']
    moves = []
    for number, (at, line) in enumerate(lines, 1):
        y = TOP + number * ROW
        style = f' class="{kind(line)} l{number}"'
        rows.append(f'<text{style} x="16" y="{y}" xml:space="preserve">{escape(line)}</text>')
        share = 100 * at / lasts
        moves.append(
            f".l{number} {{ animation: a{number} {lasts:.1f}s step-end infinite; }} "
            f"@keyframes a{number} {{ 0% {{ opacity: 0; }} {share:.2f}% {{ opacity: 1; }} }}"
        )
    width, height = WIDTH * CHARACTER + 32, TOP + (len(lines) + 1) * ROW
    said = "A terminal runs dlm demo with --kill: a server is killed, and all scores stay equal."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img"'
            f' aria-label="{said}">',
            f"<style>{STYLE}@media (prefers-reduced-motion: no-preference) {{",
            *moves,
            "}</style>",
            f'<rect class="screen" width="{width:.0f}" height="{height}" rx="8"/>',
            f'<rect class="bar" width="{width:.0f}" height="24" rx="8"/>',
            *rows,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Records, and writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, metavar="FILE")
    out = parser.parse_args().out
    environ = {**os.environ, "NO_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "dumb"}
    command = [sys.executable, "-m", "dlm", "demo", "--kill"]
    recorded(command, environ)
    out.write_text(drawn("dlm demo --kill", recorded(command, environ)), encoding="utf-8")


if __name__ == "__main__":
    main()
