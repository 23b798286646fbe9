"""dlm's CTC beam search finds what a plain one does, and pyctcdecode.

The last test needs `pip install --no-deps pyctcdecode pygtrie`, which no extra brings.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asr.decoding import TOKENS, posteriors, spelled, spoken_model
from cluster import Cluster, ModelFiles, build, until
from dlm.asr.ctc import BeamSearchDecoderCTC, Stream, build_ctcdecoder
from dlm.asr.decoders import beams
from dlm.client import Client, ClientConfig, Phrases, Utterance
from dlm.errors import ConfigError, KenlmFormatError, ModelMismatch, QueryError, UnavailableError
from dlm.units import LN_10

LEXICON = spelled(40)
MARK = "\u2581"
LETTERS = ["", " ", *TOKENS[2:]]
ALPHABETS = {
    "letters": LETTERS,
    "together": [*LETTERS, "ab", "</s>"],
    "pieces": ["<unk>", "<pad>", *(MARK + one for one in [*TOKENS[2:], *LEXICON[:5]]), *TOKENS[2:]],
    "bare": ["<blk>", MARK, *(MARK + one for one in TOKENS[2:]), *TOKENS[2:]],
    "bert": ["[PAD]", "[UNK]", *TOKENS[2:], *LEXICON[:5], *(f"##{one}" for one in TOKENS[2:])],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"prune_history": True, "beam_width": 9},
    {"token_min_logp": -9.0, "beam_prune_logp": -30.0},
    {"hotwords": [LEXICON[1], "fad", f" {LEXICON[3]} fadeg"], "hotword_weight": 6.0},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A 4-gram model of the lexicon in two shards."""
    return build(spoken_model(LEXICON), tmp_path_factory.mktemp("spoken"), 2)


@pytest.fixture(scope="module")
def cluster(files: ModelFiles) -> Iterator[Cluster]:
    """Its servers."""
    with Cluster(files) as running:
        yield running


@pytest.fixture
def utterance(files: ModelFiles) -> Iterator[Utterance]:
    with Client.local(files.directory) as client:
        yield client.utterance()


def heard(labels: list[str], seed: int, unknown: bool = True) -> Any:
    """(T, labels) ln P, of words and of one that the model lacks, unclearly; cut off in a word."""
    rng = np.random.default_rng(seed)
    said = [LEXICON[i] for i in rng.integers(0, len(LEXICON), 5)]
    base = posteriors([*said, "fadeg"], seed, flat=1.5 + seed % 4 / 2)[: -1 - seed % 3]
    logits = rng.normal(-6.0, 2.0, (len(base), len(labels)))
    logits[:, : base.shape[1]] += base[:, : len(labels)]
    logits[np.arange(len(base)), rng.integers(0, len(labels), len(base))] += 5.0
    if not unknown:
        logits[:, [at for at, label in enumerate(labels) if label.lower()[1:-1] == "unk"]] = -60.0
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def plain_search(
    labels: list[str], ln_probs: Any, said: Callable[..., float], begun: Callable[[str], float],
    beam_width: int = 100, beam_prune_logp: float = -10.0, token_min_logp: float = -5.0, **_: Any,
) -> list[tuple[str, list[Any], float, float]]:  # fmt: skip
    """The same search over tuples of words. A beam is (words, part, last label, whether that ends
    its word). `said` scores whole words, and `begun` scores unfinished ones."""
    bert = any(one.startswith("##") for one in labels)
    beams: dict[Any, Any] = {((), "", None, False): (0.0, [], None)}
    for t, column in enumerate(ln_probs):
        found: dict[Any, Any] = {}
        tried = np.flatnonzero(column >= token_min_logp).tolist()
        for n in tried or [int(column.argmax())]:
            label = labels[n].removeprefix("##") if bert else labels[n]
            label = MARK + label if bert and label == labels[n] and label[0] != "[" else label
            label = "" if label in ("[PAD]", "<pad>", "<blk>") else label
            label = f"{MARK}\u2047{MARK}" if label in ("[UNK]", "<unk>") else label
            for (words, part, last, closed), (logit, times, span) in beams.items():
                if label == "":
                    key, state = (words, part, "", closed), (times, span)
                elif label == last:
                    key, state = (words, part, last, closed), (times, span and (span[0], t + 1))
                else:
                    if part and (closed or label[0] in (MARK, " ")):
                        words, part, times, span = (*words, part), "", [*times, span], None
                    text = label.strip(MARK + " ")
                    span = (span[0] if span else t, t + 1) if text else None
                    closed = label[0] == label[-1] == MARK and bool(text)
                    key, state = (words, part + text, label, closed), (times, span)
                before = found[key][0] if key in found else -math.inf
                found[key] = (np.logaddexp(before, logit + column[n]), *state)
        scores = {key: one[0] + said(key[0]) + begun(key[1]) for key, one in found.items()}
        kept = sorted(scores, key=lambda key: -scores[key])[:beam_width]
        beams = {k: found[k] for k in kept if scores[k] >= scores[kept[0]] + beam_prune_logp}
    ended: dict[Any, Any] = {}
    for (words, part, _, _), (logit, times, span) in beams.items():
        whole, times = (*words, part) if part else words, [*times, span] if part else times
        logit = np.logaddexp(ended[whole][0], logit) if whole in ended else logit
        ended[whole] = (logit, times, not part)
    rows = [(" ".join(w), list(zip(w, times, strict=True)), logit, logit + said(w, True, open_))
            for w, (logit, times, open_) in ended.items()]  # fmt: skip
    best = max(row[-1] for row in rows)
    return sorted((r for r in rows if r[-1] >= best + beam_prune_logp), key=lambda r: -r[-1])


def plain_scores(utterance: Utterance | None, listed: list[str], options: Any) -> Any:
    """`said` and `begun` of `plain_search`, by the utterance's own scores of sentences."""
    hot = {word for one in options.get("hotwords", ()) for word in one.split()}
    weight = options.get("hotword_weight", 10.0)

    def said(words: tuple[str, ...], ends: bool = False, empty: bool = False) -> float:
        total = weight * sum(word in hot for word in words)
        if utterance is None:
            return total
        whole = (*words, "") if empty else words
        (score,) = utterance.score_sentences([whole], eos=ends)
        unknown = sum(word not in listed for word in whole)
        return total + 0.6 * LN_10 * (score.log10_prob - 10.0 * unknown) + 1.5 * len(whole)

    def begun(part: str) -> float:
        lengths = [len(word) for word in hot if word.startswith(part)]
        if lengths or not part or utterance is None:
            return weight * len(part) / min(lengths) if lengths else 0.0
        known = any(word.startswith(part) for word in listed)
        return 0.0 if known else -10.0 * max(len(part), 6) / 6

    return cache(said), cache(begun)


def assert_same(found: list[Any], expected: list[Any], tolerance: float) -> None:
    """The same texts, words and frames in the same order, and scores."""
    assert [(one[0], one[-3]) for one in found] == [(one[0], one[-3]) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[-2:] == pytest.approx(other[-2:], abs=tolerance)


@pytest.mark.parametrize("kind", ALPHABETS)
@pytest.mark.parametrize("options", [OPTIONS[0], *OPTIONS[2:]], ids=["", "wide", "hotwords"])
@pytest.mark.parametrize("has_model", [True, False])
def test_hypotheses_are_those_of_a_plain_search(
    utterance: Utterance, kind: str, options: dict[str, Any], has_model: bool
) -> None:
    labels, listed = ALPHABETS[kind], LEXICON[:30]
    model = utterance if has_model else None
    decoder = build_ctcdecoder(labels, model, listed, alpha=0.6)
    scores = plain_scores(model, listed, options)
    options = {"beam_width": 30, **options}
    for seed in range(2):
        logits = heard(labels, seed)
        expected = plain_search(labels, logits, *scores, **options)
        found = decoder.decode_beams(logits, **options)
        assert len(expected) > 1
        assert_same(found, expected, 1e-4)
        both = decoder.decode_batch(None, [logits] * 2, **options)
        assert both == [decoder.decode(logits, **options)] * 2


@pytest.mark.promise("same_hypotheses")
@pytest.mark.parametrize("kind", sorted({*ALPHABETS} - {"bare"}))
@pytest.mark.parametrize("named", [True, False])
def test_hypotheses_are_those_of_pyctcdecode(
    files: ModelFiles, cluster: Cluster, kind: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With KenLM's API by dlm, whose scores differ in KenLM's last bit alone; and its scores to
    1e-9. Where it tries its sign of unknown pieces, or U+2581, it breaks words of other beams."""
    theirs = pytest.importorskip("pyctcdecode", reason="pip install --no-deps pyctcdecode pygtrie")
    from dlm.asr import kenlm

    monkeypatch.setattr("pyctcdecode.decoder.kenlm", kenlm, raising=False)
    monkeypatch.setattr("pyctcdecode.language_model.kenlm", kenlm, raising=False)
    arpa, labels = str(files.directory.with_name("model.arpa")), ALPHABETS[kind]
    with Client.connect(cluster.addresses) as client:
        for listed, boundary in (
            ((LEXICON, True), (LEXICON[:20], False)) if named else ((None, True),)
        ):
            settings = {"alpha": 0.6, "lm_score_boundary": boundary}
            peer = theirs.build_ctcdecoder(labels, arpa if named else None, listed, **settings)
            for model in (client.utterance(), arpa) if named else (None,):
                decoder = build_ctcdecoder(labels, model, listed, **settings)
                for seed, options in enumerate(OPTIONS):
                    given = heard(labels, seed, unknown=False)
                    given = given if seed % 2 else np.exp(given).astype(np.float32)
                    expected = peer.decode_beams(given, **options)
                    assert_same(decoder.decode_beams(given, **options), expected, 1e-9)


def test_a_frame_asks_servers_once(files: ModelFiles, cluster: Cluster) -> None:
    """For all beams, of all utterances of a batch or all streams; and never what was seen."""
    given = [heard(LETTERS, seed) for seed in range(12)]
    sent, found = [], []
    for way in ("one by one", "batch", "streams"):
        with Client.connect(cluster.addresses) as client:
            decoder = build_ctcdecoder(LETTERS, client.utterance(), LEXICON)
            if way == "one by one":
                each = [build_ctcdecoder(LETTERS, client.utterance(), LEXICON) for _ in given]
                pairs = zip(each, given, strict=True)
                found.append([one.decode(logits, prune_history=False) for one, logits in pairs])
                assert 0 < client.stats.messages <= sum(map(len, given)) * files.manifest.shards
            elif way == "batch":
                found.append(decoder.decode_batch(None, given, prune_history=False))
            else:
                streams = [decoder.stream() for _ in given]
                decoder.push_all(streams, given)
                found.append([stream.finish()[0][0] for stream in streams])
            sent.append(client.stats.messages)
            seen = each[0] if way == "one by one" else decoder
            seen.decode_beams(given[0])
            assert client.stats.messages == sent[-1]
    assert found[0] == found[1] == found[2]
    assert sent[1] <= sent[2] < 0.7 * sent[0]


def test_a_server_of_each_shard_dies_and_nothing_is_lost(
    files: ModelFiles, cluster: Cluster, utterance: Utterance
) -> None:
    """In the middle of utterances; the other server of each shard answers."""
    given = [heard(LETTERS, seed) for seed in range(6)]
    local = build_ctcdecoder(LETTERS, utterance, LEXICON)
    with Cluster(files) as other:
        config = ClientConfig(deadline_s=20.0)
        with Client.connect([*other.addresses, *cluster.addresses], config) as client:
            decoder = build_ctcdecoder(LETTERS, client.utterance(), LEXICON)
            streams = [decoder.stream() for _ in given]
            decoder.push_all(streams, [one[:20] for one in given])
            sent = client.stats.messages
            other.end()
            decoder.push_all(streams, [one[20:] for one in given])
            assert client.stats.messages > sent
            for stream, one in zip(streams, given, strict=True):
                expected = local.decode_beams(one)
                assert [beam[0::2] for beam in stream.finish()] == [beam[0::2] for beam in expected]


@pytest.mark.parametrize("kind", ["letters", "pieces"])
@pytest.mark.parametrize("probabilities", [True, False])
def test_a_stream_finds_what_the_whole_utterance_does(
    utterance: Utterance, kind: str, probabilities: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its frames come, with phrases, and if the table of states is too small; what is
    settled stays."""
    labels, phrases = ALPHABETS[kind], {f"{LEXICON[3]} fadeg": 2.0}
    whole = build_ctcdecoder(labels, utterance, LEXICON)
    monkeypatch.setattr(beams, "STATES", 20)
    monkeypatch.setattr(beams, "ROOM", 1)
    small = build_ctcdecoder(labels, utterance, LEXICON)
    for seed in range(3):
        given = heard(labels, seed)
        given = np.exp(given).astype(np.float32) if probabilities else given
        expected = whole.decode_beams(given, phrases=phrases)
        stream, settled = small.stream(logits=not probabilities, phrases=phrases), [""]
        for at in range(0, len(given), seed + 1):
            text, count = (part := stream.push(given[at : at + seed + 1])).text, part.settled
            assert " ".join(text.split()[:count]).startswith(settled[-1])
            settled.append(" ".join(text.split()[:count]))
            if at == 6:
                begun = given[: at + seed + 1]
                assert stream.finish() == whole.decode_beams(begun, phrases=phrases)
        assert stream.finish() == expected
        assert expected[0][0].startswith(settled[-1])
    assert small._words.table.room > 20
    clear = posteriors(LEXICON[:4], 1, flat=0.5)
    assert kind == "pieces" or small.stream().push(clear).settled > 1


@pytest.mark.parametrize("prune_history", [True, False])
@pytest.mark.parametrize("kind", ["letters", "pieces"])
def test_a_stream_without_end_stays_small(
    utterance: Utterance, kind: str, prune_history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settled words leave it, and what follows is what the whole utterance has, scores included."""
    monkeypatch.setattr(beams, "ROOM", 64)
    given = np.concatenate([heard(ALPHABETS[kind], seed) for seed in range(20)])
    decoder = build_ctcdecoder(ALPHABETS[kind], utterance, LEXICON[:25])
    options = {"hotwords": [LEXICON[1]], "phrases": {f"{LEXICON[3]} fadeg": 2.0}}
    stream = decoder.stream(prune_history=prune_history, **options)
    settled, sizes = [], []
    for at in range(0, len(given), 10):
        stream.push(given[at : at + 10])
        settled += stream.settle()
        arrays = [one for one in vars(stream.search).values() if isinstance(one, np.ndarray)]
        sizes.append(sum(array.nbytes for array in arrays))
    assert len(settled) > 60
    assert np.median(sizes[len(sizes) // 2 :]) < 1.5 * np.median(sizes[: len(sizes) // 2])
    expected = decoder.decode_beams(given, prune_history=prune_history, **options)
    for found, whole in zip(stream.finish(), expected, strict=True):
        assert [*settled, *found[2]][-30:] == whole[2][-30:]
        assert (found[1], found[3], found[4]) == (whole[1], whole[3], whole[4])
    assert [*settled, *stream.finish()[0][2]] == expected[0][2]


def test_a_stream_goes_on_when_servers_are_back(files: ModelFiles) -> None:
    given = heard(LETTERS, 1)
    with (
        Cluster(files) as running,
        Client.connect(running.addresses, ClientConfig(heartbeats=False, deadline_s=5.0)) as client,
    ):
        decoder = build_ctcdecoder(LETTERS, client.utterance(), LEXICON)
        stream = decoder.stream()
        stream.push(given[:4])
        ports = running.ports
        running.end()
        with pytest.raises(UnavailableError):
            stream.push(given[4:])
        with Cluster(files, ports=ports):
            until(lambda: goes_on(stream))
            assert stream.finish() == decoder.decode_beams(given)


def goes_on(stream: Stream) -> bool:
    """Whether servers answer what it waits for."""
    with contextlib.suppress(UnavailableError):
        return bool(stream.push(np.zeros((0, 9))))
    return False


def test_words_have_confidences(utterance: Utterance) -> None:
    """The share of the hypotheses that have a word at its time."""
    decoder = build_ctcdecoder(LETTERS, utterance, LEXICON)
    sure, vague = (posteriors(LEXICON[:3], 1, flat=flat) for flat in (0.3, 4.0))
    assert [(word, round(share, 3)) for word, _, share in decoder.decode_words(sure)] == [
        (word, 1.0) for word in LEXICON[:3]
    ]
    found, best = decoder.decode_words(vague), decoder.decode_beams(vague)[0]
    assert [one[:2] for one in found] == best[2]
    assert 0.0 < min(share for _, _, share in found) < 0.9


def test_bonuses_of_phrases_are_added_outside_of_alpha(utterance: Utterance) -> None:
    """A word that the model lacks is heard, without the offset of unknown words; hypotheses differ
    by the phrases that they have. A state begins phrases anew."""
    phrases = {"fadeg": 3.0, f"{LEXICON[3]} fadeg {LEXICON[2]}": 1.5}
    said = [LEXICON[1], LEXICON[3], "fadeg", LEXICON[2]]
    for labels in (LETTERS, [*(MARK + one for one in TOKENS[2:]), *TOKENS[2:], ""]):
        logits = posteriors(said, 1, flat=1.6)
        if labels != LETTERS:
            logits = np.full((2 * len("".join(said)), len(labels)), -9.0)
            tokens = [one for word in said for one in (MARK + word[0], *word[1:])]
            for at, token in enumerate(tokens):
                logits[2 * at, labels.index(token)] = logits[2 * at + 1, -1] = 0.0
        for boundary in (True, False):
            settings = {"lm_score_boundary": boundary, "alpha": 0.7}
            decoder = build_ctcdecoder(labels, utterance, [*LEXICON, "fadeg"], **settings)
            found = decoder.decode_beams(logits, phrases=phrases, beam_width=40)
            assert " ".join(said[1:3]) in found[0][0]
            nothing = decoder.decode_beams(logits, phrases={"fadeg": 0.0}, beam_width=40)
            before = {one[0]: one[4] - one[3] for one in nothing}
            compared = [one for one in found if one[0] in before]
            bound = utterance.with_phrases(Phrases(phrases)).phrases
            for text, _, _, sound, score in compared:
                bonus = LN_10 * bound.of_words(text.split())
                assert score - sound - before[text] == pytest.approx(bonus, abs=1e-4)
            assert compared
    state = found[0][1]
    assert pickle.loads(pickle.dumps(state)) == state
    assert decoder.decode_beams(logits, phrases=phrases, lm_start_state=state)
    for other in ({"fadeg": 2.0}, None):
        with pytest.raises(ModelMismatch):
            decoder.decode_beams(logits, phrases=other, lm_start_state=state)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_batches_run_in_other_processes(
    files: ModelFiles, utterance: Utterance, method: str, tmp_path: Path
) -> None:
    """A model by name is opened there, if it still is; one of an utterance must be forked."""
    given = [heard(LETTERS, seed) for seed in range(2)]
    gone = shutil.copy(arpa := files.directory.with_name("model.arpa"), tmp_path)
    with multiprocessing.get_context(method).Pool(1) as pool:
        decoder = build_ctcdecoder(LETTERS, arpa, LEXICON)
        assert decoder.decode_batch(pool, given) == decoder.decode_batch(None, given)
        decoders = [build_ctcdecoder(LETTERS, model) for model in (utterance, gone)]
        Path(gone).unlink()
        for lost in decoders:
            with pytest.raises(ConfigError):
                pool.map_async(lost.decode, given).get(60)
        Path(gone).write_bytes(b"mmap lm http://kheafield.com/code format version 5\n\0")
        with pytest.raises(KenlmFormatError, match=gone):
            pool.map_async(decoders[1].decode, given).get(60)


def test_a_decoder_is_saved(files: ModelFiles, utterance: Utterance, tmp_path: Path) -> None:
    """With a copy of the model's file, or a pointer to shards; not with an utterance."""
    given, hot = heard(LETTERS, 3), {"hotwords": ["fadeg"]}
    arpa = files.directory.with_name("model.arpa")
    for number, model in enumerate((arpa, files.directory, None)):
        decoder = build_ctcdecoder(LETTERS, model, LEXICON, alpha=0.3)
        decoder.save_to_dir(folder := tmp_path / str(number))
        loaded = BeamSearchDecoderCTC.load_from_dir(str(folder))
        expected = decoder.decode_beams(given, **hot)
        assert [one[:1] + one[2:] for one in loaded.decode_beams(given, **hot)] == [
            one[:1] + one[2:] for one in expected
        ]
        if model is not None:
            for other in (decoder, build_ctcdecoder(LETTERS)):
                with pytest.raises(ConfigError):
                    other.save_to_dir(folder)
            (folder / "language_model" / "notes.txt").touch()
            with pytest.raises(ConfigError, match=r"notes\.txt"):
                BeamSearchDecoderCTC.load_from_dir(folder)
    decoder = build_ctcdecoder(LETTERS, utterance)
    with pytest.raises(ConfigError):
        decoder.save_to_dir(tmp_path / "other")
    with pytest.raises(ConfigError):
        BeamSearchDecoderCTC.load_from_dir(tmp_path)


def test_all_words_are_saved_or_nothing(tmp_path: Path) -> None:
    """Words that are not UTF-8, or have what ends lines elsewhere; or a file that is gone."""
    words = ["a", "b\x85c", "caf\udce9", "d\u2028e"]
    lines = (f"-1.0\t{word}\n" for word in ("<unk>", "<s>", "</s>", *words))
    text = f"\\data\\\nngram 1=7\n\n\\1-grams:\n{''.join(lines)}\n\\end\\\n"
    (arpa := tmp_path / "a.arpa").write_text(text, encoding="utf-8", errors="surrogateescape")
    decoder = build_ctcdecoder(LETTERS, arpa, words)
    decoder.save_to_dir(tmp_path / "there")
    assert BeamSearchDecoderCTC.load_from_dir(tmp_path / "there")._words.trie.words == words
    arpa.unlink()
    with pytest.raises(ConfigError):
        decoder.save_to_dir(tmp_path / "gone")
    assert not any((tmp_path / "gone").iterdir())


NAN, MINUS = np.full((2, 9), np.nan), np.full((2, 9), -np.inf)


WRONG: dict[str, Any] = {
    "beam_width": (0, 2.5, math.inf, "1"),
    "beam_prune_logp": (1.0,),
    "token_min_logp": (math.nan,),
    "hotwords": ("word", {"a": 3.0}, [1], 7),
    "hotword_weight": (math.nan, math.inf, "1"),
}


@pytest.mark.parametrize("logits", [np.zeros((2, 8)), np.zeros(9), NAN, MINUS, -MINUS])
def test_what_cannot_be_decoded_is_refused(utterance: Utterance, logits: Any) -> None:
    decoder = build_ctcdecoder(LETTERS, utterance, LEXICON)
    with pytest.raises(QueryError):
        decoder.decode_beams(logits)
    wrong = [(QueryError, {name: value}) for name in WRONG for value in WRONG[name]]
    for error, options in (*wrong, (ModelMismatch, {"lm_start_state": 3}), (TypeError, {"x": 3})):
        with pytest.raises(error):
            decoder.decode_beams(np.zeros((2, 9)), **options)


def test_what_no_decoder_has_is_refused(files: ModelFiles, utterance: Utterance) -> None:
    """A client, a string of words, words that the model lacks, labels that are no alphabet."""
    with Client.local(files.directory) as local, pytest.raises(QueryError, match=r"Client.*utter"):
        build_ctcdecoder(LETTERS, local)  # type: ignore[arg-type]
    with pytest.raises(QueryError, match="unigrams"):
        build_ctcdecoder(LETTERS, utterance, "words.txt")
    with pytest.raises(ConfigError, match=r"1 words .*'THE'"):
        build_ctcdecoder(LETTERS, utterance, ["THE"])
    for labels in (["a", "a"], ["a b"], ["\u2581a", " "], ["\n"], "abc", [1]):
        with pytest.raises(ConfigError):
            build_ctcdecoder(labels)  # type: ignore[arg-type]
    with pytest.raises(QueryError):
        build_ctcdecoder(LETTERS, alpha=math.nan)
    with pytest.raises(QueryError):
        build_ctcdecoder(LETTERS).decode(np.zeros((1, 9)), phrases={"a": 1.0})
    decoder = build_ctcdecoder(LETTERS, utterance, iter(LEXICON[:2]))
    assert decoder._words.trie.words == sorted(LEXICON[:2])
    stream, frames = decoder.stream(logits=False), np.full((1, 9), 1 / 9)
    for streams in ([stream, stream], [stream]):
        with pytest.raises(QueryError):
            decoder.push_all(streams, [frames] * 2)
    stream.push(frames[:0])
    assert stream.push(frames.astype(np.float32)).text == "" and stream.search.single


@pytest.mark.parametrize("has_model", [True, False])
def test_little_is_decoded(utterance: Utterance, has_model: bool) -> None:
    """No frame, one frame, silence of which nothing is left; and 10,000 hotwords."""
    decoder = build_ctcdecoder(LETTERS, utterance if has_model else None, LEXICON)
    decoder.reset_params(alpha=0.0, unk_score_offset=-math.inf if has_model else -1.0)
    assert decoder.decode(np.zeros((0, 9))) == ""
    assert decoder.decode(np.eye(9)[:1] * 50) == ""
    assert decoder.decode(np.eye(9)[[2, 2, 0, 3]] * 50) == "ab"
    many = [f"{a}{b}" for a in spelled(250) for b in LEXICON]
    name = next(one for one in many[77:] if all(a != b for a, b in pairwise(one)))
    logits = posteriors([name, LEXICON[0]], 1, flat=0.5)
    assert decoder.decode(logits, hotwords=many) == f"{name} {LEXICON[0]}"
