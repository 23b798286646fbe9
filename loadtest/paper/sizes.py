"""Sizes that Tables 4 and 6 share, measured once and kept."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from dlm.errors import DlmError
from dlm.files import scratch_folder
from dlm.index.describe import describe
from dlm.index.layout import read_manifest
from loadtest.paper.clusters import kept, shard_set
from loadtest.paper.setup import Setup
from loadtest.paper.storage import (
    ARC_BYTES,
    STATE_BYTES,
    bytes_by_order,
    plain_arpa,
    transducer,
    write_transducer,
)

# The arguments of build_binary for each of KenLM's structures.
KENLM = {
    "KenLM probing": ("probing",),
    "KenLM trie": ("trie",),
    "KenLM trie, 8 bits": ("-q", "8", "-b", "8", "trie"),
    "KenLM trie, 8 bits, arrays": ("-q", "8", "-b", "8", "-a", "22", "trie"),
}


@dataclass(frozen=True)
class Sizes:
    """All in bytes.

    ngrams, arpa_by_order, wfst_by_order  by order from 1 up; the WFST's are computed
    formats     by name, each measured
    dlm_parts   of the exact encoding: the clients' part (words, 1- and 2-grams), and the shards'
    wfst_is_built  whether `formats` has the WFST, as a file
    """

    ngrams: list[int]
    arpa_by_order: list[int]
    wfst_by_order: list[int]
    wfst_states: int
    wfst_arcs: int
    wfst_is_built: bool
    dlm_parts: list[int]
    formats: dict[str, int]


def measured_sizes(setup: Setup) -> Sizes:
    name = "sizes-kenlm" if setup.kenlm_bin else "sizes"
    return Sizes(**kept(setup, name, lambda: asdict(_measure(setup))))


def _measure(setup: Setup) -> Sizes:
    manifest = read_manifest(setup.model)
    setup.progress.tell("sizes: the ARPA file by order")
    arpa = plain_arpa(setup)
    by_order = bytes_by_order(arpa)
    formats = {"ARPA": sum(by_order)}
    for encoding in ("exact", "compact"):
        set_of = read_manifest(shard_set(setup, 1, encoding))
        formats[f"dlm {encoding}"] = describe(set_of)["bytes"]
    parts = [0, 0]
    for file in manifest.files:
        parts[file.kind == "shard"] += file.bytes
    with scratch_folder(setup.work, "sizes") as scratch:
        for name, flags in KENLM.items() if setup.kenlm_bin else ():
            setup.progress.tell(f"sizes: {name}")
            formats[name] = _kenlm(setup, flags, arpa, scratch / "kenlm")
        setup.progress.tell("sizes: a transducer")
        found = transducer(arpa)
        is_built = write_transducer(found, scratch / "fst")
        if is_built:
            formats["WFST"] = (scratch / "fst").stat().st_size
    # A context of n words is a state, with its epsilon, and counts with the n-grams of order n.
    wfst = []
    for order, arcs in enumerate(found.ngrams, 1):
        states = found.states[order] if order < len(found.states) else 0
        wfst.append(ARC_BYTES * (arcs + states) + STATE_BYTES * states)
    wfst[0] += STATE_BYTES  # the state of the empty context, which has no epsilon
    return Sizes(
        list(manifest.counts),
        by_order,
        wfst,
        len(found.final),
        len(found.source),
        is_built,
        parts,
        formats,
    )


def _kenlm(setup: Setup, flags: tuple[str, ...], arpa: Path, output: Path) -> int:
    assert setup.kenlm_bin is not None
    command = [str(setup.kenlm_bin / "build_binary"), *flags, str(arpa), str(output)]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace")[-500:]
        raise DlmError(f"{' '.join(command)} exited with {done.returncode}: {said}")
    return output.stat().st_size
