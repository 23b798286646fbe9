"""Every caller gets answers or an error of dlm, exactly once, whatever raises inside the client."""

from __future__ import annotations

import pickle
import pkgutil
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

from client.questions import Query, ask, assert_equal, random_queries
from client.scripted import free
from client.test_bigram_fallback import assert_each_is_of_its_model
from cluster import WAIT_S, ModelFiles, until
from dlm.client import Client
from dlm.errors import DeadlineExceeded, DlmError
from dlm.ngram.query import Answers

CALLERS, CALLS = 6, 6
NO_THREAD = "can't start new thread"


def raising(
    real: Callable[..., Any], error: Exception, which: Callable[[int, tuple[Any, ...]], bool]
) -> Callable[..., Any]:
    """`real`, but for the calls that `which` picks, by number and arguments."""
    numbers = count()

    def call(*args: Any, **more: Any) -> Any:
        if which(next(numbers), args):
            raise error
        return real(*args, **more)

    return call


def check(files: ModelFiles, queries: list[Query], answers: Answers) -> None:
    """Fails unless the scores are those of the models that they name."""
    if answers.source is None:
        assert_equal(answers, [files.oracle.score(c, w) for c, w in queries])
    else:
        assert_each_is_of_its_model(files, queries, answers)


def outcomes(client: Client, files: ModelFiles) -> Counter[str]:
    """What many callers at once got; fails for a wrong score, and for what is no error of dlm."""
    found: list[str] = []  # threads may append at once, but would lose a count
    strange: list[BaseException] = []

    def call(caller: int) -> None:
        for number in range(CALLS):
            queries = random_queries(files.oracle, 100 * caller + number, 40)
            contexts, words = [c for c, _ in queries], [w for _, w in queries]
            try:
                answers = client.utterance().score(contexts, words, deadline_s=WAIT_S / 3)
                check(files, queries, answers)
            except DlmError as exc:
                found.append(type(exc).__name__)
            except BaseException as exc:  # noqa: BLE001 - whatever it is, the test fails by it
                strange.append(exc)
            else:
                found.append("answered")

    callers = [threading.Thread(target=call, args=(n,)) for n in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(WAIT_S)
    if strange:
        raise AssertionError(f"{len(strange)} untyped errors") from strange[0]
    return Counter(found)


def fail(patch: pytest.MonkeyPatch, where: str, error: Exception, each: int) -> None:
    """Has one of so many calls of a function raise."""
    path, _, name = where.rpartition(".")
    owner = pkgutil.resolve_name(path)
    patch.setattr(owner, name, raising(getattr(owner, name), error, lambda n, _: n % each == 1))


@pytest.mark.parametrize(
    "bigram_fallback", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "2-grams"]
)
@pytest.mark.parametrize(
    "places",
    [
        ["dlm.client.router:plan"],
        ["dlm.client.router:gather"],
        ["dlm.client.call:Part"],
        ["dlm.client.call:Call.answer"],
        ["dlm.client.kernels:finish"],
        ["dlm.client.lane:Message"],
        ["dlm.client.rules:Queue.submit"],
        ["dlm.client.rules:Queue.take"],
        ["dlm.client.rules:Queue.done"],
        ["dlm.client.call:Place"],
        ["dlm.wire.codec:encode_score_request"],
        ["dlm.wire.codec:decode_score_reply"],
        ["dlm.client.metrics:ClientMetrics.message"],
        ["dlm.wire.codec:decode_score_reply", "dlm.client.lane:Lane._failed"],
    ],
    ids=lambda places: places[-1].rpartition(":")[2],
)
def test_callers_get_answers_or_typed_errors_where_memory_runs_out(
    files, cluster, connect, monkeypatch, places: list[str], bigram_fallback: bool
) -> None:
    """At one of three calls of a function; nobody is left to its deadline, and later calls work."""
    client = connect(cluster, window=1, bigram_fallback=bigram_fallback, heartbeats=False)
    everything = random_queries(files.oracle, 1, 60)
    ask(client.utterance(), files.oracle, everything)
    with monkeypatch.context() as patch:
        for place in places:
            fail(patch, place.replace(":", "."), MemoryError("no room"), 3)
        found = outcomes(client, files)
    assert sum(found.values()) == CALLERS * CALLS
    assert not found[DeadlineExceeded.__name__]
    until(lambda: free(client))
    ask(client.utterance(), files.oracle, everything)


@pytest.mark.parametrize("each", [1, 2])
def test_callers_get_typed_errors_where_no_thread_can_be_started(
    files, cluster, connect, monkeypatch, each: int
) -> None:
    """Neither for connecting nor for a call; once there are threads again, all works."""
    kept = connect(cluster, bigram_fallback=True)
    queries = random_queries(files.oracle, 1, 60)
    frozen = pickle.dumps(kept)
    mine = {threading.get_ident()}
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if threading.get_ident() in mine or thread.name.startswith(("dlm", "ThreadPool")):
            numbers.append(thread.name)
            if len(numbers) % each == 0:
                raise RuntimeError(NO_THREAD)
        real(thread)

    numbers: list[str] = []
    copies = [pickle.loads(frozen) for _ in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for copy in copies:
            for _ in range(4):
                with suppress(DlmError):
                    ask(copy.utterance(), files.oracle, queries, deadline_s=WAIT_S / 3)
                with suppress(DlmError):
                    ask(kept.utterance(), files.oracle, queries, deadline_s=WAIT_S / 3)
    assert numbers
    for client in (*copies, kept):
        until(lambda client=client: answers(client, files, queries))
        until(lambda client=client: free(client))
        client.close()


def answers(client: Client, files: ModelFiles, queries: list[Query]) -> bool:
    """Whether the full model answers; rightly, if so."""
    try:
        found = client.utterance().score([c for c, _ in queries], [w for _, w in queries])
    except DlmError:
        return False
    check(files, queries, found)
    return found.source is None
