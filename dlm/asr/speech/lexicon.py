"""Spells a model's words in labels of the acoustic model: letters, pieces or phonemes.

Pronunciations have three sources, in this order; a word gets all that the first two list:

1. `pronunciations.tsv.zst` of dlm's data: 60,000 frequent words, as the letters-to-sounds network
   of the package hama pronounces them. The acoustic model was trained with that network and hears
   these sounds ("of" as "ɔf"): they give 5 points fewer word errors than source 2 alone.
2. CMU's dictionary (134,000 words, in the package pocketsphinx), its ARPAbet converted to IPA.
3. For words missing from both, that network itself. It takes about 3 ms per word, so its answers
   are kept in the cache folder, in a file that is replaced as a whole.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from dlm.client import Utterance
from dlm.errors import ConfigError
from dlm.files import write_whole
from dlm.logs import EventLog
from dlm.ngram.vocab import UNK_ID
from dlm.pieces import Pieces
from dlm.progress import ProgressReporter, Tell
from dlm.resources import cache_folder
from dlm.units import counted

log = EventLog(__name__)

LONGEST = 32  # letters; the network makes at most 32 phonemes


def pronounced(words: Iterable[str], tell: Tell | None = None) -> dict[str, tuple[str, ...]]:
    """Returns the sounds of each lower-case word, except words longer than `LONGEST`. If the
    cache cannot be written, that is no error, but later calls are slow."""
    path = cache_folder() / f"pronunciations-{version('hama')}.tsv"
    known = _read(path)
    missing = [word for word in words if word not in known and len(word) <= LONGEST]
    if missing:
        progress = ProgressReporter(tell or (lambda line: None))
        progress.stage(f"pronouncing {counted(len(missing), 'word')}, once", len(missing), "words")
        for word, sounds in letters_to_sounds(missing):
            known[word] = sounds
            progress.step(1)
        _write(path, known)
    return {word: known[word] for word in words if known.get(word)}


def letters_to_sounds(words: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields words and sounds. Some sounds are of another language ("radio" is "r a ð ̞ j o"). The
    acoustic model also learnt them from this network: without them, word errors are 0.4 points
    higher."""
    from hama import G2PModel
    from hama.tokenizer import TextTokenizer

    model = G2PModel()
    # The package rebuilds this dictionary for each letter and pads each word to 128 letters, which
    # takes ten times as long for the same sounds.
    vocabulary = SimpleNamespace(encoder_token_to_id=dict(model.vocab.encoder_token_to_id))
    for word in words:
        model.tokenizer = TextTokenizer(vocabulary, max_input_len=len(word))
        found = model.predict(word).alignments
        yield word, tuple(one.phoneme for one in found if one.phoneme.strip())


def _read(path: Path) -> dict[str, tuple[str, ...]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return {word: tuple(s.split()) for word, s in (line.split("\t") for line in lines)}
    except (OSError, ValueError):
        return {}


def _write(path: Path, known: dict[str, tuple[str, ...]]) -> None:
    rows = "".join(f"{word}\t{' '.join(sounds)}\n" for word, sounds in known.items())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, rows.encode())
    except OSError as exc:
        log.warning("asr.pronunciations.not_written", extra={"path": str(path), "error": str(exc)})


WORDS = 60_000
HOMOPHONES = 6  # a node of flashlight's trie holds at most this many words
RIVAL_LOG10 = 1.0  # a word that is this much more probable is heard instead of its homophones
TABLE = "pronunciations.tsv.zst"
_ALL_S = 120.0  # timeout for reading all unigrams of a model
Sounds = tuple[str, ...]  # sounds of a word: IPA phonemes, or other labels
Spell = Callable[[str], Sequence[Sounds]]

# Maps ARPAbet, which CMU's dictionary uses, to labels of the acoustic model.
_PAIRS = (
    "AA:ɑ AE:æ AH:ə AO:ɔ AW:aʊ AY:aɪ B:b CH:t͡ʃ D:d DH:ð EH:ɛ ER:ɝ EY:eɪ F:f G:g HH:h IH:ɪ "
    "IY:i JH:d͡ʒ K:k L:l M:m N:n NG:ŋ OW:oʊ OY:ɔɪ P:p R:ɹ S:s SH:ʃ T:t TH:θ UH:ʊ UW:u V:v "
    "W:w Y:j Z:z ZH:ʒ"
)
_IPA = dict(pair.split(":") for pair in _PAIRS.split())


@dataclass(frozen=True, eq=False)
class LabelLexicon:
    """Words that can be recognised, most probable first.

    words          as the model spells them
    log10_unigram  (W,) log10 P of each word without context
    spellings      (index in `words`, acoustic labels without a word boundary); of words that sound
                   the same, only the likeliest `HOMOPHONES`, but words of phrases first
    log10_bonus    (W,) the most that phrases of the utterance add to each word; None: no phrases
    """

    words: tuple[str, ...]
    ids: NDArray[np.uint32]
    log10_unigram: NDArray[np.float32]
    spellings: tuple[tuple[int, tuple[int, ...]], ...]
    log10_bonus: NDArray[np.float64] | None = None


def model_lexicon(
    utterance: Utterance,
    labels: tuple[str, ...],
    *,
    limit: int = WORDS,
    tell: Tell | None = None,
    sounds: Mapping[str, Sequence[Sounds]] | None = None,
    spell: Spell | None = None,
) -> LabelLexicon:
    """Spells in `labels` the model's most probable words, and those of the utterance's phrases.

    Args    utterance  only its unigrams are used, which need no server
            limit      maximum number of words that can be spelled, besides those of phrases
            tell       gets a line if words need pronouncing first, or words of phrases lack sounds
            sounds     pronunciations of some words, used instead of the three sources; case matters
    Raises  ConfigError  no word has a pronunciation; `limit` is below 1; or `sounds` uses a
                         sound that is not in `labels`
    """
    if limit < 1:
        raise ConfigError(f"a lexicon of {limit} words was requested; expected 1 or more")
    label_ids = {label: place for place, label in enumerate(labels)}
    given = sounds or {}
    for sound in (sound for ways in given.values() for way in ways for sound in way):
        if sound not in label_ids:
            raise ConfigError(
                f"a pronunciation has the sound {sound!r}, which the acoustic model lacks; its "
                f"sounds are {', '.join(label for label in labels if not label.startswith('<'))}"
            )
    unigrams = list(_unigrams(utterance))
    phrases = utterance.phrases
    wanted = 0 if phrases is None else len(phrases.phrases.words)
    rest = [word for _, word, _ in unigrams if word not in given]
    spell = spell or _pronunciations(rest, limit + wanted, tell)
    ids: list[int] = []
    words: list[str] = []
    log10_probs: list[float] = []
    spellings: list[tuple[int, tuple[int, ...]]] = []
    heard: Counter[tuple[int, ...]] = Counter()
    others = 0
    for word_id, word, log10_prob in unigrams:
        ways = [
            tuple(label_ids[sound] for sound in sounds)
            for sounds in given.get(word, ()) or spell(word)
            if all(sound in label_ids for sound in sounds)
        ]
        if not ways:
            continue
        for way in dict.fromkeys(ways):
            heard[way] += 1
            if heard[way] <= HOMOPHONES:
                spellings.append((len(words), way))
        ids.append(word_id)
        words.append(word)
        log10_probs.append(log10_prob)
        others += phrases is None or not phrases.symbols[word_id]
        if others == limit:
            break
    if not words:
        shown = ", ".join(repr(word) for _, word, _ in unigrams[:3])
        raise ConfigError(
            f"none of the language model's {len(unigrams):,} words ({shown}, ...) can be spelled "
            "with the acoustic model's labels; expected a model of words, in the acoustic model's "
            "language"
        )
    numbers = np.array(ids, np.uint32)
    if phrases is not None and tell is not None:
        lost = wanted - int((phrases.symbols[numbers] > 0).sum())
        if lost:
            tell(f"no pronunciation for {counted(lost, 'word')} of the phrases; give their sounds")
        if rivals := _rivals(phrases.symbols[numbers] > 0, log10_probs, spellings):
            tell(
                f"{counted(rivals, 'word')} of the phrases sound like words that are over "
                f"{10**RIVAL_LOG10:g} times as likely in the model, which are heard instead: spell "
                "phrases as the model does (a model that writes mr hears mister as mr)"
            )
    return LabelLexicon(
        tuple(words),
        numbers,
        np.array(log10_probs, np.float32),
        tuple(spellings),
        None if phrases is None else phrases.lookahead(numbers),
    )


def _rivals(
    listed: NDArray[np.bool_],
    log10_probs: Sequence[float],
    spellings: Sequence[tuple[int, tuple[int, ...]]],
) -> int:
    """Counts the listed words that sound like a much more probable word that is not listed."""
    likeliest: dict[tuple[int, ...], float] = {}
    for place, way in spellings:
        if not listed[place]:
            likeliest[way] = max(log10_probs[place], likeliest.get(way, -np.inf))
    return len(
        {
            place
            for place, way in spellings
            if listed[place] and likeliest.get(way, -np.inf) > log10_probs[place] + RIVAL_LOG10
        }
    )


def _unigrams(utterance: Utterance) -> Iterator[tuple[int, str, float]]:
    """Yields id, word and log10 P of UTF-8 words: those of phrases, then the model's, most probable
    first. A word that the model lacks has the probability of the unknown word."""
    vocabulary, phrases = utterance.vocabulary, utterance.phrases
    every = utterance.next_words(utterance.null(), utterance.vocabulary_size, deadline_s=_ALL_S)
    first: set[int] = set()
    if phrases is not None:
        known = dict(every)
        for spelled in phrases.phrases.words:
            word_id = phrases.id_of(spelled)
            first.add(word_id)
            log10_prob = known[word_id if word_id in known else UNK_ID]
            with suppress(UnicodeDecodeError):
                yield word_id, spelled.decode(), float(log10_prob)
    for word_id, log10_prob in every:
        if word_id not in (UNK_ID, vocabulary.end_id) and word_id not in first:
            with suppress(UnicodeDecodeError):
                yield word_id, vocabulary.words[word_id].decode(), float(log10_prob)


def speller(pieces: Path | None = None) -> Spell:
    """Returns a function that spells a word as written, in upper and in lower case; in letters, or
    in pieces of the SentencePiece model at `pieces`. Raises what `Pieces.read` raises."""
    cut = tuple if pieces is None else Pieces.read(pieces).of_word
    return lambda word: [tuple(cut(way)) for way in (word, word.upper(), word.lower())]


def _pronunciations(words: Iterable[str], limit: int, tell: Tell | None) -> Spell:
    table, dictionary = read_table(), read_dictionary()
    found: dict[str, list[Sounds]] = {}
    missing = []
    for word in words:
        lower = word.lower()
        ways = [*([table[lower]] if lower in table else ()), *dictionary.get(lower, ())]
        if ways:
            found[lower] = ways
        elif lower.isascii() and lower.replace("'", "").isalpha():
            missing.append(lower)
        if len(found) + len(missing) >= limit:
            break
    found |= {word: [sounds] for word, sounds in pronounced(missing, tell).items()}
    return lambda word: found.get(word.lower(), ())


@cache
def read_table() -> Mapping[str, Sounds]:
    import pyarrow as pa

    packed = files("dlm").joinpath("data", TABLE).read_bytes()
    with pa.input_stream(io.BytesIO(packed), compression="zstd") as stream:
        lines = stream.read().decode().splitlines()
    return {word: tuple(sounds.split()) for word, sounds in (one.split("\t") for one in lines)}


@cache
def read_dictionary() -> Mapping[str, list[Sounds]]:
    import pocketsphinx

    found: dict[str, list[Sounds]] = {}
    path = Path(pocketsphinx.get_model_path("en-us/cmudict-en-us.dict"))
    for line in path.read_text(encoding="utf-8").splitlines():
        word, *sounds = line.split()
        found.setdefault(word.partition("(")[0], []).append(tuple(_IPA[s] for s in sounds))
    return found
