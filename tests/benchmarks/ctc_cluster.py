"""Batches and streams of the CTC beam search on a cluster of 3 x 2, whose servers are killed.

    python tests/benchmarks/ctc_cluster.py [--utterances 16]

Utterances are those of `names.py` without names. Prints messages per second of audio, and whether
all texts are those of the same model in this process: utterances one by one, in a batch, in streams
of 200 ms; and in batches in whose course one server of each shard is killed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from asr.decoding import posteriors
from benchmarks.heard import FRAMES_PER_LETTER, LETTERS, TOKENS, sentences
from benchmarks.names import sharded, spellable
from cluster import Cluster, ModelFiles, ProcessServer
from dlm.asr.ctc import BeamSearchDecoderCTC, build_ctcdecoder
from dlm.client import Client, ClientConfig

LABELS = ["", " ", *LETTERS]
STEP = 10  # frames


def one_by_one(decoder: BeamSearchDecoderCTC, spoken: list[Any]) -> list[str]:
    """Each utterance alone; what one fetches the next ones have, too."""
    return [decoder.decode_beams(one)[0][0] for one in spoken]


def batch(decoder: BeamSearchDecoderCTC, spoken: list[Any]) -> list[str]:
    """All at once."""
    return [beams[0][0] for beams in decoder.decode_beams_batch(None, spoken)]


def streams(decoder: BeamSearchDecoderCTC, spoken: list[Any]) -> list[str]:
    """All at once, as their frames come."""
    every = [decoder.stream() for _ in spoken]
    for at in range(0, max(map(len, spoken)), STEP):
        decoder.push_all(every, [one[at : at + STEP] for one in spoken])
    return [stream.finish()[0][0] for stream in every]


def main() -> None:
    """Decodes and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--utterances", type=int, default=16)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dlm-ctc-") as folder:
        shards = sharded(Path(folder), 3)
        with Client.local(shards) as client:
            words = spellable(client.utterance())
            said = sentences(shards, words, given.utterances, 7)
            spoken = [
                posteriors(one, seed, 2.0, TOKENS, FRAMES_PER_LETTER)
                for seed, one in enumerate(said)
            ]
            expected = one_by_one(build_ctcdecoder(LABELS, client.utterance(), words), spoken)
        print("| | messages/s of audio | real time | all texts equal | of the 2-grams |")
        print("| --- | ---: | ---: | --- | ---: |")
        measure(shards, words, spoken, expected)


def kill(client: Client, cluster: Cluster | None) -> None:
    """Kills the servers of a cluster, one after each ten messages."""
    for number, server in enumerate(cluster.servers if cluster else ()):
        while client.stats.messages < 10 * (number + 1):
            time.sleep(0.001)
        server.kill()


def measure(shards: Path, words: list[str], spoken: list[Any], expected: list[str]) -> None:
    """The rows of the table, each with servers and a client of its own."""
    audio_s = 0.02 * sum(map(len, spoken))
    rows: list[tuple[str, Callable[..., list[str]], bool]] = [
        ("one by one", one_by_one, False), (f"batch of {len(spoken)}", batch, False),
        (f"{len(spoken)} streams", streams, False), ("batch, servers killed", batch, True),
        ("streams, servers killed", streams, True),
    ]  # fmt: skip
    files = ModelFiles(shards, None)  # type: ignore[arg-type]
    for name, how, kills in rows:
        with Cluster(files, kind=ProcessServer) as one, Cluster(files, kind=ProcessServer) as other:
            config = ClientConfig(deadline_s=5.0, bigram_fallback=True)
            with Client.connect([*one.addresses, *other.addresses], config) as client:
                decoder = build_ctcdecoder(LABELS, client.utterance(), words)
                killing = threading.Thread(target=kill, args=(client, one if kills else None))
                killing.start()
                begun = time.perf_counter()
                found = how(decoder, spoken)
                seconds, stats = time.perf_counter() - begun, client.stats
                killing.join()
                print(
                    f"| {name} | {stats.messages / audio_s:.1f} | {seconds / audio_s:.3f} | "
                    f"{found == expected} | {stats.bigram_fallback} |", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
