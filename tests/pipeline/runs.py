"""Runs of `dlm pipeline` for tests: made-up people, a configuration, and a command that can be
killed where a test says."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dlm.ngram.arpa import ArpaReader
from dlm.record.provenance import LINE_PREFIX, Provenance

WORDS = [f"w{a}{b}" for a in "abcdef" for b in "abcdef"]
CONFIG = """
[run]
folder = "out"
{seed}
[inputs]
users = "users.tsv"
held_out = "held_out.tsv"
wordlist = "words.txt"
text = "public.txt"
{public}
[unigrams]
lambda = 10
rounds = 4
report_goal = 40
noise_multiplier = 0.5
[federate.run]
rounds = 3
evaluate_every = 0
[federate.model]
embedding_size = 8
hidden_size = 16
[federate.local]
batch_size = 2
unroll = 4
[federate.privacy]
clip_norm = 0.5
mechanism = "tree"
noise_multiplier = 2.0
gap = 2
max_participations = 2
[federate.sampling]
report_goal = 20
[estimate]
discount_fallback = true
[distill]
samples = 300
[prune]
ngrams = "-,-,40"
[shard]
shards = 2
"""
PUBLIC = 'public = "the tests"'

# Ends the process as a power cut would, at the n-th call of a function: before it, or after. Counts
# of dlm distill are kept after each block.
DRIVER = """
import functools, importlib, os, signal, sys
from dlm.distill.counts import work
work.count_all.__kwdefaults__["saved_every_s"] = 0.0
where, count, when, *arguments = sys.argv[1:]
module, _, path = where.partition(":")
owner = importlib.import_module(module)
*inner, name = path.split(".")
for part in inner:
    owner = getattr(owner, part)
whole, calls = getattr(owner, name), 0

@functools.wraps(whole)
def cut(*args, **kwargs):
    global calls
    calls += 1
    if calls == int(count) and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    found = whole(*args, **kwargs)
    if calls == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    return found

setattr(owner, name, cut)
from dlm.cli.main import main
sys.argv = ["dlm", *arguments]
main()
"""
STAGES = ["estimate", "unigrams", "federate", "distill", "prune", "measure", "shard"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def people(folder: Path, *, seed: str = "seed = 3", public: str = PUBLIC) -> Path:
    """Users, held-out users, words, public text and the configuration, in a new folder."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    shares = 1 / np.arange(1, len(WORDS) + 1)
    shares /= shares.sum()

    def said(users: int, name: str) -> str:
        rows = [
            f"{name}{user:03}\t{' '.join(rng.choice(WORDS, 5, p=shares))}"
            for user in range(users)
            for _ in range(4)
        ]
        return "\n".join(["user_id\tutterance", *rows, ""])

    (folder / "users.tsv").write_text(said(170, "user"))
    (folder / "held_out.tsv").write_text(said(12, "other"))
    (folder / "words.txt").write_text("\n".join(WORDS) + "\n")
    text = [" ".join(rng.choice(WORDS, 6, p=shares)) for _ in range(150)]
    (folder / "public.txt").write_text("\n".join(text) + "\n")
    (folder / "p.toml").write_text(CONFIG.format(seed=seed, public=public))
    return folder


def results(folder: Path) -> dict[str, bytes]:
    """What a pipeline is run for, in bytes: model, manifest and report, without its date."""
    names = ["model.arpa.zst", "distilled.arpa.zst", "shards/manifest.json", "held_out.json"]
    found = {n: (folder / "out" / n).read_bytes() for n in [*names, "privacy.md"]}
    found["privacy.md"] = re.sub(rb"made: [^,]+", b"", found["privacy.md"])
    report = json.loads((folder / "out/privacy.json").read_bytes())
    for body, name in (
        (report, "digest"),
        (report["privacy"], "digest"),
        (report["privacy"], "made"),
    ):
        del body[name]
    return {**found, "privacy.json": json.dumps(report).encode()}


def record_of(model: Path) -> Provenance:
    """The record in the header of an ARPA file: one."""
    with ArpaReader(model) as reader:
        (line,) = [line for line in reader.comments if line.startswith(LINE_PREFIX)]
    return Provenance.from_json(line)


def done_stages(folder: Path) -> list[str]:
    """What the journal says is done."""
    journal = folder / "out/journal.json"
    if not journal.exists():
        return []
    stages: Mapping[str, Mapping[str, object]] = json.loads(journal.read_text())["stages"]
    return [name for name, entry in stages.items() if entry["wrote"] is not None]
