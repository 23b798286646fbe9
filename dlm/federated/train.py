"""A whole run in a folder: cohorts, rounds, checkpoints, evaluation; and going on after a stop.

What a run writes:

| file | who may see it | what it holds |
| --- | --- | --- |
| `checkpoint.dlmfed` | anybody who may have the model | model, optimiser, clip norm, settings |
| `private-N.state` | the owner (mode 0600) | buffers of noise, ledger of participation, sampler |
| `metrics.jsonl` | as the checkpoint | a line a round |

No key is in any file. A simulation makes its keys again from the seed and goes on to the bit. A run
that is none draws new ones when it goes on: what noise is still to come is independent of what was
drawn before, and what ties rounds together are the buffers, so that its law stays the same.
A round counts when its checkpoint is in place. Nothing of a round is told before.

One file past 500 lines: what ties a run's parts together, each of which is a file of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.federated import checkpoint, metrics, rnn, run_folder
from dlm.federated.account.compose import StageRecord
from dlm.federated.engine import Aggregator, Engine, LocalEngine
from dlm.federated.keys import Key
from dlm.federated.ledger import ParticipationLedger
from dlm.federated.local import UserWork, work_of
from dlm.federated.noise import make_mechanism
from dlm.federated.pretrain import pretrain
from dlm.federated.provenance import Provenance
from dlm.federated.report import Report, build
from dlm.federated.rounds import (
    Diagnostics,
    FederatedAlgorithm,
    NoiseMechanism,
    ServerConfig,
    ServerState,
    make_algorithm,
)
from dlm.federated.sampling import (
    AvailabilitySampler,
    FixedGoalSampler,
    PoissonSampler,
    Sampler,
    check_population,
)
from dlm.federated.settings import ModelSettings, Settings
from dlm.federated.tokens import Ids, check_ids
from dlm.federated.users import TOKENIZERS, UserDataset
from dlm.federated.words import Encode, public_text, read_encoder

GENERATOR = "threefry2x32"
CHECKPOINT = "checkpoint.dlmfed"
METRICS = run_folder.METRICS


@dataclass(frozen=True)
class RoundReport:
    """What is told of a round, once it counts.

    Fields
        diagnostics   of `rounds.apply`
        evaluation    on held-out users; None in rounds without one
        seconds       that the round took, evaluation left out
    """

    diagnostics: Diagnostics
    evaluation: metrics.Metrics | None
    seconds: float

    def line(self) -> dict[str, Any]:
        """As JSON."""
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
            # How long a cohort takes tells how much its users wrote.
            found["seconds"] = round(self.seconds, 3)
        return {key: _finite(value) for key, value in found.items()}


def _finite(value: Any) -> Any:
    """Numbers that JSON has."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Training:
    """One run.

    Args
        settings   of the run
        users      whose text it is
        folder     where the run lives; what it holds of an earlier start is gone on with
        encode     words of an utterance -> ids, and `vocab_size` with it; by default the words of
                   `settings.data.vocabulary`
        vocabulary_record  what protects those whose text `encode` was made from, as an inventory of
                   wordpieces has it; None says that it is public
        engine     where updates are computed; by default here
        aggregator how they are added up; by default as `settings.aggregation` says
        tell       is told what happens, a line at a time
    Raises
        ConfigError   other settings, users or vocabulary than the folder's run had; too few users
                      for the rounds of a new one
        PrivacyError  a ledger or noise that is not the one of the checkpoint
        FormatError   a damaged file
    """

    def __init__(
        self,
        settings: Settings,
        users: UserDataset,
        folder: Path,
        *,
        encode: Encode | None = None,
        vocab_size: int | None = None,
        vocabulary_record: Provenance | None = None,
        engine: Engine | None = None,
        aggregator: Aggregator | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.settings, self.folder, self._tell = settings, folder, tell
        run = settings.run
        if encode is None:
            data = settings.data
            encode, vocab_size, vocabulary_record = read_encoder(
                data.vocabulary, data.vocabulary_size
            )
        elif vocabulary_record is None:  # wordpieces know it themselves
            vocabulary_record = getattr(getattr(encode, "__self__", None), "provenance", None)
        if vocab_size is None:
            raise ConfigError("an encoder needs vocab_size, the number of its ids, beside it")
        self._encode, self._vocabulary_record = encode, vocabulary_record
        self._split = TOKENIZERS[settings.data.tokenizer]
        if (
            vocabulary_record is not None
            and vocabulary_record.guarantee is None
            and settings.privacy.mechanism != "none"
            and not run.simulation
        ):
            tell(f"neither will this model have a guarantee: {vocabulary_record.statement()}")
        self.train_users, self.held_out_users = users.split(settings.data.held_out)
        if not len(self.train_users):
            raise ConfigError(f"of {len(users)} users nobody is left to train; lower data.held_out")
        # A run that has begun goes on as far as it comes.
        if not (folder / CHECKPOINT).exists():
            self._check_population()
        self.model = settings.model.network(vocab_size)
        self._root = Key.from_seed(run.seed) if run.simulation else Key.from_system()
        self._release = settings.privacy.release(
            settings.sampling.users_a_round(len(self.train_users))
        )
        self.mechanism = self._make_mechanism()
        if aggregator is None and settings.aggregation.secure:
            from dlm.federated.secagg import SecureAggregator

            aggregator = SecureAggregator(
                settings.privacy.clip_norm,
                settings.aggregation.scale,
                settings.sampling.most_users(len(self.train_users)),
            )
        self.engine = engine or LocalEngine(self.model, settings.local, aggregator=aggregator)
        self.algorithm: FederatedAlgorithm = make_algorithm(
            self._release,
            settings.server,
            self.engine,
            self.mechanism,
            simulation=run.simulation,
            aggregation_key=lambda index: self._root.fold("aggregation", index),
        )
        self._sampler = self._make_sampler()
        privacy = settings.privacy
        self.ledger = ParticipationLedger(
            len(self.train_users),
            gap=privacy.gap if privacy.gap > 1 else None,
            max_part=privacy.max_part or None,
            sampling=self._sampler.describe(),
            salt=bytes(self._root.fold("ledger").words(4).tobytes()),
        )
        # Text and vocabulary are compared by what they hold, wherever they lie. What is computed
        # from users' text without noise, a digest too, stays in the private part.
        self.binding = {
            **settings.binding(),
            "vocab_size": vocab_size,
            "vocabulary_record": None if vocabulary_record is None else vocabulary_record.digest,
            "matrix": None if self.mechanism is None else self.mechanism.digest(),
        }
        self.private_binding = {
            **self.binding,
            "users": users.digest,
            "encoding": self._encoding_digest(),
        }
        self._now_s = 0.0
        self._held_out: list[Ids] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = run_folder.locked(folder / ".lock")
        try:
            self.state = self._begin()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets others have the folder."""
        os.close(self._lock)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rounds_done(self) -> int:
        """Rounds that count."""
        return int(self.state.round)

    def run(self) -> Iterator[RoundReport]:
        """Does the rounds that are left, and tells of each when it counts.

        Raises
            PrivacyError  a participation that breaks the enforced bounds
        """
        run = self.settings.run
        last = min(run.rounds, run.stop_after or run.rounds)
        waiting: list[RoundReport] = []
        while self.rounds_done < last:
            began = time.monotonic()
            index = self.rounds_done
            cohort = self._cohort(index)
            self.state, diagnostics = self.algorithm.apply(self.state, cohort)
            done = index + 1
            seconds = time.monotonic() - began
            evaluation = None
            if run.evaluate_every and (done % run.evaluate_every == 0 or done == last):
                evaluation = self.evaluate()
            waiting.append(RoundReport(diagnostics, evaluation, seconds))
            if done % run.checkpoint_every == 0 or done == last:
                self._save()
                with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(report.line()) + "\n" for report in waiting)
                yield from waiting
                waiting.clear()

    def evaluate(self) -> metrics.Metrics:
        """The model's metrics on held-out users."""
        if self._held_out is None:
            self._held_out = []
            left = self.settings.data.held_out_tokens
            for user in range(len(self.held_out_users)):
                cap = min(left, self.settings.data.max_tokens)
                if cap <= 0:
                    break
                found = self._tokens(self.held_out_users, user, cap)
                left -= sum(map(len, found))
                self._held_out += found
            self._held_out.sort(key=len)
        return metrics.evaluate(self.state.params, self.model, self._held_out)

    def stage(self) -> StageRecord:
        """What accounting needs to know of this run, as far as it went."""
        privacy, sampling = self.settings.privacy, self.settings.sampling
        noised = self.mechanism is not None
        poisson = sampling.kind == "poisson"
        gap = privacy.gap if privacy.gap > 1 else self.ledger.observed_gap() or 1
        most = privacy.max_part or max(self.ledger.observed_max_part(), 1)
        if poisson:
            gap, most = 1, max(self.rounds_done, 1)
        adaptive = self._release.adaptive
        size = rnn.parameter_count(self.state.params)
        return StageRecord(
            "network",
            privacy.mechanism,
            self._release.update_multiplier() if noised else None,
            self.rounds_done,
            gap,
            most,
            sensitivity=self._sensitivity(gap, most),
            sampling=sampling.kind,
            # Amplification is known for independent noise alone.
            sampling_rate=sampling.q if poisson and privacy.mechanism == "gaussian" else None,
            clip_noise=adaptive.count_stddev if noised and adaptive is not None else None,
            norm_inflation=self.engine.sensitivity_factor(size),
            restarts=tuple(
                at
                for at in (() if self.mechanism is None else self.mechanism.restarts)
                if at < self.rounds_done
            ),
            simulated=self.settings.run.simulation,
            extras={"rounds_planned": self.settings.run.rounds},
        )

    def _sensitivity(self, gap: int, most: int) -> float | None:
        """Of mechanisms that accounting does not know by their names: that of all rounds planned,
        which is at least that of those done."""
        if self.mechanism is None or self.mechanism.name in ("gaussian", "tree"):
            return None
        return self.mechanism.sensitivity(gap=gap, max_part=most)

    def report(self) -> Report:
        """The privacy report of the rounds that count, from their ledger.

        Raises
            PrivacyError  the ledger does not bear out what accounting assumes
        """
        given = self.settings.pretrain
        record = self._vocabulary_record
        public = [Path(given.text).name] if given.text else []
        if record is None:
            public.append("the vocabulary, as whoever ran this says")
        elif record.is_public:
            public.append("the wordpieces, as whoever built them says")
        return build(
            [self.stage()],
            delta=self.settings.privacy.delta,
            ledgers={"network": self.ledger},
            config=self.binding,
            simulated=self.settings.run.simulation,
            public_data=", ".join(public) or "none",
            inherited=[] if record is None else [record],
            secure_aggregation=self.settings.aggregation.secure,
            held_out=len(self.held_out_users) if self.settings.run.evaluate_every else 0,
        )

    def _make_mechanism(self) -> NoiseMechanism | None:
        privacy, rounds = self.settings.privacy, self.settings.run.rounds
        if privacy.mechanism == "none":
            return None
        restarts = privacy.restarts
        if self._release.adaptive is not None and privacy.mechanism == "tree-restart":
            renewed = self._release.adaptive.restarts_within(rounds)
            restarts = tuple(sorted({*restarts, *(at + 1 for at in renewed)}))
        most = privacy.max_part or -(-rounds // privacy.gap)
        mechanism: NoiseMechanism = make_mechanism(
            privacy.mechanism,
            rounds=rounds,
            gap=privacy.gap,
            max_part=most,
            restarts=restarts,
            buffers=privacy.buffers,
            bands=privacy.bands or None,
            error=privacy.error,
            progress=self._tell,
        )
        return mechanism

    def _make_sampler(self) -> Sampler:
        given, users = self.settings.sampling, len(self.train_users)
        key = self._root.fold("sampling")
        if given.kind == "poisson":
            return PoissonSampler(users, given.q, key)
        if given.kind == "fixed":
            return FixedGoalSampler(users, given.report_goal, key)
        return AvailabilitySampler(
            users,
            given.report_goal,
            key,
            gap=self.settings.privacy.gap,
            max_part=self.settings.privacy.max_part or None,
            timer_s=given.timer_s,
            diurnal=given.diurnal(),
        )

    def _check_population(self) -> None:
        """Refuses before the first round what would stop in the middle."""
        given, privacy, rounds = self.settings.sampling, self.settings.privacy, self.settings.run
        if given.kind == "poisson":
            return
        users, most = len(self.train_users), privacy.max_part or None
        sure = check_population(
            users, given.report_goal, rounds.rounds, gap=privacy.gap, max_part=most
        )
        if given.kind == "fixed" and (privacy.gap > 1 or (most or rounds.rounds) < rounds.rounds):
            self._tell(
                "sampling.kind = fixed draws users without regard to privacy.gap and max_part, and "
                "the run ends where a draw breaks them; timer keeps to them"
            )
        elif not sure:
            self._tell(
                f"{users:,} users may run out before the last round: they are drawn at random, and "
                f"towards the end too few may be left with fewer than {most} participations"
            )

    def _cohort(self, index: int) -> Sequence[UserWork]:
        """The users of a round, noted in the ledger, with their text packed."""
        if isinstance(self._sampler, AvailabilitySampler):
            try:
                chosen, self._now_s = self._sampler.cohort_when_ready(index, self._now_s)
            except ConfigError as exc:
                raise ConfigError(
                    f"{exc}. What is enforced cannot change within a run, which ends here; with "
                    f"run.stop_after = {index} the rounds done are reported. More rounds are a new "
                    "run in another folder, with a lower report goal, a smaller gap, shorter timer "
                    "or more users; the guarantees of both add up"
                ) from exc
            self._now_s += self.settings.sampling.round_s
        else:
            chosen = self._sampler.cohort(index)
        self.ledger.record(index, [self.train_users.user_id(int(user)) for user in chosen])
        return [self._work(index, int(user)) for user in chosen]

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

    def _tokens(self, users: UserDataset, user: int, cap: int) -> list[Ids]:
        return users.tokens(user, self._encode, cap=cap, split=self._split)

    def _encoding_digest(self) -> str:
        """A digest of the ids of some text of the users, and of wordpieces: others have others."""
        found = hashlib.sha256(getattr(getattr(self._encode, "__self__", None), "model", b""))
        for user in range(min(len(self.train_users), 20)):
            for ids in self._tokens(self.train_users, user, 200):
                found.update(ids.astype("<i4").tobytes())
        return found.hexdigest()[:32]

    def _begin(self) -> ServerState:
        """The state to go on from: that of the folder, or a new one."""
        key = None if self.mechanism is None else self._key("noise")
        fresh = rnn.init(self._key("init"), self.model)
        path = self.folder / CHECKPOINT
        if path.exists():
            return self._restored(path, self.algorithm.init(fresh, key), key)
        if not self.settings.run.simulation:
            run_folder.refuse_a_new_run(self.folder)
        given = self.settings.pretrain
        if given.steps:
            text = public_text(Path(given.text), self._encode, self._split)
            self._tell(f"begins with {given.steps} steps on {len(text):,} public utterances")
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
                progress=lambda step, loss: self._tell(f"step {step}: loss {loss:.4f}"),
            )
        self.state = self.algorithm.init(fresh, key)
        self._save()
        (self.folder / METRICS).write_text("")
        return self.state

    def _save(self) -> None:
        """Makes what was done count: private part, then checkpoint, then the old part goes."""
        done = self.rounds_done
        noise = self.state.noise
        if noise is not None:
            # The key is not written; see above.
            zeros = jnp.zeros_like(jax.random.key_data(noise.key))
            noise = noise._replace(key=jax.random.wrap_key_data(zeros, impl=GENERATOR))
        private = self.folder / f"private-{done}.state"
        checkpoint.save(
            private,
            {"noise": noise, "sampler": self._sampler.state()},
            self.private_binding,
            facts={"now_s": self._now_s},
            attachments={"ledger": self.ledger.to_bytes()},
            mode=0o600,
        )
        facts = {
            "round": done,
            "private": checkpoint.digest(private),
            "ledger": self.ledger.digest,
            "simulation": self.settings.run.simulation,
        }
        public = self.state._replace(noise=None)
        checkpoint.save(self.folder / CHECKPOINT, public, self.binding, facts=facts)
        for old in self.folder.glob("private-*.state"):
            if old != private:
                old.unlink()

    def _restored(self, path: Path, template: ServerState, key: jax.Array | None) -> ServerState:
        state: ServerState = checkpoint.load(path, template._replace(noise=None), self.binding)
        _, facts = checkpoint.facts_of(path)
        private = self.folder / f"private-{int(state.round)}.state"
        if not private.exists():
            raise FormatError(
                f"{private} is missing: without the noise that is under way and the ledger this "
                "run cannot go on under its guarantee; restore both files together"
            )
        if checkpoint.digest(private) != facts["private"]:
            raise PrivacyError(
                f"{private} is not the one of this checkpoint: its noise or its ledger is of "
                "another time, or was changed. Restore both files together"
            )
        template_of_private = {"noise": template.noise, "sampler": self._sampler.state()}
        parts = checkpoint.load(private, template_of_private, self.private_binding)
        self._sampler.restore(parts["sampler"])
        self._now_s = float(checkpoint.facts_of(private)[1]["now_s"])
        self.ledger = ParticipationLedger.from_bytes(
            checkpoint.attachment(private, "ledger"), str(private), expect=facts["ledger"]
        )
        state = state._replace(noise=parts["noise"])
        simulation = self.settings.run.simulation
        run_folder.keep_metrics(self.folder, int(state.round), simulation=simulation)
        self._tell(f"goes on after round {int(state.round)}")
        return state if key is None else self.algorithm.resume(state, key)


def load_model(folder: Path) -> tuple[rnn.RnnConfig, rnn.Params]:
    """The network and the parameters of a run, as they are after its last round that counts.

    Raises
        FormatError  the checkpoint is damaged or of another version
    """
    path = folder / CHECKPOINT
    settings, _ = checkpoint.facts_of(path)
    network = ModelSettings(**settings["model"]).network(settings["vocab_size"])
    params = rnn.init(jax.random.key(0), network)
    moments = ServerConfig(**settings["server"]).transformation().init(params)
    zero = jnp.float32(0.0)
    template = ServerState(jnp.int32(0), params, moments, zero, zero, None)
    state: ServerState = checkpoint.load(path, template, None)
    return network, state.params
