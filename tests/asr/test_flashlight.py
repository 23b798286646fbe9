"""flashlight-text decodes with dlm what it decodes with KenLM in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flashlight.lib.text", reason="pip install -e '.[asr]'")

from asr.decoding import (
    TOKENS,
    decode,
    decode_with,
    lexicon_options,
    posteriors,
    spelled,
    spoken_model,
)
from cluster import Cluster, ModelFiles, build, until
from dlm.asr.decoders import flashlight
from dlm.asr.decoders.advance import TokenLM
from dlm.asr.decoders.flashlight import DlmLM
from dlm.client import Client, ClientConfig
from dlm.errors import ConfigError, QueryError
from dlm.units import LN_10

LEXICON = spelled(40)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A 4-gram model of the lexicon in two shards."""
    return build(spoken_model(LEXICON), tmp_path_factory.mktemp("spoken"), 2)


@pytest.fixture(scope="module")
def local(files: ModelFiles) -> Iterator[Client]:
    """A client of it in this process."""
    with Client.local(files.directory) as client:
        yield client


def kenlm_of(files: ModelFiles) -> Any:
    """flashlight's own language model over the same ARPA file."""
    kenlm = pytest.importorskip("flashlight.lib.text.decoder.kenlm")
    from flashlight.lib.text.dictionary import Dictionary

    dictionary = Dictionary()
    for word in LEXICON:
        dictionary.add_entry(word)
    return kenlm.KenLM(str(files.directory.with_name("model.arpa")), dictionary)


def sentences(count: int) -> list[list[str]]:
    """Random words of the lexicon."""
    rng = np.random.default_rng(1)
    return [[LEXICON[i] for i in rng.integers(0, len(LEXICON), 6)] for _ in range(count)]


@pytest.mark.promise("same_hypotheses")
@pytest.mark.parametrize("states", [4, flashlight.STATES])
def test_hypotheses_are_those_of_kenlm(
    files: ModelFiles, local: Client, monkeypatch: pytest.MonkeyPatch, states: int
) -> None:
    """The whole n-best list, with room for few states at first as for many; scores but for KenLM's
    last bit, as it adds weights otherwise."""
    monkeypatch.setattr(flashlight, "STATES", states)
    theirs, ours = kenlm_of(files), DlmLM(local.utterance(), LEXICON)
    for seed, said in enumerate(sentences(4)):
        emissions = posteriors(said, seed, flat=2.0 + seed % 2)
        found, expected = (decode(lm, LEXICON, emissions) for lm in (ours, theirs))
        assert [one.words for one in found] == [one.words for one in expected]
        assert [one.score for one in found] == pytest.approx([one.score for one in expected], 1e-6)
        assert len(found) > 1


def test_words_of_pieces_are_those_of_kenlm(files: ModelFiles, local: Client) -> None:
    """A lexicon whose words are spelled in pieces, of which one begins the next word."""
    from flashlight.lib.text.decoder import LexiconDecoder, SmearingMode, Trie

    pieces = ["-", *("\u2581" + letter for letter in TOKENS[2:]), *TOKENS[2:]]
    spelling = [[pieces.index(one) for one in ("\u2581" + word[0], *word[1:])] for word in LEXICON]
    rng = np.random.default_rng(1)
    for said in sentences(3):
        frames = [at for word in said for one in spelling[LEXICON.index(word)] for at in (one, 0)]
        logits = rng.normal(0.0, 1.0, (len(frames), len(pieces)))
        logits[np.arange(len(frames)), frames] += 4.0
        found = []
        for lm in (DlmLM(local.utterance(), LEXICON), kenlm_of(files)):
            trie = Trie(len(pieces), 0)
            for index, way in enumerate(spelling):
                trie.insert(way, index, lm.score(lm.start(False), index)[1])
            trie.smear(SmearingMode.MAX)
            options = lexicon_options(pieces, 50)
            decoder = LexiconDecoder(options, trie, lm, -1, 0, -1, [], False)
            found.append([one.words for one in decode_with(decoder, logits.astype(np.float32))])
        assert found[0] == found[1]
        assert len(found[0]) > 1


def test_a_context_is_fetched_once_and_kept(files: ModelFiles) -> None:
    """From servers, some at a time; a sentence decoded again costs no round trip."""
    said = sentences(3)
    with Cluster(files) as running, Client.connect(running.addresses) as client:
        lm = DlmLM(client.utterance(), LEXICON)
        first = [decode(lm, LEXICON, posteriors(one, seed)) for seed, one in enumerate(said)]
        after, sent = replace(lm.counts), client.stats.messages
        assert 0 < sent / files.manifest.shards <= after.contexts_fetched < after.queries / 4
        again = [decode(lm, LEXICON, posteriors(one, seed)) for seed, one in enumerate(said)]
        assert again == first
        assert (lm.counts.contexts_fetched, client.stats.messages) == (after.contexts_fetched, sent)
        alone = DlmLM(client.utterance(), LEXICON, ahead=0)
        assert [decode(alone, LEXICON, posteriors(one, n)) for n, one in enumerate(said)] == first
        assert client.stats.messages > 2 * sent
        assert alone.counts.contexts_fetched <= after.contexts_fetched
        # With room for almost nothing it is slower, and no different.
        small = DlmLM(client.utterance(), LEXICON, max_words=1)
        assert [decode(small, LEXICON, posteriors(one, n)) for n, one in enumerate(said)] == first
        assert small.counts.contexts_fetched > after.contexts_fetched


@pytest.mark.promise("beam_goes_on")
def test_a_decoder_goes_on_without_servers_where_it_may(files: ModelFiles) -> None:
    """On the 2-grams, and on the whole model once a server is back, in the next sentence."""
    said = posteriors(sentences(1)[0], 1)
    with Cluster(files) as running:
        settings = ClientConfig(bigram_fallback=True, heartbeats=False, deadline_s=2.0)
        with Client.connect(running.addresses, settings) as client:
            lm = DlmLM(client.utterance(), LEXICON)
            whole = decode(lm, LEXICON, said)
            ports = running.ports
            running.end()
            fresh = DlmLM(client.utterance(), LEXICON)
            partial = decode(fresh, LEXICON, said)
            assert partial
            assert client.stats.bigram_fallback > 0
            with Cluster(files, ports=ports):
                until(lambda: decode(fresh, LEXICON, said) == whole)
            strict = Client.local(files.directory)
    with strict as local:
        assert decode(DlmLM(local.utterance(), LEXICON), LEXICON, said) == whole


def test_hypotheses_with_equal_contexts_become_one_where_asked(
    files: ModelFiles, local: Client
) -> None:
    """The best one stays, and the list is shorter."""
    alone, merged = (DlmLM(local.utterance(), LEXICON, recombine=r) for r in (False, True))
    for seed, said in enumerate(sentences(2)):
        emissions = posteriors(said, seed)
        every, few = decode(alone, LEXICON, emissions), decode(merged, LEXICON, emissions)
        assert few[0] == every[0]
        assert len(few) < len(every)


def test_a_state_of_the_sentence_before_is_refused(local: Client) -> None:
    """Not taken for another."""
    lm = DlmLM(local.utterance(), LEXICON)
    before = lm.start(False)
    lm.start(False)
    with pytest.raises(QueryError, match="another decoder"):
        lm.score(before, 0)
    with pytest.raises(QueryError, match=r"index 40 .* 40 words"):
        lm.score(lm.start(True), 40)


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        ("the man", QueryError, "words: found a str"),
        ({"w1"}, QueryError, "words: found a set"),
        (7, QueryError, "words: found a int"),
        ([1.5], QueryError, "float"),
        ([-1], QueryError, "ids .*-1"),
        (["THE", "MAN"], ConfigError, "2 words .*'THE', 'MAN'"),
    ],
)
def test_words_that_cannot_be_recognised_are_refused_at_once(
    local: Client, words: Any, error: type[Exception], says: str
) -> None:
    """By each adapter, so that nobody decodes in vain; a lexicon may lack some, as KenLM's."""
    for adapter in (DlmLM, TokenLM):
        with pytest.raises(error, match=says):
            adapter(local.utterance(), words)
    for given in ([LEXICON[0], "THE"], ["<unk>"], [], [0]):
        DlmLM(local.utterance(), given)


def test_a_client_is_not_an_utterance(local: Client) -> None:
    """Nor is a path."""
    for given in (local, "cluster.toml"):
        for adapter in (DlmLM, TokenLM):
            with pytest.raises(QueryError, match=f"{type(given).__name__}.*utterance"):
                adapter(given, LEXICON)  # type: ignore[arg-type]


@pytest.mark.parametrize("recombine", [False, True])
def test_bonuses_of_phrases_are_added_outside_of_the_weight(local: Client, recombine: bool) -> None:
    """A word that the model lacks is heard; hypotheses differ by the phrases that they have."""
    words = [*LEXICON, "fadeg"]
    phrases = {"fadeg": 3.0, f"{LEXICON[3]} fadeg {LEXICON[2]}": 1.5, LEXICON[1]: -0.5}
    said = [LEXICON[1], LEXICON[3], "fadeg", LEXICON[2]]
    emissions = posteriors(said, 5, flat=1.5)
    utterance = local.utterance(phrases=phrases)
    biased = DlmLM(utterance, words, recombine=recombine, lm_weight=2.0)  # as the decoder's
    found = decode(biased, words, emissions)
    assert [words[at] for at in found[0].words][-3:] == said[-3:]
    plain = decode(DlmLM(local.utterance(), words), words, emissions, beam=500)
    before = {one.words: one.score for one in plain}
    compared = [one for one in found if one.words in before]
    assert len(compared) > 1
    for one in compared:
        bonus = utterance.phrases.of_words([words[at] for at in one.words])
        # Those that were merged also differ in what was heard of the words before.
        near = pytest.approx(LN_10 * bonus, abs=0.5 if recombine else 1e-3)
        assert one.score - before[one.words] == near
    for weight in (None, 0.0, -1.0, np.inf, np.nan, 1e-320, "2"):
        with pytest.raises(QueryError, match="lm_weight"):
            DlmLM(utterance, words, lm_weight=weight)
    with pytest.raises(QueryError, match="phrases"):
        TokenLM(utterance)
