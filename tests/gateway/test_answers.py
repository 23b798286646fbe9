"""dlm.gateway.answers: by every door, the bits of the oracle."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.questions import random_sentences
from cluster import ModelFiles, ThreadServer, build, free_ports, until
from dlm.client import AsyncClient, Client, ClientConfig
from dlm.client.cluster_file import Rollout, edited
from dlm.client.states import States, model_info_of
from dlm.gateway.answers import sealed
from dlm.index.search.shard import Shard
from dlm.units import LN_10
from dlm.wire._pb import lm_pb2 as pb
from gateway.gateways import DOORS, Caller, Refused, ThreadGateway
from models import random_model

OTHER_MODEL = sealed(
    States(
        model_info_of("full", "00" * 32, "00" * 32),
        np.zeros((1, 3), np.uint32),
        np.zeros(1, np.uint8),
    )
)[0].tobytes()

every_door = pytest.mark.parametrize("door", DOORS)


def tokens_of(files: ModelFiles, words: list[str]) -> list[Any]:
    """What the oracle says of each word of a sentence and of its end."""
    return files.oracle.score_sentence(words)


def bits(values: Any) -> bytes:
    """Log10 probabilities as the bits of float32."""
    return np.array(values, np.float32).tobytes()


@pytest.mark.promise("gateway_exact")
@every_door
def test_sentences_have_the_oracles_bits(
    callers: dict[str, Caller], files: ModelFiles, door: str
) -> None:
    """As words and as ids, in their order; the empty one too."""
    sentences = [[], ["lacking", "words"], *random_sentences(files.oracle, 3, 20)]
    reply = callers[door]("Score", sentences=[" ".join(words) for words in sentences])
    vocabulary = files.oracle.vocabulary
    ids = [pb.WordIds(ids=map(vocabulary.id_of, words)) for words in sentences]
    by_id = callers[door]("Score", ids=ids)
    assert by_id == reply
    assert reply.model == files.manifest.model
    for words, found in zip(sentences, reply.scores, strict=True):
        expected = tokens_of(files, words)
        assert bits(found.log10_probs) == bits([one.log10_prob for one in expected])
        assert found.matched_orders == [one.matched_order for one in expected]
        assert found.oovs == sum(vocabulary.id_of(word) == 0 for word in words)
        assert found.log10_prob == sum(float(np.float32(one)) for one in found.log10_probs)


@pytest.mark.promise("gateway_exact")
@every_door
def test_a_beam_goes_on_through_states(
    callers: dict[str, Caller], files: ModelFiles, door: str
) -> None:
    """Three steps of three words; states are equal exactly where the oracle's are."""
    words = files.words()[3:6]
    histories: list[tuple[str, ...]] = [()]
    reply = callers[door]("Extend", words=words)
    for _ in range(3):
        histories = [(*history, word) for history in histories for word in words]
        expected = [tokens_of(files, list(history))[-2] for history in histories]
        assert bits(reply.log10_probs) == bits([one.log10_prob for one in expected])
        vocabulary = files.oracle.vocabulary
        kept = [
            files.oracle.state([vocabulary.begin_id, *map(vocabulary.id_of, history)])
            for history in histories
        ]
        assert len(set(zip(kept, reply.states, strict=True))) == len(set(kept))
        assert len(set(reply.states)) == len(set(kept))
        reply = callers[door]("Extend", states=reply.states, words=words)


@every_door
def test_each_state_may_have_its_own_words(callers: dict[str, Caller], door: str) -> None:
    """K rows of W, as words and as ids; without states in the reply where none are wanted."""
    first = callers[door]("Extend", word_ids=[3, 4])
    every = callers[door]("Extend", states=first.states, word_ids=[3, 4, 5])
    own = callers[door](
        "Extend", states=first.states, word_ids=[3, 5], own_words=True, without_states=True
    )
    assert bits(own.log10_probs) == bits([every.log10_probs[0], every.log10_probs[5]])
    assert not own.states


@pytest.mark.promise("gateway_exact")
def test_a_state_is_good_on_another_gateway(callers: dict[str, Caller], files: ModelFiles) -> None:
    """One that asks a shard set in its own process; by any door."""
    states = callers["grpc"]("Extend", word_ids=range(20)).states
    expected = callers["grpc"]("Extend", states=states, word_ids=[7])
    with ThreadGateway(lambda: AsyncClient.local(files.directory)) as other:
        assert other.caller("json")("Extend", states=states, word_ids=[7]) == expected


@every_door
def test_the_likeliest_words_are_the_clients(
    callers: dict[str, Caller], files: ModelFiles, door: str
) -> None:
    """After a state and words; by default, after the beginning of a sentence."""
    a, b = files.words()[5:7]
    state = callers[door]("Extend", words=[a]).states[0]
    reply = callers[door]("NextWords", state=state, text=b, count=4)
    with Client.local(files.directory) as client:
        utterance = client.utterance()
        after = utterance.extend([utterance.extend([utterance.begin()], [a]).states[0, 0]], [b])
        expected = utterance.next_words(after.states[0, 0], 4)
    assert [(one.id, one.log10_prob) for one in reply.words] == expected
    assert [one.word for one in reply.words] == [files.words()[word] for word, _ in expected]
    assert len(callers[door]("NextWords").words) == 10


@every_door
def test_an_nbest_list_comes_back_best_first(callers: dict[str, Caller], door: str) -> None:
    """By scale * acoustic + scale * lm + penalty per word, with the model's own scores."""
    texts, acoustic = ["a b c", "", "lacking"], [-1.0, -9.0, -4.0]
    hypotheses = [
        pb.Hypothesis(text=text, acoustic=score)
        for text, score in zip(texts, acoustic, strict=True)
    ]
    reply = callers[door](
        "Rescore", hypotheses=hypotheses, acoustic_scale=2.0, lm_scale=0.5, word_penalty=-0.25
    )
    scores = callers[door]("Score", sentences=texts).scores
    totals = {
        at: 2.0 * score + 0.5 * (one.log10_prob * LN_10) - 0.25 * len(text.split())
        for at, (text, score, one) in enumerate(zip(texts, acoustic, scores, strict=True))
    }
    assert {one.index: one.total for one in reply.hypotheses} == totals
    assert [one.index for one in reply.hypotheses] == sorted(totals, key=lambda at: -totals[at])
    assert not any(one.fallback for one in reply.hypotheses)


def test_the_model_and_its_servers_are_described(
    callers: dict[str, Caller], files: ModelFiles
) -> None:
    """With the states that sentences begin with; servers by shard, without their addresses."""
    reply = callers["json"]("Models")
    (model,) = reply.models
    assert (model.model, model.shard_set) == (files.manifest.model, files.manifest.shard_set)
    assert (model.kind, model.order, tuple(model.counts)) == ("full", 4, files.manifest.counts)
    assert sorted(one.shard for one in reply.servers) == [0, 1]
    begun = callers["grpc"]("Extend", states=[model.begin_state, b""], word_ids=[3])
    assert begun.log10_probs[0] == begun.log10_probs[1]
    null = callers["grpc"]("Extend", states=[model.null_state], word_ids=[3])
    assert bits(null.log10_probs) == bits([files.oracle.score([], 3).log10_prob])


def test_the_shard_asked_for_each_word_is_said(
    callers: dict[str, Caller], gateway: ThreadGateway, files: ModelFiles
) -> None:
    """As the gateway's client has sent them; none where its low orders have the answer. The traffic
    is their sum."""
    client = gateway.running._client
    assert client is not None
    for words in random_sentences(files.oracle, 8, 20):
        before = Counter(client.sent_to)
        (one,) = callers["json"]("Score", sentences=[" ".join(words)], with_shards=True).scores
        assert len(one.shards) == len(words) + 1
        asked = Counter(client.sent_to)
        asked.subtract(before)
        assert Counter(shard - 1 for shard in one.shards if shard) == +asked
    traffic = callers["grpc"]("Models").traffic
    assert dict(enumerate(traffic.shards)) == dict(client.sent_to)
    assert traffic.queries == gateway.running.metrics.queries
    assert 0 < traffic.local_hits < traffic.queries
    assert sum(traffic.calls) > 0 and len(traffic.calls) == len(traffic.within_s) + 1


def test_a_stream_goes_on_after_a_refusal(callers: dict[str, Caller]) -> None:
    """Each request has its reply, in its turn."""
    wanted = [
        {"word_ids": [3]},
        {"word_ids": [99_999]},
        {"states": [OTHER_MODEL]},
        {"word_ids": [4]},
    ]
    replies = list(callers["grpc"].stream(pb.ExtendRequest(**one) for one in wanted))
    assert [one.reason for one in replies] == ["", "MALFORMED", "WRONG_SHARD_SET", ""]
    assert replies[3] == callers["grpc"]("Extend", word_ids=[4])


@pytest.mark.parametrize(
    ("call", "request_", "reason"),
    [
        ("Score", {"sentences": ["a"], "ids": [pb.WordIds(ids=[1])]}, "MALFORMED"),
        ("Score", {"ids": [pb.WordIds(ids=[60_000])]}, "MALFORMED"),
        ("Score", {"sentences": ["a " * 20_000]}, "TOO_MANY_QUERIES"),
        ("Score", {"sentences": [""] * 5000}, "TOO_MANY_QUERIES"),
        ("Extend", {"words": ["a"], "word_ids": [1]}, "MALFORMED"),
        ("Extend", {"states": [b"", b""], "word_ids": [1, 2, 3], "own_words": True}, "MALFORMED"),
        ("Extend", {"states": [b""] * 4096, "word_ids": range(5)}, "TOO_MANY_QUERIES"),
        ("Extend", {"states": [b""] * 5000}, "TOO_MANY_QUERIES"),
        ("NextWords", {"count": 4_000_000}, "TOO_MANY_QUERIES"),
        ("Extend", {"states": [b"\xff"], "word_ids": [3]}, "MALFORMED"),
        ("NextWords", {"state": b"\x01" + bytes(30)}, "MALFORMED"),
        ("NextWords", {"state": OTHER_MODEL}, "WRONG_SHARD_SET"),
        ("Rescore", {"lm_scale": float("nan")}, "MALFORMED"),
        ("Rescore", {"hypotheses": [pb.Hypothesis(acoustic=float("inf"))]}, "MALFORMED"),
        *(
            (
                "Rescore",
                {"hypotheses": [pb.Hypothesis(acoustic=acoustic)], "acoustic_scale": 10.0},
                "MALFORMED",
            )
            for acoustic in (1e308, -1e308)
        ),
    ],
)
def test_what_breaks_a_rule_is_refused_with_its_reason(
    callers: dict[str, Caller], call: str, request_: dict[str, Any], reason: str
) -> None:
    """The same by every door, and the next call is answered."""
    for caller in callers.values():
        with pytest.raises(Refused) as refused:
            caller(call, **request_)
        assert refused.value.reason == reason
        assert caller("Score", sentences=["a"]).scores


def test_a_changed_state_is_refused(callers: dict[str, Caller]) -> None:
    """Cut, longer, with a bit of another word or model; and what never was a state."""
    state = callers["grpc"]("Models").models[0].begin_state
    changed = [state[:-1], state + b"\0", b"\xff", b"no state", bytes(len(state))]
    changed += [
        state[:at] + bytes([state[at] ^ 1]) + state[at + 1 :]
        for at in (0, 1, 9, 10, len(state) - 1)
    ]
    for one in changed:
        with pytest.raises(Refused) as refused:
            callers["grpc"]("Extend", states=[one], word_ids=[3])
        assert refused.value.reason == "MALFORMED"


def test_a_state_of_the_next_model_of_a_roll_out_is_taken(
    files: ModelFiles, tmp_path: Path
) -> None:
    """Another gateway may have given it while this one gives the old model to everybody."""
    other = build(random_model(8, order=4, words=60, per_order=400), tmp_path / "other", 2)
    both = [files.directory, other.directory]
    servers = [ThreadServer([Shard.open(one, shard) for one in both]).ready() for shard in (0, 1)]
    path, old = tmp_path / "cluster.toml", files.manifest.model
    listed = "".join(f'[[server]]\naddress = "{one.address}"\n' for one in servers)
    path.write_text(edited(listed, old[:12], Rollout(other.manifest.model[:12], old[:12], 0.0)))
    config = ClientConfig(deadline_s=20.0, cache_dir=tmp_path)
    with Client.connect(path, config, model=other.manifest.model) as client:
        utterance = client.utterance()
        state = sealed(utterance.states([utterance.begin()]))[0].tobytes()
    try:
        with ThreadGateway(lambda: AsyncClient.connect(path, config)) as gateway:
            caller = gateway.caller("grpc")

            def model() -> str:
                with contextlib.suppress(Refused):  # until it has found the next model
                    return str(caller("Extend", states=[state], words=["a"]).model)
                return ""

            until(lambda: model() == other.manifest.model)
            assert caller("Extend", words=["a"]).model == old
    finally:
        for one in servers:
            one.end()


def test_a_call_without_time_is_late(callers: dict[str, Caller]) -> None:
    """Its caller no longer waits; a bad header is the caller's fault."""
    with pytest.raises(Refused) as refused:
        callers["json"]("Score", timeout_s=0.0, sentences=["a"])
    assert (refused.value.reason, refused.value.status) == ("LATE", 504)
    with pytest.raises(Refused) as refused:
        callers["json"]("Score", timeout_s=-1.0, sentences=["a"])
    assert (refused.value.reason, refused.value.status) == ("MALFORMED", 400)


def test_a_gateway_without_any_server_describes_its_local_fallback(tmp_path: Path) -> None:
    """Its order and counts, not those of a model that no server has named yet."""
    small = build(random_model(8, order=2, words=20, per_order=50), tmp_path / "small", 1)
    config = ClientConfig(
        cache_dir=tmp_path / "cache", heartbeats=True, local_fallback=small.directory
    )
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with ThreadGateway(lambda: AsyncClient.connect(addresses, config)) as gateway:
        (model,) = gateway.caller("json")("Models").models
    described = model.kind, model.model, model.order, tuple(model.counts)
    assert described == ("local_fallback", small.manifest.model, 2, small.manifest.counts)
