"""Trains a network in rounds, and reports the releases, the users and the quality. The file has
over 600 lines, since one object owns a run's state, and resuming must set it all in one place."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm import checkpoint
from dlm.checkpoint import CHECKPOINT, Arrays
from dlm.errors import ConfigError
from dlm.federated.account.compose import StageRecord
from dlm.federated.devices.encoding import SecureAggregator
from dlm.federated.fixed_point import ARITHMETIC, BITS, GRID_BITS
from dlm.federated.keys import Key
from dlm.federated.noise import Mechanism, make_mechanism
from dlm.federated.noise.discrete import DiscreteNoise, DiscreteState, discrete
from dlm.federated.report.report import PrivacyReport, build
from dlm.federated.run.cohorts import Cohorts, Population
from dlm.federated.run.run import FederatedRun
from dlm.federated.run.run_folder import RunBinding, RunFolder
from dlm.federated.run.sampling import (
    AvailabilitySampler,
    FixedGoalSampler,
    PoissonSampler,
    Sampler,
    check_population,
)
from dlm.federated.tokens import Ids, check_ids
from dlm.federated.training import grid, metrics, rnn
from dlm.federated.training.engine import Aggregator, Engine, LocalEngine
from dlm.federated.training.local import UserWork, work_of
from dlm.federated.training.parts import parts_of, unknown_parts
from dlm.federated.training.pretrain import pretrain
from dlm.federated.training.rounds import (
    Diagnostics,
    FederatedAlgorithm,
    ReleaseConfig,
    TrainingState,
    grid_release,
    make_algorithm,
)
from dlm.federated.training.settings import TrainingSettings
from dlm.federated.training.trained import leaves, rebuilt
from dlm.federated.users import TOKENIZERS
from dlm.federated.words import Encode, RunVocabulary, public_text, record_of
from dlm.record.inputs import record_or_word, refuse_without_guarantee
from dlm.record.lookup import STATE_DIGEST, VOCABULARY_DIGEST
from dlm.record.provenance import FIRST_HAND, Provenance, content_digest
from dlm.record.sidecar import read_record, sidecar

GENERATOR = "threefry2x32"
TEXT_DIGEST = "text_sha256"  # key in the record of the pretraining text
DIVERGED = 10  # a model that is worse than guessing by this factor has diverged
_ANY_KEY = jax.random.key(0)  # for computing shapes, which no key affects
LARGEST = 1e6  # with a parameter of this size or more, a network has diverged


@dataclass(frozen=True)
class RoundReport:
    """The report of a round that counts. `evaluation` is on held-out users, or None if there was
    no evaluation; `seconds` excludes the time of the evaluation."""

    diagnostics: Diagnostics
    evaluation: metrics.Metrics | None
    seconds: float

    def line(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: value for name, value in self.diagnostics._asdict().items() if name != "raw"
        }
        if self.diagnostics.raw is not None:
            found["not_private"] = self.diagnostics.raw._asdict()
        if self.evaluation is not None:
            found["held_out"] = {
                "top1_in_vocabulary": self.evaluation.top1_in_vocabulary,
                "top1": self.evaluation.top1,
                "sll_excluding_oov": self.evaluation.sll_excluding_oov,
                "perplexity": self.evaluation.perplexity,
                "perplexity_excluding_oov": self.evaluation.perplexity_excluding_oov,
                **vars(self.evaluation),
            }
        if self.diagnostics.raw is not None:
            # The time that a cohort takes reveals how much its users wrote.
            found["seconds"] = round(self.seconds, 3)
        return found


class Training(FederatedRun[RoundReport]):
    """A run that trains a network.

    Args
        folder      folder of the run, or an open `RunFolder`; a run in it resumes
        encode      words of an utterance -> ids, given with `vocab_size`; by default the encoder of
                    `settings.data.vocabulary`
        vocabulary_record  `Provenance.public` names who attests that `encode` has no user's text.
                    By default, the record of the wordpieces to which `encode` is bound; any other
                    encoder has no record, and a run with a guarantee is refused
        engine, aggregator  compute the updates, by default locally, and add them up
    Raises
        ConfigError   the settings, users or vocabulary differ from the folder's run; too few users
                      for the rounds of a new run
        PrivacyError  the ledger or noise belongs to another checkpoint; a run with a guarantee
                      uses a vocabulary or pretraining text that has no guarantee and that nobody
                      attests as public; the grid is too coarse for the network
        FormatError   a file is damaged
    """

    state: TrainingState

    def __init__(
        self,
        settings: TrainingSettings,
        users: Population,
        folder: RunFolder | Path,
        *,
        encode: Encode | None = None,
        vocab_size: int | None = None,
        vocabulary_record: Provenance | None = None,
        engine: Engine | None = None,
        aggregator: Aggregator | None = None,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        place = folder if isinstance(folder, Path) else folder.path
        self.settings, self._progress = settings, progress
        self._promises = settings.privacy.mechanism != "none" and not settings.run.simulation
        self._has_begun = (place / CHECKPOINT).exists()
        self._begun_with: dict[str, Provenance | None] = {}
        self._text = b""
        size = self._take_encoder(encode, vocab_size, vocabulary_record)
        self._take_users(users)
        self.model = settings.model.network(size)
        self._root = (
            Key.from_seed(settings.run.seed) if settings.run.simulation else Key.from_system()
        )
        self._make_algorithm(engine, aggregator)
        self._make_cohorts()
        self._bind(users, size)
        self._begin(folder)
        if self.resumed:
            progress(f"resuming after round {self.rounds_done}")

    def _take_encoder(
        self, encode: Encode | None, vocab_size: int | None, record: Provenance | None
    ) -> int:
        if encode is None:
            vocabulary: RunVocabulary | None = self._read_vocabulary()
            assert vocabulary is not None
            vocab_size, record = vocabulary.size, vocabulary.record
        else:
            own = record_of(encode)  # wordpieces carry their own record
            if record is None:
                record = own
            elif not record.is_public and record != own:
                why = "nothing shows that the record given with the encoder belongs to it"
                record = Provenance.none(why)
            if self._promises:
                refuse_without_guarantee("the given encoder", record)
            vocabulary = RunVocabulary.of(encode, record)
        if vocab_size is None:
            raise ConfigError(
                "the argument encode was given without vocab_size, its number of ids; give both"
            )
        self._encode: Any = encode if vocabulary is None else vocabulary.encoder()
        self._vocabulary, self._vocabulary_record = vocabulary, record
        return vocab_size

    def _take_users(self, users: Population) -> None:
        data = self.settings.data
        self._split = TOKENIZERS[data.tokenizer]
        self._held_out: list[Ids] | None = None
        self.train_users, self.held_out_users = users.split(data.held_out)
        if not len(self.train_users):
            raise ConfigError(
                f"none of {len(users)} users is left for training; lower data.held_out"
            )
        # Only a new run checks its population and reads its public text.
        if not self._has_begun:
            self._check_population()
            self._take_text()

    def _make_algorithm(self, engine: Engine | None, aggregator: Aggregator | None) -> None:
        settings, users = self.settings, len(self.train_users)
        self._release = settings.privacy.release(settings.sampling.users_a_round(users))
        self.mechanism = mechanism_of(settings, self._release, self._progress)
        if aggregator is None and settings.aggregation.secure:
            aggregator = SecureAggregator(
                settings.privacy.clip_norm,
                settings.aggregation.scale,
                settings.sampling.most_users(users),
            )
        self.noise = None if self.mechanism is None else discrete(self.mechanism)
        self.engine = engine or self._make_engine(aggregator)
        self.algorithm: FederatedAlgorithm = make_algorithm(
            self._release,
            settings.server,
            self.engine,
            self.noise,
            simulation=settings.run.simulation,
            aggregation_key=lambda index: self._root.fold("aggregation", index),
        )
        self._void, self._parts = unknown_parts(self.engine), [parts_of(self.engine)]
        self._sensitivities: dict[tuple[int, int], float] = {}
        self._roundings: dict[tuple[int, int], float] = {}
        self._rounding(settings.privacy.gap, 1)  # raises if the grid is too coarse

    def _make_cohorts(self) -> None:
        run, privacy = self.settings.run, self.settings.privacy
        self.cohorts = Cohorts(
            self.train_users,
            self._make_sampler(),
            gap=privacy.gap if privacy.gap > 1 else None,
            max_participations=privacy.max_participations or None,
            round_s=self.settings.sampling.round_s,
            salt=bytes(self._root.fold("ledger").words(4).tobytes()),
        )
        self.rounds, self.save_every = run.rounds, run.checkpoint_every
        self.released = not run.simulation

    def _bind(self, users: Population, vocab_size: int) -> None:
        # For a plain list, the words are compared; the person who attests that it is public can
        # change.
        record = self._vocabulary_record
        bound = None if record is None or record.is_public else record.digest
        sums = ARITHMETIC if self.noise is None else grid.ARITHMETIC
        self.binding = RunBinding(
            {
                **self.settings.binding(),
                "vocab_size": vocab_size,
                "vocabulary_record": bound,
                "sums": None if self.settings.aggregation.secure else sums,
                "matrix": None if self.mechanism is None else self.mechanism.digest(),
            },
            {"users": users.digest, "encoding": self._encoding_digest()},
            None if self._vocabulary is None else self._vocabulary.content,
        )

    def run(self, until: int | None = None) -> Iterator[RoundReport]:
        """Runs rounds, by default up to `run.stop_after`; see `FederatedRun.run`."""
        return super().run(until or self.settings.run.stop_after or None)

    def _round(self, index: int, users: Sequence[int], is_last: bool) -> RoundReport:
        began = time.monotonic()
        self.state, diagnostics = self.algorithm.apply(self.state, self._asked(index, users))
        seconds = time.monotonic() - began
        every = self.settings.run.evaluate_every
        evaluation = None
        if every and len(self.held_out_users) and ((index + 1) % every == 0 or is_last):
            evaluation = self.evaluate()
        if why := self._diverges(diagnostics, evaluation):
            self._over = (
                f"after round {index + 1} the model diverges: {why}. The run has ended; start a "
                "new run in another folder with a lower local.learning_rate or "
                "server.learning_rate, or less noise; the privacy costs of both runs add up"
            )
        return RoundReport(diagnostics, evaluation, seconds)

    def _diverges(self, diagnostics: Diagnostics, evaluation: metrics.Metrics | None) -> str | None:
        """Says in what way the model is worse than guessing (None if it is not), judged by released
        values and held-out users; in simulations also by training users."""
        largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(self.state.params))
        if not largest < LARGEST:
            return f"a parameter is {largest:.3g}, far above those of a network that learns"
        guess = self.model.vocab_size
        if evaluation is not None and evaluation.words:
            found = evaluation.perplexity
            if not found < DIVERGED * guess:
                return (
                    f"its perplexity on held-out users is {found:.3g}, but guessing among all "
                    f"ids gives {guess}"
                )
        raw = diagnostics.raw
        if raw is not None and -raw.mean_ln_prob >= math.log(DIVERGED * guess):
            return (
                f"its loss on users is {-raw.mean_ln_prob:.3g}, but guessing among all ids "
                f"gives {math.log(guess):.3g}"
            )
        return None

    def evaluate(self) -> metrics.Metrics:
        if self._held_out is None:
            self._held_out = []
            remaining = self.settings.data.held_out_tokens
            for user in range(len(self.held_out_users)):
                cap = min(remaining, self.settings.data.max_tokens)
                if cap <= 0:
                    break
                found = self._tokens(self.held_out_users, user, cap)
                remaining -= sum(map(len, found))
                self._held_out += found
            self._held_out.sort(key=len)
        return metrics.evaluate(self.state.params, self.model, self._held_out)

    def stage(self, rounds: int | None = None) -> StageRecord:
        """Facts for accounting about the first `rounds` rounds, by default the rounds done."""
        rounds = self.rounds_done if rounds is None else rounds
        privacy, adaptive = self.settings.privacy, self._release.adaptive
        noised = self.mechanism is not None
        matrix = {} if self.mechanism is None else self.mechanism.matrix()
        if "restarts" in matrix:
            matrix["restarts"] = [at for at in matrix["restarts"] if at < rounds]
        gap, most = self.cohorts.bounds(rounds)
        return StageRecord(
            **self.cohorts.stage(
                "network",
                rounds,
                mechanism=privacy.mechanism,
                noise_multiplier=self._release.update_multiplier() if noised else None,
                simulated=self.settings.run.simulation,
                sensitivity=self._sensitivity(gap, most),
                clip_noise=adaptive.count_stddev if noised and adaptive is not None else None,
                norm_inflation=self.engine.sensitivity_factor(
                    rnn.parameter_count(self.state.params)
                ),
                matrix=matrix,
                rounding=self._rounding(gap, most),
                extras={
                    "rounds_planned": self.rounds,
                    **{
                        part: ", then ".join(dict.fromkeys(found[part] for found in self._parts))
                        for part in ("engine", "aggregator")
                    },
                    **(grid.described() if noised else {}),
                    **self._releases(),
                },
            )
        )

    def _sensitivity(self, gap: int, most: int) -> float | None:
        """Returns the sensitivity of all planned rounds; None for mechanisms that accounting knows
        by name."""
        if self.mechanism is None or self.mechanism.name in ("gaussian", "tree", "tree-restart"):
            return None
        if (gap, most) not in self._sensitivities:
            self._sensitivities[gap, most] = self.mechanism.sensitivity(
                gap=gap, max_participations=most
            )
        return self._sensitivities[gap, most]

    def _rounding(self, gap: int, most: int) -> float:
        if self.noise is None:
            return 1.0
        if (gap, most) not in self._roundings:
            release = grid_release(self._release, self.engine, self.noise)
            size = release.size(jax.eval_shape(partial(rnn.init, config=self.model), _ANY_KEY))
            factor = release.factor(size, self._sensitivity(gap, most) or 1.0)
            self._roundings[gap, most] = factor
        return self._roundings[gap, most]

    def report(self, *, at: datetime | None = None, data_name: str = "") -> PrivacyReport:
        """See `FederatedRun.report`; PrivacyError if the ledger contradicts what accounting
        assumes."""
        released = leaves(self.state._replace(noise=None))
        return self._report(self._rounds_to_account_for, released, at=at, data_name=data_name)

    @property
    def _rounds_to_account_for(self) -> int:
        """The rounds done; all planned rounds if divergence ended the run."""
        return self.rounds if self._over else self.rounds_done

    def _report(
        self, rounds: int, released: Arrays, *, at: datetime | None = None, data_name: str = ""
    ) -> PrivacyReport:
        """Reports on `rounds` rounds, done or planned; the record has the digest of `released`."""
        content = {STATE_DIGEST: checkpoint.digest(released)}
        if self._vocabulary is not None:
            content[VOCABULARY_DIGEST] = content_digest(self._vocabulary.content)
        return build(
            [self.stage(rounds)],
            delta=self.settings.privacy.delta,
            ledgers={"network": self.ledger},
            config=self.binding.settings,
            simulated=self.settings.run.simulation,
            inputs={self._vocabulary_name: self._vocabulary_record, **self._begun_with},
            void=self._void,
            content=content,
            secure_aggregation=self.settings.aggregation.secure,
            held_out=len(self.held_out_users) if self.settings.run.evaluate_every else 0,
            under_way=rounds > self.rounds_done,
            at=at,
            data=self.cohorts.data_set(data_name, str(self.binding.private["users"])),
        )

    def _record(self, public: Arrays) -> Provenance:
        """Returns the record of all planned rounds, an overestimate, so that no round needs its own
        accounting; at the end, returns the record of the rounds done."""
        if not self.rounds_done:
            return Provenance.none("no round is done yet: the network is as it began")
        rounds = self._rounds_to_account_for if self._ends else self.rounds
        return self._report(rounds, public).provenance

    @property
    def _vocabulary_name(self) -> str:
        return f"the vocabulary {self.settings.data.vocabulary.name}"

    def _read_vocabulary(self) -> RunVocabulary:
        data = self.settings.data
        key = Path(data.public_key) if data.public_key else None
        found = RunVocabulary.read(data.vocabulary, data.vocabulary_size, key)
        record = record_or_word(
            data.vocabulary,
            self._vocabulary_name,
            found.record,
            by=data.public,
            setting="data.public",
            sha256=content_digest(found.content),
            promises=self._promises,
            simulated=self.settings.run.simulation,
        )
        return dataclasses.replace(found, record=record)

    def _take_text(self) -> None:
        given = self.settings.pretrain
        if not given.text:
            return
        text, what = Path(given.text), f"the text {Path(given.text).name} to pretrain on"
        try:
            content = text.read_bytes()
        except OSError as exc:
            raise ConfigError(f"the public text {text} cannot be read: {exc}") from exc
        self._text = content if given.steps else b""  # use the bytes that were checked
        record = None
        if sidecar(text).exists():
            record = read_record(text, content, digest_name=TEXT_DIGEST, kind="text")
        self._begun_with[what] = record_or_word(
            text,
            what,
            record,
            by=given.public,
            setting="pretrain.public",
            sha256=content_digest(content),
            promises=self._promises,
            simulated=self.settings.run.simulation,
        )

    def _make_engine(self, aggregator: Aggregator | None) -> Engine:
        bits = BITS if self.noise is None else GRID_BITS
        return LocalEngine(self.model, self.settings.local, aggregator=aggregator, bits=bits)

    def _make_sampler(self) -> Sampler:
        given, users = self.settings.sampling, len(self.train_users)
        key = self._root.fold("sampling")
        if given.kind == "poisson":
            return PoissonSampler(users, given.q, key)
        if given.kind == "fixed":
            return FixedGoalSampler(users, self._cohort_size, key)
        return AvailabilitySampler(
            users,
            self._cohort_size,
            key,
            gap=self.settings.privacy.gap,
            max_participations=self.settings.privacy.max_participations or None,
            timer_s=given.timer_s,
            diurnal=given.diurnal(),
        )

    @property
    def _cohort_size(self) -> int:
        """The number of users in a cohort, for samplers that draw a fixed number."""
        return self.settings.sampling.report_goal

    def _check_population(self) -> None:
        given, privacy, rounds = self.settings.sampling, self.settings.privacy, self.settings.run
        if given.kind == "poisson":
            return
        users, most = len(self.train_users), privacy.max_participations or None
        try:
            sure = check_population(
                users, self._cohort_size, rounds.rounds, gap=privacy.gap, max_participations=most
            )
        except ConfigError as exc:
            if held_out := len(self.held_out_users):
                exc.add_note(f"{held_out:,} more users are held out by data.held_out")
            raise
        if given.kind == "fixed" and (privacy.gap > 1 or (most or rounds.rounds) < rounds.rounds):
            self._progress(
                "sampling.kind = fixed draws users without regard to privacy.gap and "
                "max_participations, so the run ends when a draw breaks them; timer respects them"
            )
        elif not sure:
            self._progress(
                f"{users:,} users may run out before the last round: they are drawn at random, and "
                f"near the end too few of them may have fewer than {most} participations"
            )

    def _cohort(self, index: int) -> list[int]:
        try:
            return super()._cohort(index)
        except ConfigError as exc:
            raise ConfigError(
                f"{exc}. Enforced limits cannot change within a run, so the run ends here; to "
                f"report the rounds done, set run.stop_after = {index}. For more rounds, start a "
                "new run in another folder, with a lower report goal, a smaller gap, a shorter "
                "timer or more users; the privacy costs of both runs add up"
            ) from exc

    def _asked(self, index: int, users: Sequence[int]) -> Any:
        return [self._work(index, user) for user in users]

    def _work(self, index: int, user: int) -> UserWork:
        text = self._tokens(self.train_users, user, self.settings.data.max_tokens)
        check_ids(text, self.model.vocab_size)
        words = self._root.fold("order", index, user).words(4)
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence(words.tolist())))
        return work_of(text, self.settings.local, order)

    def _key(self, name: str) -> jax.Array:
        words = jnp.asarray(self._root.fold(name).words(2))
        key: jax.Array = jax.random.wrap_key_data(words, impl=GENERATOR)
        return key

    def _tokens(self, users: Population, user: int, cap: int) -> list[Ids]:
        return users.tokens(user, self._encode, cap=cap, split=self._split)

    def _encoding_digest(self) -> str:
        """A digest of the wordpieces, and of the ids of a sample of users' text."""
        found = hashlib.sha256(getattr(getattr(self._encode, "__self__", None), "model", b""))
        for user in range(min(len(self.train_users), 20)):
            for ids in self._tokens(self.train_users, user, 200):
                found.update(ids.astype("<i4").tobytes())
        return found.hexdigest()[:32]

    def _noise_key(self) -> Key | None:
        return None if self.noise is None else self._root.fold("noise")

    def _first(self) -> None:
        fresh = rnn.init(self._key("init"), self.model)
        given = self.settings.pretrain
        if given.steps:
            text = public_text(Path(given.text), self._text, self._encode, self._split)
            self._text = b""
            self._progress(f"pretraining: {given.steps} steps on {len(text):,} public utterances")
            fresh = pretrain(
                fresh,
                self.model,
                text,
                steps=given.steps,
                batch_size=given.batch_size,
                unroll=given.unroll,
                learning_rate=given.learning_rate,
                order=np.random.Generator(
                    np.random.PCG64(self._root.fold("pretrain").words(4).tolist())
                ),
                progress=lambda step, loss: self._progress(f"step {step}: loss {loss:.4f}"),
            )
        self.state = self.algorithm.init(fresh, self._noise_key())

    def _arrays(self) -> tuple[Arrays, Arrays, Mapping[str, Any]]:
        # The key is never written to a file.
        noise: DiscreteState | None = self.state.noise
        private: Arrays = [] if noise is None else [np.array(noise.round), *noise.buffers]
        facts = {
            "parts": self._parts,
            "void": self._void,
            "over": self._over,
            "begun_with": {
                what: record and record.to_dict() for what, record in self._begun_with.items()
            },
        }
        return leaves(self.state._replace(noise=None)), private, facts

    def _restore(self, public: Arrays, private: Arrays | None, facts: Mapping[str, Any]) -> None:
        self._over = facts["over"]
        # The inputs of earlier rounds remain inputs of the run, even if it resumes with others.
        self._void = list(dict.fromkeys([*facts["void"], *self._void]))
        self._parts = [*facts["parts"], *self._parts]
        self._parts = [part for n, part in enumerate(self._parts) if part not in self._parts[:n]]
        for what, record in facts["begun_with"].items():
            found = record and Provenance.from_dict(record, str(what))
            if found is not None and found.is_public:  # this run itself noted the attestation
                found = dataclasses.replace(found, standing=FIRST_HAND)
            self._begun_with[what] = found
        assert self.folder is not None
        key, place = self._noise_key(), self.folder.path
        template = self.algorithm.init(rnn.init(self._key("init"), self.model), key)
        state: TrainingState = rebuilt(public, template._replace(noise=None), place)
        if private is not None and self.noise is not None:
            state = state._replace(noise=self._restored_noise(self.noise, private, template))
        self.state = state

    def _restored_noise(
        self, noise: DiscreteNoise, private: Arrays, template: TrainingState
    ) -> DiscreteState:
        assert self.folder is not None
        begun: DiscreteState = template.noise
        done = int(private[0]) if len(private) else -1
        size = grid_release(self._release, self.engine, noise).size(template.params)
        kind = begun.buffers[0].dtype if begun.buffers else np.dtype(np.int64)
        shapes = noise.shapes(done, size) if 0 <= done <= self.rounds else []
        expected = [np.array(done), *(np.broadcast_to(kind.type(0), shape) for shape in shapes)]
        checkpoint.check_shapes(private, expected, self.folder.path)
        return begun._replace(round=done, buffers=tuple(private[1:]))

    def _line(self, done: RoundReport) -> dict[str, Any]:
        return done.line()


def mechanism_of(
    settings: TrainingSettings,
    release: ReleaseConfig,
    progress: Callable[[str], None] = lambda line: None,
) -> Mechanism | None:
    """Makes the mechanism of a run's noise with `make_mechanism`; None without noise."""
    privacy, rounds = settings.privacy, settings.run.rounds
    if privacy.mechanism == "none":
        return None
    restarts = privacy.restarts
    if release.adaptive is not None and privacy.mechanism == "tree-restart":
        renewed = release.adaptive.restarts_within(rounds)
        restarts = tuple(sorted({*restarts, *(at + 1 for at in renewed)}))
    most = privacy.max_participations or -(-rounds // privacy.gap)
    return make_mechanism(
        privacy.mechanism,
        rounds=rounds,
        gap=privacy.gap,
        max_participations=most,
        restarts=restarts,
        buffers=privacy.buffers,
        bands=privacy.bands or None,
        error=privacy.error,
        progress=progress,
    )
