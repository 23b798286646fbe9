"""Users of a data set, split; public text of the same language; the words of all models.

Text is lower-cased and holds letters and apostrophes alone; a line is a sentence. A user has at
most `CAP` words, of which devices and the centralised models see the same.

- `mixed`: all English users, and books.
- `en`: people who spoke before the Supreme Court, and Wikipedia.
- `pt`: speeches of deputies in summaries, and hearings in the Senate.
- `ru`: characters of plays; those of a third of the plays are the public text.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workload import lines_of

DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
# Words of a user: those with fewer are left out, the rest is cut. Portuguese users say less.
LEAST = {"mixed": 400, "en": 200, "pt": 30, "ru": 100}
CAP = 400
WORDS, PIECES = 2_000, 1_000
HELD_OUT = {"mixed": 0.025, "en": 0.1, "pt": 0.1, "ru": 0.1}  # share of the users
PUBLIC_WORDS = 3_000_000
MIXED = "scotus_oyez ubuntu_irc swda earnings21 earnings22 shakespeare_characters"
# Whose text, and the text of others whose n-grams are the external topology.
SETS = {
    "mixed": (MIXED, "text/gutenberg"),
    "en": ("scotus_oyez", "text/wikipedia_en"),
    "pt": ("ptbr_camara_sumarios", "users/ptbr_cpi_senado"),
    "ru": ("ru_drama_characters", "users/ru_drama_characters"),
}
# After a word of three letters or more: not after Mr. or Dr.
SENTENCE_END = re.compile(r"(?<=[^\W\d_]{3}[.!?])\s+")
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")


@dataclass(frozen=True)
class LanguageFiles:
    """Where the files of a data set are: `folder` has its name."""

    folder: Path

    @property
    def users(self) -> Path:
        """All users."""
        return self.folder / "users.tsv"

    @property
    def train(self) -> Path:
        """Users who train: their text is what the centralised models are made of."""
        return self.folder / "train.tsv"

    @property
    def held_out(self) -> Path:
        """Users whom models are judged by."""
        return self.folder / "heldout.tsv"

    @property
    def text(self) -> Path:
        """The text of `train`, without the users."""
        return self.folder / "train.txt"

    @property
    def public(self) -> Path:
        """Text of nobody among the users."""
        return self.folder / "public.txt"

    @property
    def facts(self) -> Path:
        """How much there is of all this, written last."""
        return self.folder / "facts.json"

    @property
    def baseline(self) -> Path:
        """What the model of the users' text was judged to be."""
        return self.folder / "baseline.json"

    @property
    def counts(self) -> Path:
        """How often users say each word of the public text: `dlm unigrams`."""
        return self.folder / "counts.tsv"

    @property
    def words(self) -> Path:
        """The most frequent of these."""
        return self.folder / "words.txt"

    @property
    def pieces(self) -> Path:
        """Wordpieces of the counts: `dlm pieces`."""
        return self.folder / "pieces.model"

    def run(self, network: str, seed: int) -> Path:
        """The run of a network."""
        return self.folder / "runs" / f"{re.sub('[^a-z0-9.]+', '-', network.lower())}-{seed}"

    def arpa(self, model: str) -> Path:
        """An n-gram model."""
        return self.folder / "models" / f"{model}.arpa"


def sentences(text: str) -> Iterator[list[str]]:
    """The words of each sentence, in their spelling."""
    plain = text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    for part in SENTENCE_END.split(plain):
        if words := WORD.findall(part):
            yield words


def _is_public(user: str) -> bool:
    """Whether a play, of whose characters some are users, is public text."""
    return zlib.crc32(user.split("#")[0].encode()) % 3 == 0


def _user_rows(name: str) -> Iterator[tuple[str, str]]:
    """(user, what they said)"""
    rows = (line.rstrip("\n").split("\t") for line in lines_of(DATA / f"users/{name}.tsv.zst"))
    header = next(rows)
    user, text = header.index("user_id"), header.index("utterance")
    for row in rows:
        yield row[user], row[text]


def _users(language: str) -> Iterator[tuple[str, list[list[str]]]]:
    """The first `CAP` words of each user who has enough, as sentences."""
    said: dict[str, list[list[str]]] = {}
    for name in SETS[language][0].split():
        for user, text in _user_rows(name):
            if language != "ru" or not _is_public(user):
                said.setdefault(f"{name}:{user}", []).extend(sentences(text))
    for user, all_of_them in said.items():
        if sum(map(len, all_of_them)) < LEAST[language]:
            continue
        left, kept = CAP, []
        for words in all_of_them:
            if left <= 0:
                break
            kept.append(words[:left])
            left -= len(words)
        yield user, kept


def _public(language: str) -> Iterator[list[str]]:
    kind, name = SETS[language][1].split("/")
    texts = (
        (text for user, text in _user_rows(name) if language != "ru" or _is_public(user))
        if kind == "users"
        else lines_of(DATA / f"text/{name}.txt.zst")
    )
    left = PUBLIC_WORDS
    for text in texts:
        for words in sentences(text):
            if len(words) > 1:
                yield words
                left -= len(words)
        if left <= 0:
            return


def write_texts(files: LanguageFiles) -> dict[str, Any]:
    """Users' text, split by users, and public text; how much there is of each."""
    from dlm.federated.users import UserDataset

    language = files.folder.name
    files.folder.mkdir(parents=True, exist_ok=True)
    with files.users.open("w", encoding="utf-8") as out:
        out.write("user_id\tutterance\n")
        for user, said in _users(language):
            out.writelines(f"{user}\t{' '.join(words).lower()}\n" for words in said)
    whole = UserDataset.open(files.users)
    sides = whole.split(HELD_OUT[language])
    for file, side in zip((files.train, files.held_out), sides, strict=True):
        with file.open("w", encoding="utf-8") as out:
            out.write("user_id\tutterance\n")
            for place, user in enumerate(side.user_ids()):
                out.writelines(f"{user}\t{text}\n" for text in side.utterances(place))
    with files.text.open("w", encoding="utf-8") as out:
        for place in range(len(sides[0])):
            out.writelines(f"{text}\n" for text in sides[0].utterances(place))
    with files.public.open("w", encoding="utf-8") as out:
        out.writelines(f"{' '.join(words).lower()}\n" for words in _public(language))
    return {
        "digest": whole.digest[:12],
        "users": [len(side) for side in sides],
        "words": [int(side.word_counts().sum()) for side in sides],
        "public_words": sum(len(line.split()) for line in files.public.open(encoding="utf-8")),
    }


def write_words(files: LanguageFiles) -> dict[str, Any]:
    """The words of all models, and wordpieces, from counts of users' words (FNG 3, 6)."""
    from dlm.federated.counting.count_unigrams import count_unigrams
    from dlm.federated.counting.settings import CollectionSettings
    from dlm.federated.pieces.inventory import build_inventory
    from dlm.federated.users import UserDataset
    from dlm.record.counts_file import read_counts

    listed = {word for line in files.public.open(encoding="utf-8") for word in line.split()}
    wordlist = files.folder / "wordlist.txt"
    wordlist.write_text("".join(f"{word}\n" for word in sorted(listed)), encoding="utf-8")
    users = len(UserDataset.open(files.train))
    if not files.counts.exists():
        count_unigrams(
            lambda store: UserDataset.open(files.train, store=store),
            wordlist,
            files.counts,
            CollectionSettings(
                clip=1_000, rounds=1, report_goal=users, seed=0, tokenizer="whitespace"
            ),
        )
    counts = read_counts(files.counts)
    chosen = counts.words[:WORDS]
    files.words.write_text("".join(f"{word}\n" for word in chosen), encoding="utf-8")
    inventory = build_inventory(counts, PIECES)
    inventory.save(files.pieces)
    known, said = set(chosen), 0
    unknown = 0
    for line in files.held_out.open(encoding="utf-8"):
        words = line.rstrip("\n").split("\t")[1].split()
        said += len(words)
        unknown += sum(word not in known for word in words)
    return {
        "counted_words": len(counts.words),
        "pieces_per_word": inventory.pieces_per_word(counts),
        "oov_percent": 100 * unknown / said,
    }
