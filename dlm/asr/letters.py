"""Letters to sounds: pronunciations of words in no dictionary, as the acoustic model learnt them.

The network is in the package hama. A word takes some 3 ms, so pronunciations are kept in the cache
folder, in a file that is replaced whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from dlm.client.config.settings import default_cache_dir
from dlm.files import write_whole
from dlm.logs import EventLog
from dlm.progress import ProgressReporter, Tell
from dlm.units import counted

log = EventLog(__name__)

LONGEST = 32  # letters; the network makes 32 phonemes at most


def pronounced(words: Iterable[str], tell: Tell | None = None) -> dict[str, tuple[str, ...]]:
    """The sounds of each word, in lower case; leaves out words longer than `LONGEST`.

    A cache folder that cannot be written only costs time.
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

    Some belong to another language ("radio" is "r a ð ̞ j o"): the acoustic model was trained
    with the same network and hears them in English too. Without them, word errors are 0.4 points
    higher.
    """
    from hama import G2PModel
    from hama.tokenizer import TextTokenizer

    model = G2PModel()
    # The package rebuilds this dictionary for each letter and pads each word to 128 letters, which
    # takes ten times as long for the same sounds.
    vocabulary = SimpleNamespace(encoder_token_to_id=dict(model.vocab.encoder_token_to_id))
    for word in words:
        model.tokenizer = TextTokenizer(vocabulary, max_input_len=len(word))
        sounds = (one.phoneme for one in model.predict(word).alignments)
        yield word, tuple(sound for sound in sounds if sound.strip())


def _read(path: Path) -> dict[str, tuple[str, ...]]:
    """Earlier pronunciations; none if the file is not in the format of `_write`."""
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
