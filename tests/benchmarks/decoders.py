"""Beam search with a model behind a network beside local KenLM: round trips and real time.

    python tests/benchmarks/decoders.py [--model ARPA --sentences N --beam B --delay-us 200]
    python tests/benchmarks/decoders.py --speech FOLDER --beam 100 ...

Sentences are drawn from the model and spelled in letters; posteriors say them unclearly, three
frames of 20 ms a letter, the more so the larger `--flat`. With `--speech` they are recordings, and
posteriors those of dlm's acoustic model; its labels are phonemes, so only flashlight-text, which
has a lexicon, decodes them. Each is decoded in turns with KenLM in the decoder's process and with
dlm: *naive*, a message for each word asked; *cached*, each word of a context once; *blocks*, each
context once, some at a time in a message per shard (dlm.asr). Servers are processes of their own;
every reply comes `--delay-us` later. n-best lists must be KenLM's.

Prints a Markdown table, medians over the rounds: real-time factor and its ratio to KenLM's, of the
same sentences in the same round; the same of the processor time of the decoder's thread, which
other work on the machine hardly changes; words asked and messages sent per second of audio; and the
seconds per second of audio that the decoder was in the language model's `score`, and those in
calls that may have waited for servers (measured in a round of its own: the clock is not free).

Rows with phrases have so many of frequent words. Their bonus is 0 with flashlight, so it finds the
same hypotheses and shows the cost alone; in the beam search it is 1, beside the same words as
hotwords, there and in pyctcdecode.

What a Python language model costs flashlight by itself (its own KenLM is called in C++) is the row
*blocks, all contexts there*: the same sentences again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from flashlight.lib.text.decoder import LM, LMState

from benchmarks.heard import LETTERS, Heard, drawn, recorded
from cluster import Cluster, ModelFiles, ProcessServer
from dlm.asr.ctc import BeamSearchDecoderCTC, build_ctcdecoder
from dlm.asr.decoders.flashlight import DlmLM
from dlm.asr.kenlm.table import ModelCounts
from dlm.client import Client, ClientConfig, Phrases, Utterance
from dlm.client.cluster_file import Endpoint, FixedEndpoints, Metadata
from dlm.client.core import Core
from dlm.client.server import Connection, Reply, Withdraw
from dlm.errors import DlmError
from dlm.index.making import build_shard_set
from dlm.ngram.arpa.source import TextSource

ROOT = Path(__file__).parents[2]
PHRASES = (100, 10_000)


class DelayedConnection(Connection):
    """A connection whose replies come `delay_s` later, one after the other."""

    delay_s = 0.0

    def score(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> Withdraw:
        return super().score(request, timeout_s, self._later(reply), metadata)

    def context_block(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> Withdraw:
        return super().context_block(request, timeout_s, self._later(reply), metadata)

    def _later(self, reply: Reply) -> Reply:
        def later(data: bytes | None, error: DlmError | None) -> None:
            end = time.perf_counter() + self.delay_s
            while time.perf_counter() < end:  # a sleep would take its own while
                time.sleep(0)
            reply(data, error)

        return later


class AskingLM(LM):  # type: ignore[misc]
    """flashlight's LM by a message for each word; of a context each once where `cached`."""

    def __init__(self, utterance: Utterance, words: Sequence[str], cached: bool) -> None:
        LM.__init__(self)
        self._utterance = utterance
        self._ids = [*(utterance.vocabulary.id_of(w) for w in words), utterance.vocabulary.end_id]
        self._states: dict[LMState, Any] = {}
        self._known: dict[Any, tuple[float, Any]] | None = {} if cached else None
        self.counts = ModelCounts()

    def start(self, start_with_nothing: bool) -> LMState:
        self._states.clear()
        root = LMState()
        utterance = self._utterance
        self._states[root] = utterance.null() if start_with_nothing else utterance.begin()
        return root

    def score(self, state: LMState, usr_token_idx: int) -> tuple[LMState, float]:
        self.counts.queries += 1
        before, word = self._states[state], self._ids[usr_token_idx]
        found = None if self._known is None else self._known.get((before, word))
        if found is None:
            extension = self._utterance.extend([before], [word])
            found = float(extension.log10_prob[0, 0]), extension.states[0, 0]
            if self._known is not None:
                self._known[before, word] = found
        child = state.child(usr_token_idx)
        self._states[child] = found[1]
        return child, found[0]

    def finish(self, state: LMState) -> tuple[LMState, float]:
        return self.score(state, -1)


@dataclass
class Row:
    """One way to decode: what makes its decoder, and what was measured of it, by round."""

    name: str
    decode: Callable[[Any], Any]
    client: Client | None
    queries: Callable[[], int]
    begin: Callable[[], None] = lambda: None
    warm: bool = False  # whether a round that does not count comes first
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # of the decoder's thread
    asked: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    found: list[Any] = field(default_factory=list)

    def run(self, spoken: Sequence[Any]) -> None:
        """A round."""
        self.begin()
        sent = 0 if self.client is None else self.client.stats.messages
        asked = self.queries()
        begun, cpu = time.perf_counter(), time.thread_time()
        self.found = [self.decode(emissions) for emissions in spoken]
        self.seconds.append(time.perf_counter() - begun)
        self.cpu.append(time.thread_time() - cpu)
        self.asked.append(self.queries() - asked)
        self.messages.append(0 if self.client is None else self.client.stats.messages - sent)


class Timed:
    """Seconds in some functions; a call within another counts once for each."""

    def __init__(self, whole: tuple[Any, str], waiting: tuple[Any, str]) -> None:
        self.seconds = [0.0, 0.0]
        self._undo = [self._wrap(0, *whole), self._wrap(1, *waiting)]

    def _wrap(self, place: int, owner: Any, name: str) -> Callable[[], None]:
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[place] += time.perf_counter() - begun

        setattr(owner, name, timed)
        return lambda: setattr(owner, name, function)

    def end(self) -> list[float]:
        """Takes the clocks away; the seconds of each."""
        for undo in self._undo:
            undo()
        return self.seconds


def measure(rows: list[Row], heard: Heard, given: argparse.Namespace, watched: Any) -> None:
    """All rows in turns; then the table. `watched`: functions that are timed where blocks are."""
    spoken, audio_s, rounds = heard.spoken, heard.audio_s, given.rounds
    rows = [row for row in rows if not given.rows or row is rows[0] or row.name in given.rows]
    for row in rows:
        if row.warm:
            row.run(spoken)
            row.seconds, row.cpu, row.asked, row.messages = [], [], [], []
    for _ in range(rounds):
        for row in rows:
            row.run(spoken)
    local = rows[0]
    head = (
        "real time",
        "of KenLM's",
        "CPU",
        "of KenLM's",
        "words/s",
        "messages/s",
        "in `score`",
        "waiting",
    )
    print("| | " + " | ".join(head) + " |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        same = all(
            [one[0] for one in found] == [one[0] for one in expected]
            for found, expected in zip(row.found, local.found, strict=True)
        )
        cells = []
        for own, other in ((row.seconds, local.seconds), (row.cpu, local.cpu)):
            ratio = median(a / b for a, b in zip(own, other, strict=True))
            cells += [f"{median(own) / audio_s:.4f}", f"{ratio:.2f}"]
        cells += [
            f"{median(row.asked) / audio_s:,.0f}" if row.asked[-1] else "",
            f"{median(row.messages) / audio_s:,.1f}" if row.client else "",
        ]
        if "blocks" in row.name:
            watch = Timed(*watched)
            row.run(spoken)
            cells += [f"{seconds / audio_s:.4f} s" for seconds in watch.end()]
        else:
            cells += ["", ""]
        print(f"| {row.name}{'' if same else ' (other hypotheses!)'} | " + " | ".join(cells) + " |")
    print()


def flashlight_rows(arpa: Path, heard: Heard, clients: list[Client]) -> list[Row]:
    """KenLM in C++, and dlm three ways."""
    from flashlight.lib.text.decoder.kenlm import KenLM
    from flashlight.lib.text.dictionary import Dictionary

    kenlm = KenLM(str(arpa), Dictionary([*heard.words, "<unk>"]))

    def row(name: str, make: Callable[[], Any], client: Client | None, lasts: bool = False) -> Row:
        made: dict[str, Any] = {}

        def begin() -> None:
            if not made or not lasts:
                made["lm"] = make()
                made["decode"] = heard.decoder(made["lm"])

        def queries() -> int:
            return 0 if client is None else made["lm"].counts.queries

        return Row(name, lambda one: made["decode"](one), client, queries, begin, lasts)

    def ask(client: Client, cached: bool) -> Callable[[], Any]:
        return lambda: AskingLM(client.utterance(), heard.words, cached)

    def blocks(client: Client) -> Callable[[], Any]:
        return lambda: DlmLM(client.utterance(), heard.words)

    def biased(count: int) -> Callable[[], Any]:
        phrases = Phrases(dict.fromkeys(phrases_of(heard.words, count), 0.0))
        return lambda: DlmLM(clients[2].utterance(phrases=phrases), heard.words, lm_weight=2.0)

    return [
        row("KenLM, C++", lambda: kenlm, None),
        row("dlm, naive", ask(clients[0], False), clients[0]),
        row("dlm, cached", ask(clients[0], True), clients[0]),
        row("dlm, blocks", blocks(clients[0]), clients[0]),
        row("dlm, blocks, all contexts there", blocks(clients[1]), clients[1], lasts=True),
        row("dlm, blocks, local shards", blocks(clients[2]), clients[2]),
        *(
            row(f"dlm, blocks, local shards, {count:,} phrases", biased(count), clients[2])
            for count in PHRASES
        ),
    ]


def phrases_of(words: Sequence[str], count: int) -> list[str]:
    """So many phrases of one to three words of a lexicon, with repeats if it is small."""
    rng = random.Random(1)
    return [" ".join(rng.choices(words, k=rng.randint(1, 3))) for _ in range(count)]


def beam_search_rows(
    arpa: Path, words: Sequence[str], clients: list[Client], beam: int
) -> list[Row]:
    """pyctcdecode with KenLM's Python package, and dlm's search."""
    from pyctcdecode import build_ctcdecoder as build_theirs

    labels = ["", " ", *LETTERS]
    theirs = build_theirs(labels, str(arpa), words)
    hot = phrases_of(words, PHRASES[0])

    def row(name: str, client: Client | None, lasts: bool = False, **options: Any) -> Row:
        made: dict[str, Any] = {"decoder": theirs}

        def begin() -> None:
            if client is not None and not (lasts and len(made) > 1):
                made["utterance"] = client.utterance()
                made["decoder"] = build_ctcdecoder(labels, made["utterance"], words)

        def decode(emissions: Any) -> Any:
            found = made["decoder"].decode_beams(emissions, beam_width=beam, **options)
            return [(one[0], one[-1]) for one in found]

        return Row(name, decode, client, lambda: 0, begin, lasts)

    phrases = Phrases(dict.fromkeys(hot, 1.0))
    return [
        row("pyctcdecode, KenLM", None),
        row("dlm, servers", clients[0]),
        row("dlm, servers, all contexts there", clients[1], lasts=True),
        row("dlm, local shards", clients[2]),
        row("pyctcdecode, KenLM, 100 hotwords", None, hotwords=hot),
        row("dlm, local shards, 100 hotwords", clients[2], hotwords=hot),
        row("dlm, local shards, 100 phrases", clients[2], phrases=phrases),
    ]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "dlm/data/books20k.arpa.zst")
    parser.add_argument("--sentences", type=int, default=8)
    parser.add_argument("--words", type=int, default=20_000, help="of the lexicon, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--beam", type=int, default=500, help="flashlight's; the CTC beam search's is 100"
    )
    parser.add_argument("--flat", type=float, default=2.0)
    parser.add_argument("--speech", type=Path, help="folder of FLAC files, in place of sentences")
    parser.add_argument("--joined", action="store_true", help="all sentences in one utterance")
    parser.add_argument("--rows", nargs="+", help="names of the rows of dlm; all by default")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--delay-us", type=float, default=200.0)
    given = parser.parse_args()
    DelayedConnection.delay_s = given.delay_us * 1e-6
    with tempfile.TemporaryDirectory(prefix="dlm-decoders-") as folder:
        arpa, directory = Path(folder) / "model.arpa", Path(folder) / "shards"
        with closing(TextSource(str(given.model))) as source, arpa.open("wb") as out:
            while data := source.read(1 << 20):
                out.write(data)
        build_shard_set(arpa, directory, given.shards)
        heard = drawn(directory, given.words, given.sentences, given.flat, given.beam)
        if given.speech:
            heard = recorded(given.speech, directory, given.words, given.sentences, given.beam)
        if given.joined:
            heard = replace(heard, spoken=[np.concatenate(heard.spoken)])
        print(f"{len(heard.spoken)} utterances, {heard.audio_s:.1f} s of audio, ", end="")
        print(f"{len(heard.words):,} words, {given.delay_us:g} us a reply\n")
        settings = ClientConfig(cache_dir=Path(folder) / "cache", deadline_s=20.0)
        files = ModelFiles(directory, None)  # type: ignore[arg-type]
        with Cluster(files, kind=ProcessServer) as servers:
            ends = FixedEndpoints([Endpoint(address) for address in servers.addresses])
            clients = [
                Client(Core(ends, settings, connect=DelayedConnection)) for _ in range(2)
            ] + [Client.local(directory)]
            print(f"### flashlight-text, {heard.name}\n")
            rows = flashlight_rows(arpa, heard, clients)
            measure(rows, heard, given, ((DlmLM, "score"), (Utterance, "context_blocks")))
            if not given.speech:  # the beam search has no lexicon: labels are letters of words
                print("### CTC beam search, beam 100\n")
                rows = beam_search_rows(arpa, heard.words, clients, 100)
                where = (BeamSearchDecoderCTC, "decode_beams"), (Utterance, "context_blocks")
                measure(rows, heard, given, where)
            for client in clients:
                client.close()


if __name__ == "__main__":
    main()
