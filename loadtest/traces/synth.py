"""Makes a larger or wider trace from a recorded one, with a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dlm.errors import ConfigError
from loadtest.traces.schedule import shuffled
from loadtest.traces.trace import Request, Spoken, Trace, Words, write_trace

TRIES = 20  # maximum draws per further context; duplicates in a request are drawn again


def synthesise(trace: Trace, utterances: int, contexts: float, seed: int) -> list[Spoken]:
    """Takes `utterances` utterances of a trace, shuffled (0: each once), with `contexts` times as
    many contexts per request. Further ones are drawn in proportion to how often they were recorded.

    Raises  ConfigError  `utterances` is below 0, or `contexts` is outside 0.01 to 100
    """
    if utterances < 0 or not 0.01 <= contexts <= 100:
        raise ConfigError(
            f"{utterances} utterances were requested, with {contexts:g} times the recorded "
            "contexts; expected 0 or more utterances, and a factor from 0.01 to 100"
        )
    rng = np.random.default_rng(seed)
    recorded = list(trace.utterances())
    known = [c for one in recorded for request in one.requests for c in request.contexts]
    found: list[Spoken] = []
    for at in shuffled(len(recorded), utterances or len(recorded), rng).tolist():
        requests = tuple(_scaled(one, contexts, known, rng) for one in recorded[at].requests)
        name = f"{recorded[at].name}#{len(found)}"
        found.append(replace(recorded[at], name=name, requests=requests))
    return found


def _scaled(
    request: Request, times: float, known: Sequence[Words], rng: np.random.Generator
) -> Request:
    has = len(request.contexts)
    wanted = max(round(has * times), 1)
    if not has or wanted == has:
        return request
    # The contexts to keep are drawn, since the first ones are better and longer than the others.
    kept = np.sort(rng.permutation(has)[:wanted]).tolist()
    contexts = [request.contexts[at] for at in kept]
    for _ in range(TRIES * (wanted - has)):
        if len(contexts) == wanted:
            break
        one = known[int(rng.integers(len(known)))]
        if one not in contexts:
            contexts.append(one)
            kept.append(int(rng.integers(has)))  # the context whose words the new one gets
    words = request.words
    if len(words) > 1:
        words = tuple(words[at] for at in kept)
    return replace(request, contexts=tuple(contexts), words=words)


def write_synthetic(
    path: Path, trace: Trace, utterances: int = 0, contexts: float = 1.0, seed: int = 1
) -> None:
    """Writes a synthetic trace, whose header describes it; see `synthesise`."""
    scale = {"seed": seed, "utterances": utterances, "contexts": contexts}
    made = {"made_by": "python -m loadtest synth", "synthetic": scale}
    write_trace(path, synthesise(trace, utterances, contexts, seed), {**trace.about, **made})
