"""What a decoder asks through a recorder is in the trace, and asks the same when it is replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import Cluster, ModelFiles
from dlm.client import Client, ClientConfig
from dlm.errors import QueryError, TextError
from loadtest.traces.recorder import Recorder
from loadtest.traces.rescoring import Confusions, Transcript, positions, read_transcripts, rescore
from loadtest.traces.trace import Request, Spoken, Trace

COUNTED = ("queries", "local_hits", "duplicates", "sent_queries", "messages")


def test_a_replay_asks_what_was_recorded(
    files: ModelFiles, servers: Cluster, tmp_path: Path
) -> None:
    """The client counts the same queries, found in the same places, in as many messages."""
    words = tuple(word.encode() for word in files.words()[5:25])
    counts = []
    with Client.connect(servers.addresses, ClientConfig(60, cache_dir=tmp_path)) as client:
        recorder = Recorder(client)
        said = Transcript("u", "s", 4.0, words)
        rescore(recorder, said, Confusions(client.vocabulary.words), 5, 6)
        counts.append(client.stats)
    with Client.connect(servers.addresses, ClientConfig(60, cache_dir=tmp_path)) as client:
        handle = client.utterance()
        for request in recorder.utterances[0].requests:
            rows = request.words[0] if len(request.words) == 1 else request.words
            handle.extend(handle.states_after(request.contexts), rows)
        counts.append(client.stats)
    first, second = ([getattr(stats, name) for name in COUNTED] for stats in counts)
    assert first == second
    assert counts[0].messages > 10
    assert counts[0].local_hits > 0


def test_every_call_of_a_decoder_is_noted(files: ModelFiles) -> None:
    """extend with shared and own words, score, and whole sentences; at the audio time that was set,
    or spread evenly."""
    a, b, c, d = files.words()[5:9]
    first = tuple(word.encode() for word in (a, b, c, d))
    with Client.local(files.directory) as client:
        recorder = Recorder(client)
        with recorder.spoken("one", speaker="x", seconds=2.0, kind="frame"):
            handle = recorder.utterance()
            recorder.at_s = 0.5
            found = handle.extend([handle.null()], [a, 6])
            recorder.at_s = 9.0
            handle.extend(found.states.reshape(-1), [[c], [d]])
            handle.score([[a, b], []], [c, d])
            handle.extend([handle.null()], [])
            assert len(handle.context_blocks([handle.begin()])) == 1
        with recorder.spoken("two", speaker="x", seconds=2.0, kind="nbest"):
            assert recorder.utterance().score_sentences([f"{a} {b}", [c]])[0].tokens == 3
            recorder.utterance().score_sentences(["", "x"], bos=False, eos=False)
        with recorder.spoken("three", speaker="y", seconds=3.0, kind="frame"):
            pass
    one, two, three = recorder.utterances
    assert [r.at_s for r in one.requests] == [0.5, 2.0, 2.0, 2.0]
    assert one.requests[0].contexts == ((),)
    assert one.requests[0].words == (first[:2],)
    assert one.requests[1].words == ((first[2],), (first[3],))
    assert one.requests[2].contexts == (first[:2], ())
    assert one.requests[3] == Request(2.0, "frame", ((b"<s>",),), (), "context_blocks")
    assert [r.at_s for r in two.requests] == [1.0, 2.0]
    assert two.requests[0].contexts[:3] == (
        (b"<s>",),
        (b"<s>", first[0]),
        (b"<s>", first[0], first[1]),
    )
    assert [row[0] for row in two.requests[0].words] == [*first[:2], b"</s>", first[2], b"</s>"]
    assert two.requests[1].words == ((b"x",),)
    assert three == Spoken("three", "y", 3.0, (three.requests[0],))
    assert three.requests[0].queries == 0


def test_calls_that_cannot_be_recorded_are_refused(files: ModelFiles) -> None:
    """Of a method that is not known here, outside of an utterance, of an unknown kind."""
    with Client.local(files.directory) as client:
        recorder = Recorder(client)
        handle = recorder.utterance()
        with pytest.raises(QueryError, match=r"Recorder\.spoken"):
            handle.extend([handle.begin()], [1])
        with recorder.silent():
            handle.extend([handle.begin()], [1])
        with pytest.raises(QueryError, match="next_words"):
            handle.next_words(handle.begin(), 3)
        with (
            pytest.raises(QueryError, match=r"kind .*'phone'"),
            recorder.spoken("one", speaker="x", seconds=2.0, kind="phone"),
        ):
            pass
    assert recorder.utterances == []


def test_a_rescorer_asks_k_times_w_at_the_end_of_each_word(trace: Trace) -> None:
    """At first of one context, at last for the sentence end."""
    one = next(trace.utterances())
    assert [len(r.contexts) for r in one.requests] == [1, 3, 3, 3, 3, 3, 3]
    assert [len(r.words[0]) for r in one.requests] == [4, 4, 4, 4, 4, 4, 1]
    assert one.requests[-1].at_s == one.requests[-2].at_s == one.seconds
    times = [at for at, _ in positions(Transcript("u", "s", 3.0, (b"aa", b"b", b"ccc")))]
    assert times == [1.0, pytest.approx(5 / 3), 3.0]


def test_candidates_are_spelled_alike_and_hold_the_word() -> None:
    """Marks are never candidates; a word that the model lacks stays the first."""
    words = Confusions([b"<unk>", b"<s>", b"</s>", b"bat", b"bet", b"bit", b"zoo"])
    assert words.of(b"bet", 3) == [b"bet", b"bat", b"bit"]
    assert words.of(b"zoo", 9) == [b"zoo", b"bat", b"bet", b"bit"]
    assert words.of(b"bot", 2) == [b"bot", b"bit"]


def test_transcripts_are_tables_or_lines(tmp_path: Path) -> None:
    """Lengths of the table; guessed from letters where there are none."""
    path = tmp_path / "t.tsv"
    path.write_text('file\tseconds\tspeaker\ttext\na.flac\t2.5\t19\tTHE "MAN\n')
    (one,) = read_transcripts(path, as_spoken=True)
    assert one == Transcript("a.flac", "19", 2.5, (b"the", b"man"))
    plain = tmp_path / "t.txt"
    plain.write_text("the man\n\nis there\n")
    first, second = read_transcripts(plain, as_spoken=False)
    assert (first.seconds, second.name) == (0.5, "line-3")


HEAD = "id\tseconds\tspeaker\ttext\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.tsv", "id\twords\nu1\tyes\n", ", line 1: the columns are id, words; expected seconds"),
        ("t.txt", "u1\t1.5\tyes\n", ", line 1: the columns are u1, 1.5, yes; expected seconds"),
        ("t.csv", "id,seconds,speaker,text\nu1,1,a,yes\n", ", line 1: the columns are id,seconds"),
        ("t.tsv", f"{HEAD}u1\t1\n", ", line 2: found 2 columns; expected 4"),
        ("t.tsv", f"{HEAD}u1\tlong\t19\tTHE\n", ", line 2: seconds is 'long'"),
        ("t.txt", "\n", " has no sentences"),
    ],
)
def test_a_table_of_other_columns_is_not_taken_for_speech(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    """Its header would be an utterance, and names and numbers would be words."""
    (tmp_path / name).write_text(text)
    with pytest.raises(TextError) as found:
        read_transcripts(tmp_path / name, as_spoken=True)
    assert str(found.value).startswith(f"{tmp_path}/{name}{message}")
