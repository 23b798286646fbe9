"""Turns a network of wordpieces into a source of words (FNG 6), without a topology of pieces.

A piece that starts with U+2581 begins a word, so a word has ended only when the next piece begins
another or the sentence ends. The end of a word is treated as a symbol whose probability is the sum
over all pieces that show the end, so that no word is a prefix of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts.count import Visit, WordMass, grown
from dlm.distill.sources import mass_kernels as kernels
from dlm.distill.sources.capitalize import CasedSource, Spellings, lower, spelling_generator
from dlm.distill.sources.network import NetworkSource
from dlm.errors import ConfigError
from dlm.estimate.columns import MISSING, ModelColumns
from dlm.federated.pieces.inventory import BEGIN, END, SPACE, UNKNOWN, Inventory
from dlm.federated.tokens import BOS_ID
from dlm.ngram.vocab import MARKS, UNK_ID, Vocabulary, is_mark
from dlm.units import counted

_ROOT = 0  # the node at the beginning of a sentence


class PieceSource:
    """A network of wordpieces as a source of words; ConfigError if the pieces spell no word.

    Args
        history     maximum words in a context of the topology
        cased       a model of cased text, whose spellings the words get (`capitalize`); the pieces
                    spell the words in lower case
    Fields
        vocabulary  marks, and the words of the topology that pieces can spell
        base        (v,) float64: prior probabilities of words, for those that no sample spells
    """

    def __init__(
        self,
        network: NetworkSource,
        words: Iterable[bytes],
        history: int,
        cased: ModelColumns | None = None,
    ) -> None:
        assert network.inventory is not None, "the network is one of words"
        if cased is not None:
            words = dict.fromkeys(map(lower, words))
        self.lexicon = Lexicon.of(network.inventory, words)
        self.vocabulary: Vocabulary = self.lexicon.vocabulary
        self.base = self.lexicon.base
        self._spellings = None
        if cased is not None:
            self._spellings = Spellings(self.vocabulary, cased)
            self.vocabulary = self._spellings.vocabulary
            self.base = self._spellings.spread(self.base)
            history = max(history, self._spellings.history)
        self.record = network.record
        self._network, self._history = network, history

    def visits(self, samples: int, seed: int) -> Iterator[WordMass]:
        reader = PieceReader(self.lexicon, self._history, self._spellings, seed)
        return map(reader.read, self._network.visits(samples, seed))


def in_words(
    network: NetworkSource,
    topology: ModelColumns | None,
    cased: ModelColumns | None,
    progress: Callable[[str], None],
) -> NetworkSource | CasedSource | PieceSource:
    """Makes a source of words from a network; a cased model gives their spellings. If the network
    predicts wordpieces, the words are those of the topology. ConfigError for wordpieces without a
    topology, or from `PieceSource`."""
    if network.inventory is None:
        return network if cased is None else CasedSource(network, cased)
    if topology is None:
        raise ConfigError(
            "a wordpiece network has no list of words; give a topology file, not `self` alone"
        )
    words = topology.vocabulary.words
    progress(
        f"spelling {counted(len(words), 'word')} with {counted(network.inventory.size, 'piece')}"
    )
    return PieceSource(network, words, topology.order - 1, cased)


class PieceReader:
    """Turns each visit of pieces into a visit of words.

    When spelling has reached a node, the probability of ending there goes to the word that ends at
    this node, or to `<unk>` if no word does. `<unk>` also gets the probability of leaving
    the lexicon. `</s>` and words outside the lexicon come after the word has ended, so their
    probability is counted after the history that ends with this word.

    With cased `spellings`, a word's mass is split over its spellings, and the spellings of
    words in histories are drawn with `seed`.

    Guarantees
        a word's expected mass is the network's probability of it, summed over all its
        segmentations; a history's visits are the mass of all words after it
    """

    def __init__(
        self, lexicon: Lexicon, history: int, spellings: Spellings | None = None, seed: int = 0
    ) -> None:
        self._lexicon, self._length = lexicon, max(history, 1)
        self._spellings = spellings
        self._random = spelling_generator(seed)
        # For each place: the node of the word being spelled, the words before this word, and the
        # word that will have ended if the next piece begins another.
        self._node = np.zeros(0, np.int64)
        self._window = np.zeros((0, self._length), np.uint32)
        self._ending = np.zeros(0, np.uint32)

    def read(self, visit: Visit) -> WordMass:
        lexicon, vocabulary, places = self._lexicon, self._lexicon.vocabulary, visit.places
        rows = int(places[-1]) + 1
        self._node = grown(self._node, rows, _ROOT)
        self._window = grown(self._window, rows, MISSING)
        self._ending = grown(self._ending, rows, UNK_ID)
        pieces = visit.words.astype(np.int64)
        at, here = self._node[places], self._window[places]
        begins = visit.words == BOS_ID
        at[begins] = _ROOT
        here[begins] = MISSING
        # Marks have the same ids in both vocabularies.
        here[begins, -1] = vocabulary.begin_id
        over = lexicon.begins_word[pieces] & (at != _ROOT)
        here[over] = pushed(here[over], self._ending[places][over])
        at = np.where(begins, _ROOT, lexicon.walk(at, pieces))
        inside = at != _ROOT
        said = np.where(at > _ROOT, lexicon.word_at[np.maximum(at, _ROOT)], UNK_ID)
        ending = said.astype(np.uint32)
        if self._spellings is not None:
            ending = self._spellings.draw(here, ending, self._random)
        after = np.where(inside[:, None], pushed(here, ending), here)
        self._node[places], self._window[places], self._ending[places] = at, here, ending
        entering, unknown, ends, out = lexicon.split(visit.given, at).T
        each = np.arange(len(at))
        given = WordMass.of(
            np.concatenate([here, after]),
            [
                (each, said, np.where(at > _ROOT, entering + unknown + ends, 0.0)),
                (each, UNK_ID, np.where(inside, out, 0.0)),
                (each + len(at), vocabulary.end_id, ends),
                # If the first piece of a sentence begins no word, it also counts as <unk>.
                (each + len(at), UNK_ID, unknown + np.where(inside, 0.0, out)),
            ],
            int(begins.sum()),
        )
        return given if self._spellings is None else self._spellings.split_mass(given)


def pushed(histories: NDArray[np.uint32], words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return np.concatenate([histories[:, 1:], words[:, None]], axis=1)


@dataclass(frozen=True, eq=False)
class Lexicon:
    """The words that wordpieces spell: a tree of their characters, with pieces as the arcs.

    A node stands for the letters that a word begins with, whatever pieces they are cut into. With
    the end of a word as a separate symbol, this is the transducer M of FNG 6: it is deterministic,
    and each word is produced at one node by one symbol, its end.

    Shapes, v pieces, n nodes (node 0 is the root, before a word), a arcs
        kind       (v,)      uint8  what a piece does to a word: `mass_kernels.GOES_ON` and so on
        enters     (v,)      int64  the node after a piece that begins a word, or OUTSIDE
        begin      (n + 1,)  int64  arcs of node i are begin[i]:begin[i + 1]
        arc_piece  (a,)      int64  increasing within a node
        arc_node   (a,)      int64  the node after the arc
        word_at    (n,)      int64  the word that ends at a node; 0 (<unk>) if none does
        base       (w,)      float64  half a uniform share, half the unigram probability of the
                             word's pieces (Kudo 2018), which alone would make rare words nearly
                             impossible; sums to 1 over words; 0 for marks
    """

    vocabulary: Vocabulary
    kind: NDArray[np.uint8]
    enters: NDArray[np.int64]
    begin: NDArray[np.int64]
    arc_piece: NDArray[np.int64]
    arc_node: NDArray[np.int64]
    word_at: NDArray[np.int64]
    base: NDArray[np.float64]

    @classmethod
    def of(cls, inventory: Inventory, words: Iterable[bytes]) -> Lexicon:
        """Makes a lexicon of the words that an inventory spells; ConfigError if it spells none."""
        ln_piece = inventory.log_probabilities()
        spelled: list[str] = []
        ln_words: list[float] = []
        for word in words:
            text = _text(word)
            if text is None or is_mark(word):
                continue
            cut = inventory.encode_word(text)
            if cut and UNKNOWN not in cut and inventory.decode(cut) == [text]:
                spelled.append(text)
                ln_words.append(float(ln_piece[cut].sum()))
        if not spelled:
            raise ConfigError(
                "the wordpieces spell no word of the topology; give a topology in the language, "
                "spelling and case of the text that the wordpieces were made from"
            )
        vocabulary = Vocabulary([*MARKS, *(w.encode() for w in spelled)], unk_in_model=True)
        likely = np.exp(np.array(ln_words) - max(ln_words))
        shares = (likely / likely.sum() + 1 / len(likely)) / 2
        base = np.concatenate([np.zeros(len(MARKS)), shares])
        return cls(vocabulary, *_tree(inventory.pieces(), spelled), base)

    @property
    def begins_word(self) -> NDArray[np.bool_]:
        """(v,) bool: which pieces begin a word."""
        return np.isin(self.kind, (kernels.BEGINS, kernels.BEGINS_UNKNOWN))

    def walk(self, nodes: NDArray[np.int64], pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the node after each piece, given the node before that piece, or `OUTSIDE`."""
        arcs = self.begin, self.arc_piece, self.arc_node
        out: NDArray[np.int64] = kernels.walk(nodes, pieces, self.kind, self.enters, *arcs)
        return out

    def split(self, given: NDArray[np.floating], nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        out = np.empty((len(given), 4))
        exact = np.ascontiguousarray(given, np.float64)
        kernels.split_mass(exact, nodes, self.kind, self.begin, self.arc_piece, out)
        return out


def _text(word: bytes) -> str | None:
    try:
        return word.decode()
    except UnicodeDecodeError:
        return None


def _tree(
    pieces: list[str], words: list[str]
) -> tuple[
    NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64],
    NDArray[np.int64],
]:  # fmt: skip
    nodes = {"": 0}
    word_at = {}
    for word, text in enumerate(words, len(MARKS)):
        marked = SPACE + text
        for end in range(1, len(marked) + 1):
            nodes.setdefault(marked[:end], len(nodes))
        word_at[nodes[marked]] = word
    ids = {piece: i for i, piece in enumerate(pieces) if i not in (UNKNOWN, BEGIN, END)}
    longest = max(map(len, ids), default=0)
    enters = np.full(len(pieces), kernels.OUTSIDE, np.int64)
    arcs: list[tuple[int, int, int]] = []
    for text, node in nodes.items():
        for start in range(max(0, len(text) - longest), len(text)):
            piece = ids.get(text[start:])
            if piece is None:
                continue
            if start == 0:
                enters[piece] = node
            else:
                arcs.append((nodes[text[:start]], piece, node))
    kind = np.full(len(pieces), kernels.GOES_ON, np.uint8)
    for name, i in ids.items():
        if name.startswith(SPACE):
            known = enters[i] != kernels.OUTSIDE
            kind[i] = kernels.BEGINS if known else kernels.BEGINS_UNKNOWN
    kind[BEGIN], kind[END] = kernels.NEVER, kernels.ENDS
    table = np.array(sorted(arcs), np.int64).reshape(-1, 3)
    begin = np.searchsorted(table[:, 0], np.arange(len(nodes) + 1))
    ends = np.zeros(len(nodes), np.int64)
    ends[list(word_at)] = list(word_at.values())
    return (
        kind, enters, begin.astype(np.int64), np.ascontiguousarray(table[:, 1]),
        np.ascontiguousarray(table[:, 2]), ends,
    )  # fmt: skip
