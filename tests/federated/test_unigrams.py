"""Counts of a list of words over rounds of devices: clipped, noised, and known to have settled."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

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
from dlm.federated.counting.unigrams import (
    NOISED_STEP_BITS,
    UserCounts,
    apply,
    init,
    oov_counts,
    read_wordlist,
    round_sum,
    seen_threshold,
)
from dlm.federated.keys import Key
from dlm.federated.users import UserDataset
from federated.corpus import WORDS, population, top_words

KEY = Key.from_seed(21)


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> UserDataset:
    """300 users."""
    return population(tmp_path_factory.mktemp("people"))


def plain_sum(people: UserDataset, users: list[int], clip: float) -> dict[str, float]:
    """FNG equation 1 as it is printed, over dictionaries."""
    total: dict[str, float] = dict.fromkeys(WORDS, 0.0)
    for user in users:
        counts = Counter(word for word in people.words(user) if word in total)
        w = clip / max(clip, sum(counts.values())) if clip != math.inf else 1.0
        for word, count in counts.items():
            total[word] += w * count
    return total


@pytest.mark.parametrize("clip", [1.0, 25.0, 1000.0, math.inf])
def test_a_round_is_the_sum_of_clipped_counts(people: UserDataset, clip: float) -> None:
    """Against the plain form."""
    users = [3, 1, 4, 15, 92, 65]
    counts = UserCounts(people, WORDS)
    found = round_sum(map(counts.of, users), clip, len(WORDS))
    plain = plain_sum(people, users, clip)
    step = 0.0 if math.isinf(clip) else len(users) * clip * 2.0**-39
    np.testing.assert_allclose(found, [plain[word] for word in WORDS], rtol=1e-12, atol=step)


def released(config: UnigramConfig, rounds: int, key: Key, words: int = 500) -> np.ndarray:
    """The released rounds of empty cohorts."""
    state, found = init(config, words), []
    for _ in range(rounds):
        after = apply(state, config, np.zeros(words), key)
        found.append(after.totals - state.totals)
        state = after
    return np.array(found)


def test_noise_has_the_claimed_standard_deviation_and_rounds_are_independent() -> None:
    """The right sigma is accepted, 2 % off is rejected (chi-squared), as is noise used twice."""
    config = UnigramConfig(7.0, 200, noise_multiplier=3.0)
    noise = released(config, 200, KEY)
    n = noise.size

    def off(sigma: float) -> float:
        return float(abs((noise**2).sum() / sigma**2 - n) / math.sqrt(2 * n))

    assert config.noise_std == 21.0
    assert off(21.0) < 5
    assert off(21.0 * 1.02) > 5
    assert off(21.0 / 1.02) > 5
    assert abs((noise[:-1] * noise[1:]).mean()) < 5 * 21.0**2 / math.sqrt(n)
    assert len({tuple(row[:3]) for row in noise.tolist()}) == 200
    np.testing.assert_array_equal(noise[:5], released(config, 5, KEY))
    other = released(config, 5, Key.from_seed(22))
    assert not np.array_equal(noise[:5], other)


def test_noise_is_on_the_grid_of_the_sum_that_it_meets() -> None:
    """Whole steps of 2^-32 of lambda, rounded up to a power of two, as the clipped counts are."""
    config = UnigramConfig(7.0, 1, noise_multiplier=3.0)
    users = [(np.array([0, 2]), np.array([5.0, 9.0])), (np.array([1]), np.array([3.0]))]
    summed = round_sum(users, 7.0, 3, bits=NOISED_STEP_BITS)
    after = apply(init(config, 3), config, summed, KEY)
    for numbers in (summed, after.totals):
        steps = numbers * 2.0**29
        assert np.array_equal(steps, np.rint(steps))
    assert np.linalg.norm(round_sum(users[:1], 7.0, 3, bits=NOISED_STEP_BITS)) <= 7.0
    assert len({*(after.totals * 2.0**29 % 2).tolist()}) == 2


def test_without_noise_counts_are_exact_and_rounds_are_bounded() -> None:
    """And a state is not changed by what follows it."""
    config = UnigramConfig(5.0, 2)
    first = apply(init(config, 3), config, np.array([1.0, 0.0, 2.0]), KEY)
    second = apply(first, config, np.array([0.0, 4.0, 2.0]), KEY)
    assert first.totals.tolist() == [1.0, 0.0, 2.0]
    assert second.totals.tolist() == [1.0, 4.0, 4.0]
    assert [(m.words_seen, m.new_words) for m in second.history] == [(2, 2), (3, 1)]
    with pytest.raises(ConfigError, match="all 2 rounds are done"):
        apply(second, config, np.zeros(3), KEY)
    with pytest.raises(ConfigError, match=r"shape .*4.*3"):
        apply(first, config, np.zeros(4), KEY)


def test_what_noise_alone_would_show_is_not_counted_as_seen() -> None:
    """At most about one word of a list appears out of nothing."""
    config = UnigramConfig(10.0, 64, noise_multiplier=2.0)
    state = init(config, 5000)
    signal = np.zeros(5000)
    signal[:100] = 60.0
    for _ in range(64):
        state = apply(state, config, signal, KEY)
    now = state.totals > seen_threshold(config, 64, 5000)
    assert now[:100].all()
    assert now[100:].sum() <= 4
    # Ever seen adds up what each round may show.
    assert state.seen[100:].sum() <= 40


def test_z_is_the_papers_formula() -> None:
    """Term by term, for samples of unequal sizes in both orders."""
    x, y = np.array([5.0, 0.0, 2.0, 0.0, 9.0]), np.array([1.0, 3.0, 0.0, 0.0, 2.0])
    m1, m2 = 16.0, 6.0
    plain = 0.0
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if a + b:
            plain += ((m2 * a - m1 * b) ** 2 - (m2**2 * a + m1**2 * b)) / (a + b)
    plain /= m1**1.5 * m2
    assert z_statistic(x, y) == pytest.approx(plain)
    assert z_statistic(y, x) == pytest.approx(plain)
    assert z_statistic(x, np.zeros(5)) == 0.0


def moments_of(rounds: np.ndarray) -> Moments:
    """One round after the other."""
    found = Moments.zero(rounds.shape[1])
    for counts in rounds:
        found = found.plus(counts)
    return found


@pytest.mark.parametrize("clip", [1.0, 100.0, math.inf])
def test_with_variances_of_rounds_z_is_unbiased_for_people_who_repeat_themselves(
    people: UserDataset, clip: float
) -> None:
    """Where the Poisson form is far off: below for weighted counts, above for true ones."""
    counts = UserCounts(people, WORDS)
    random = np.random.default_rng(8)
    z, poisson = [], []
    for _ in range(60):
        users = random.permutation(len(people))[:256].reshape(2, 16, 8)
        halves = [
            np.array([round_sum(map(counts.of, r.tolist()), clip, len(WORDS)) for r in half])
            for half in users
        ]
        x, y = (moments_of(half) for half in halves)
        z.append(z_between_rounds(x, y, 16))
        poisson.append(z_statistic(x.total, y.total))
    error = np.std(z) / math.sqrt(len(z))
    assert abs(np.mean(z)) < 4 * error
    assert abs(np.mean(poisson)) > 4 * np.std(poisson) / math.sqrt(len(poisson))
    assert (np.mean(poisson) > 0) == (clip > 1)


def test_moments_add_up_and_give_the_residuals_of_rounds() -> None:
    """Against all rounds kept."""
    rounds = np.random.default_rng(1).gamma(2.0, 3.0, (12, 5))
    share = rounds.sum(axis=0) / rounds.sum()
    plain = ((rounds - share * rounds.sum(axis=1, keepdims=True)) ** 2).sum(axis=0)
    np.testing.assert_allclose(moments_of(rounds).residual_squares(share), plain)
    later = moments_of(rounds).minus(moments_of(rounds[:5]))
    for a, b in zip(later, moments_of(rounds[5:]), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b))


def test_halves_are_compared_on_a_grid_that_holds_its_own_halves(people: UserDataset) -> None:
    """As computed from all rounds kept; never more than three snapshots are held."""
    config = UnigramConfig(100.0, 50)
    counts, random = UserCounts(people, WORDS), np.random.default_rng(2)
    state, rounds = init(config, len(WORDS)), []
    for _ in range(50):
        summed = round_sum(map(counts.of, random.choice(300, 10)), config.clip, len(WORDS))
        rounds.append(summed)
        state = apply(state, config, summed, KEY)
        assert len(state.snapshots) <= 3
    every = np.array(rounds)
    for metrics in state.history:
        k = metrics.round
        assert metrics.words_seen == (every[:k].sum(axis=0) > 0).sum()
        before = every[: k - 1].sum(axis=0) > 0
        assert metrics.new_words == ((every[:k].sum(axis=0) > 0) & ~before).sum()
        if not (on_grid(k) and k % 2 == 0):
            assert metrics.z is None
            continue
        a, b = every[: k // 2], every[k // 2 : k]
        assert metrics.z_poisson == pytest.approx(z_statistic(a.sum(axis=0), b.sum(axis=0)))
        assert metrics.z_nested == pytest.approx(z_statistic(a.sum(axis=0), every[:k].sum(axis=0)))
        if k > 2:
            expected = z_between_rounds(moments_of(a), moments_of(b), k // 2)
            assert metrics.z == pytest.approx(expected, rel=1e-6)
    assert [m.round for m in state.history if m.z is not None] == [4, 6, 8, 12, 16, 24, 32, 48]


def test_the_moving_average_tells_how_rarely_something_new_is_seen() -> None:
    """Of the last rounds alone, and never anything new is infinity."""
    news = [5, 3, 0, 1, 0, 0, 0, 1]
    assert new_word_rate(news, 4) == 0.25
    assert rounds_between_new(news, 4) == 4.0
    assert new_word_rate(news, 100) == 0.5
    assert rounds_between_new(news[4:7], 3) == math.inf
    assert new_word_rate([], 3) == 0.0


def test_out_of_vocabulary_words_are_counted_by_user(people: UserDataset) -> None:
    """Against the plain count; the most frequent words leave the fewest out."""
    counts = UserCounts(people, WORDS)
    totals = round_sum(map(counts.of, range(300)), math.inf, len(WORDS))
    top = top_words(WORDS, totals, 50)
    out, total = oov_counts(people, top)
    for user in (0, 7, 100):
        words = people.words(user)
        assert (out[user], total[user]) == (sum(w not in set(top) for w in words), len(words))
    rare, _ = oov_counts(people, WORDS[-50:])
    assert out.sum() < rare.sum()
    assert len(top_words(WORDS, np.zeros(len(WORDS)), 10)) == 0
    assert top_words(["a", "b", "c"], np.array([1.0, 2.0, 1.0]), 2) == ["b", "a"]


def test_the_cache_of_counts_changes_nothing_but_memory(people: UserDataset) -> None:
    """With none, with a little, with enough."""
    for size in (0, 2000, 1 << 30):
        counts = UserCounts(people, WORDS, cap_words=30, cache_bytes=size)
        for _ in range(2):
            for user in (0, 5, 9):
                places, found = counts.of(user)
                plain = Counter(w for w in people.words(user, cap=30) if w in WORDS)
                assert {WORDS[p]: n for p, n in zip(places, found, strict=True)} == plain


@pytest.mark.parametrize(
    ("text", "message"),
    [("a\n\nb\n", "line 2.* no word"), ("a\nb\na\n", "'a' twice"), ("", "lists no words")],
)
def test_a_bad_whitelist_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """With the line or the word."""
    (tmp_path / "words").write_text(text)
    with pytest.raises(FormatError, match=message):
        read_wordlist(tmp_path / "words")


def test_a_whitelist_may_have_further_columns(tmp_path: Path) -> None:
    """Such as counts, which are not read."""
    (tmp_path / "words").write_text("the\t10\ncafé\t3\r\n", encoding="utf-8")
    assert read_wordlist(tmp_path / "words") == ["the", "café"]


def test_settings_that_cannot_be_are_refused(people: UserDataset) -> None:
    """Noise without a bound on what a user adds above all."""
    for settings in (
        {"clip": 0.0},
        {"clip": math.nan},
        {"rounds": 0},
        {"window": 0},
        {"cap_words": 0},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.inf},
        {"noise_multiplier": 1.0, "clip": math.inf},
    ):
        with pytest.raises(ConfigError):
            dataclasses.replace(UnigramConfig(1.0, 1), **settings)
    with pytest.raises(ConfigError, match="duplicates"):
        UserCounts(people, ["a", "a"])
    with pytest.raises(ConfigError, match="empty"):
        init(UnigramConfig(1.0, 1), 0)
    assert not issubclass(PrivacyError, ConfigError)
