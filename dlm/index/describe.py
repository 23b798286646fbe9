"""Describes a shard set's contents and memory needs, from its manifest alone."""

from __future__ import annotations

from typing import Any

from dlm.index.layout import Manifest

MIB = 1 << 20
# A server process needs this much besides the mapped file: 206 MiB are resident once it is warm,
# with kernels and libraries; the rest is for messages in flight.
PROCESS_MIB = 256


def describe(manifest: Manifest) -> dict[str, Any]:
    """The facts that `dlm info --json` prints.

    bytes_per_ngram counts every file of the set, vocabulary strings included, once; imbalance is
    the size of the heaviest shard divided by the mean, 1 at best.
    """
    files = [f for f in manifest.files if f.kind == "shard"]
    total = sum(f.bytes for f in manifest.files) + len(manifest.text)
    mean = sum(f.bytes for f in files) / len(files)
    return {
        "shard_set": manifest.shard_set,
        "model": manifest.model,
        "order": manifest.order,
        "counts": list(manifest.counts),
        "blanks": list(manifest.blanks),
        "vocabulary": manifest.vocabulary_size,
        "encoding": manifest.encoding,
        "shards": manifest.shards,
        "bytes": total,
        "bytes_per_ngram": total / max(sum(manifest.counts), 1),
        "imbalance": max(f.bytes for f in files) / mean,
        "files": [
            {"name": f.name, "bytes": f.bytes, "ngrams": f.ngrams, "xxh3_128": f.xxh3_128}
            for f in manifest.files
        ],
        "provenance": dict(manifest.provenance),
    }


def server_mib(manifest: Manifest) -> int:
    """Returns the MiB that the heaviest shard's server needs; mapped pages count, locked or not.
    Each further process on the same host takes PROCESS_MIB more."""
    heaviest = max(f.bytes for f in manifest.files if f.kind == "shard")
    return -(-heaviest // MIB) + PROCESS_MIB
