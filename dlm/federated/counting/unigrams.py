"""Counts how often people use each word of a list, over rounds of devices (FNG 3).

A device counts the words of a public list in its own text and weights its counts by L1 clipping.
Only sums over a round are kept; with a noise multiplier they get Gaussian noise first (discrete, on
their grid), and everything that is reported later is computed from the released sums. Without
noise, neither the counts nor anything built from them has a guarantee.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.federated.counting.convergence import (
    Moments,
    new_word_rate,
    on_grid,
    rounds_between_new,
    z_between_rounds,
    z_statistic,
)
from dlm.federated.counting.settings import UnigramConfig
from dlm.federated.keys import Key
from dlm.federated.users import UserDataset, words_of

Floats = npt.NDArray[np.float64]
STEP_BITS = 40  # lambda is at most 2^STEP_BITS steps of a round's sum
NOISED_STEP_BITS = 32  # like STEP_BITS, for a noised sum, which is in double precision
# Sums over this many users fit in 64 bits or, if noised, in a double without rounding.
MOST_DEVICES = {STEP_BITS: 1 << (62 - STEP_BITS), NOISED_STEP_BITS: 1 << (53 - NOISED_STEP_BITS)}
# A user's counts: distinct indexes into the list of words, and the count at each index.
Counts = tuple[npt.NDArray[np.int64], Floats]
Split = Callable[[str], list[str]]


@dataclass(frozen=True)
class RoundMetrics:
    """The figures reported about a round; with noise, from released counts only."""

    round: int  # number of rounds so far, this one included
    words_seen: int
    new_words: int
    new_word_rate: float  # share of the last rounds that had a new word
    rounds_between_new: float
    # Convergence, for rounds `on_grid`: Z between the two halves of the rounds, with variances
    # estimated between rounds, with the paper's (Poisson) variances, and nested as in FNG.
    z: float | None = None
    z_poisson: float | None = None
    z_nested: float | None = None


@dataclass(frozen=True)
class UnigramState:
    """The state between rounds: moments of the released rounds; the words seen so far, (words,)
    bool; and moments after at most three rounds, for later comparisons."""

    round: int
    moments: Moments
    seen: npt.NDArray[np.bool_]
    snapshots: Mapping[int, Moments] = field(default_factory=dict)
    history: tuple[RoundMetrics, ...] = ()

    @property
    def totals(self) -> Floats:
        return self.moments.total


def init(config: UnigramConfig, words: int) -> UnigramState:
    if words < 1:
        raise ConfigError("the list of words is empty; give one or more words")
    return UnigramState(0, Moments.zero(words), np.zeros(words, bool))


def count_words(words: Iterable[str], index: Mapping[str, int]) -> Counts:
    """Returns C_i: how often a user's text has each listed word; leaves out other words."""
    found = Counter(place for word in words if (place := index.get(word)) is not None)
    places = np.fromiter(found.keys(), np.int64, len(found))
    order = np.argsort(places)
    return places[order], np.fromiter(found.values(), np.float64, len(found))[order]


def weight(counts: Floats, clip: float) -> float:
    """Returns w_i = lambda / max(lambda, sum C_i), FNG equation 1."""
    total = float(counts.sum())
    return 1.0 if total <= clip else clip / total


def step_bits(config: UnigramConfig) -> int:
    return STEP_BITS if config.noise_multiplier is None else NOISED_STEP_BITS


def round_sum(users: Iterable[Counts], clip: float, words: int, *, bits: int = STEP_BITS) -> Floats:
    """Returns the sum of w_i C_i over a round's devices, with one device in memory at a time.

    `bits` is `STEP_BITS`, or `NOISED_STEP_BITS` for a sum that `apply` adds noise to. The sum is of
    integers: a device's counts are truncated to steps of lambda 2^-bits, so that a device moves the
    sum by lambda at most, whoever else is counted.

    Raises  PrivacyError  the sum over all devices may not fit in 64 bits, or in a double
    """
    scale = _scale(clip, bits)
    most = MOST_DEVICES[bits]
    total = np.zeros(words, np.int64)
    for device, (places, counts) in enumerate(users):
        if device >= most:
            raise PrivacyError(
                f"a round has more than {most:,} devices, so their 64-bit sum could overflow or be "
                "rounded; lower the report goal, or the probability of Poisson sampling"
            )
        # A weight below 1 is lowered by more than rounding can raise the products.
        w = weight(counts, clip)
        steps = np.floor(counts * (w if w == 1.0 else w * (1 - 2.0**-50)) * scale)
        total[places] += steps.astype(np.int64)
    return total / scale


def _scale(clip: float, bits: int) -> float:
    """Returns the steps per count: a power of two, so scaling is exact; 1 without clipping."""
    return 1.0 if math.isinf(clip) else 2.0 ** (bits - math.frexp(clip)[1])


def steps_per_count(config: UnigramConfig) -> float:
    return _scale(config.clip, step_bits(config))


def seen_threshold(config: UnigramConfig, rounds: int, words: int) -> float:
    """The sum above which a word counts as seen: 0 without noise, otherwise a value that noise
    alone exceeds for half a word of the list, on average."""
    if config.noise_multiplier is None:
        return 0.0
    sigma = config.noise_std * math.sqrt(rounds)
    return sigma * NormalDist().inv_cdf(1 - 0.5 / max(words, 2))


def apply(
    state: UnigramState,
    config: UnigramConfig,
    clipped_sum: Floats,
    key: Key,
) -> UnigramState:
    """Returns the state after a round, whose clipped sum is noised here and then dropped. Pure.

    With noise, `clipped_sum` is on the grid of `NOISED_STEP_BITS`, and the new state depends on
    users only through `clipped_sum` + noise. The noise is drawn from the key, folded with
    ("unigrams", "noise", round).
    """
    if state.round >= config.rounds:
        raise ConfigError(
            f"all {config.rounds} rounds are done, and the privacy account covers no further "
            "rounds; start another count with more rounds"
        )
    words = len(state.totals)
    if clipped_sum.shape != (words,):
        raise ConfigError(f"a round's sum has the shape {clipped_sum.shape}; expected ({words},)")
    released = clipped_sum
    if config.noise_multiplier is not None:
        name = key.fold("unigrams", "noise", state.round)
        released = _with_noise(clipped_sum, config, name)
    done = state.round + 1
    # Noise drowns the sum of a noised round, so all noised rounds count as equally large. They
    # nearly are if cohorts have similar sizes, since a user adds at most lambda.
    moments = state.moments.plus(released, None if config.noise_multiplier is None else 1.0)
    now_seen = moments.total > seen_threshold(config, done, words)
    new = int((now_seen & ~state.seen).sum())
    seen = state.seen | now_seen
    news = [*(m.new_words for m in state.history), new][-config.window :]
    metrics = RoundMetrics(
        done,
        int(seen.sum()),
        new,
        new_word_rate(news, config.window),
        rounds_between_new(news, config.window),
    )
    snapshots = dict(state.snapshots)
    if on_grid(done):
        if done % 2 == 0:
            half = snapshots[done // 2]
            z, poisson, nested = _z_of_halves(half, moments, done, now_seen)
            metrics = dataclasses.replace(metrics, z=z)
            if config.noise_multiplier is None:  # noised counts are far from Poisson
                metrics = dataclasses.replace(metrics, z_poisson=poisson, z_nested=nested)
            snapshots = {k: kept for k, kept in snapshots.items() if k > done // 2}
        snapshots[done] = moments
    return UnigramState(done, moments, seen, snapshots, (*state.history, metrics))


def _with_noise(clipped_sum: Floats, config: UnigramConfig, key: Key) -> Floats:
    # Imported here, since counts without noise need neither numba nor a cipher.
    from dlm.federated.noise.discrete_gaussian import draw_discrete, whole_deviation

    scale = steps_per_count(config)
    steps = np.rint(clipped_sum * scale).astype(np.int64)
    deviation = whole_deviation(config.noise_std * scale)
    return (steps + draw_discrete(key, [(len(steps), deviation)])) / scale


def _z_of_halves(
    half: Moments, whole: Moments, rounds: int, used: npt.NDArray[np.bool_]
) -> tuple[float | None, float, float]:
    """Returns (Z, Poisson Z, nested Z) of the two halves of the rounds, over `used` words."""
    first, second = half.at(used), whole.minus(half).at(used)
    return (
        z_between_rounds(first, second, rounds // 2) if rounds >= 4 else None,
        z_statistic(first.total, second.total),
        z_statistic(first.total, first.total + second.total),
    )


class UserCounts:
    """Each user's counts of a list's words, kept between rounds as far as memory allows."""

    def __init__(
        self,
        dataset: UserDataset,
        wordlist: Sequence[str],
        *,
        cap_words: int | None = None,
        split: Split = words_of,
        cache_bytes: int = 128 << 20,
    ):
        self._dataset, self._cap, self._split = dataset, cap_words, split
        self._index = {word: place for place, word in enumerate(wordlist)}
        if len(self._index) != len(wordlist):
            raise ConfigError(
                "the word list has duplicates, which would split their counts; list each word once"
            )
        self._cache: dict[int, Counts] = {}
        self._cache_room_bytes = cache_bytes

    def of(self, user: int) -> Counts:
        found = self._cache.get(user)
        if found is None:
            text = self._dataset.words(user, cap=self._cap, split=self._split)
            found = count_words(text, self._index)
            size = 16 * len(found[0]) + 200
            if size <= self._cache_room_bytes:
                self._cache_room_bytes -= size
                self._cache[user] = found
        return found


def read_wordlist(path: str | Path, content: bytes | None = None) -> list[str]:
    """Reads the words of a list (or of its `content`): the first field of each line, in order.
    Raises FormatError for an empty list, a duplicate word, a line without a word, or text that is
    not UTF-8."""
    words: list[str] = []
    content = Path(path).read_bytes() if content is None else content
    try:
        with io.StringIO(content.decode("utf-8-sig"), newline="\n") as file:
            for number, line in enumerate(file, 1):
                word = line.rstrip("\r\n").split("\t")[0].strip()
                if not word:
                    raise FormatError(f"{path}, line {number} has no word; remove the line")
                words.append(word)
    except UnicodeDecodeError as exc:
        raise FormatError(f"{path} is not UTF-8: {exc}. Convert the file (iconv -t UTF-8)") from exc
    if not words:
        raise FormatError(f"{path} lists no words; expected one per line")
    if len(set(words)) != len(words):
        twice = next(word for word, n in Counter(words).items() if n > 1)
        raise FormatError(f"{path} lists {twice!r} twice; expected each word once")
    return words


def oov_counts(
    dataset: UserDataset, vocabulary: Iterable[str], *, split: Split = words_of
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns (words outside the vocabulary, all words) of each user."""
    known = frozenset(vocabulary)
    out = np.zeros(len(dataset), np.int64)
    total = np.zeros(len(dataset), np.int64)
    for user in range(len(dataset)):
        text = dataset.words(user, split=split)
        total[user] = len(text)
        out[user] = sum(word not in known for word in text)
    return out, total


@dataclass(frozen=True)
class OovRate:
    """Percentages of words outside the vocabulary, for users with any words: `of_words`, of all
    words together; `of_users`, the mean over users, with its standard `error`."""

    users: int
    of_words: float
    of_users: float
    error: float


def oov_rate(
    dataset: UserDataset, vocabulary: Iterable[str], *, split: Split = words_of
) -> OovRate | None:
    """The OOV rate of a dataset's users; None if they used no words."""
    out, total = oov_counts(dataset, vocabulary, split=split)
    spoke = total > 0
    if not spoke.any():
        return None
    rates = 100 * out[spoke] / total[spoke]
    return OovRate(
        len(rates),
        float(100 * out.sum() / total.sum()),
        float(rates.mean()),
        float(np.std(rates)) / math.sqrt(len(rates)),
    )


def config_dict(config: UnigramConfig) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    return {k: "inf" if v == math.inf else v for k, v in values.items()}
