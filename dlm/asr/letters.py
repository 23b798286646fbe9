"""Letters to sounds: how words that no dictionary has are pronounced, as the acoustic model learnt.

The network is that of the package hama. A word takes some 3 ms, so that what was pronounced once is
kept in the cache folder, whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from dlm.client.api.config import default_cache_dir
from dlm.files import write_whole
from dlm.logs import EventLog
from dlm.progress import ProgressReporter, Tell
from dlm.units import counted

log = EventLog(__name__)

LONGEST = 32  # letters; the network makes 32 phonemes at most


def pronounced(words: Iterable[str], tell: Tell | None = None) -> dict[str, tuple[str, ...]]:
    """The sounds of each word, in lower case; nothing of words longer than `LONGEST`.

    Args  tell  takes lines that say how far it is, where that takes more than a few seconds
    Guarantees  a cache folder that cannot be written costs time and nothing else
    """
    path = default_cache_dir() / f"pronunciations-{version('hama')}.tsv"
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
    """Each word and its sounds.

    Some are those of another language ("radio" is "r a ð ̞ j o"). The acoustic model learnt from
    the same network, and hears them in English, too: 0.4 points of word errors more without.
    """
    from hama import G2PModel
    from hama.tokenizer import TextTokenizer

    model = G2PModel()
    # The package makes this dictionary anew for each letter, and pads each word to 128 letters,
    # which takes ten times as long for the same sounds.
    vocabulary = SimpleNamespace(encoder_token_to_id=dict(model.vocab.encoder_token_to_id))
    for word in words:
        model.tokenizer = TextTokenizer(vocabulary, max_input_len=len(word))
        sounds = (one.phoneme for one in model.predict(word).alignments)
        yield word, tuple(sound for sound in sounds if sound.strip())


def _read(path: Path) -> dict[str, tuple[str, ...]]:
    """What was pronounced before; nothing of a file that is not as `_write` makes it."""
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
