"""Carries out a roll-out: checks the servers, and writes the files that servers and clients
follow, as `rollout` decides. It writes nothing else, so a run can continue a killed run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.client.client import Client
from dlm.client.cluster_file import ClusterToml, Endpoint, check_files, edit, edited
from dlm.client.config import ClientConfig, ClientSecurity
from dlm.client.server import Connection
from dlm.client.table import take_census
from dlm.cluster.rollout import (
    Actions,
    Compare,
    Compared,
    Comparison,
    End,
    Event,
    Phase,
    Progress,
    Rules,
    Seen,
    TellClients,
    TellServers,
    Undo,
    lasting,
    resumed,
    shown,
    step,
)
from dlm.cluster.status import ID_DIGITS, ClusterSnapshot, ClusterStatus
from dlm.errors import ConfigError, DlmError
from dlm.files import locked
from dlm.index.layout import MANIFEST, Manifest
from dlm.index.placed import manifest_of
from dlm.ngram.vocab import as_text
from dlm.resources import available_bytes
from dlm.server.sets import read_sets, replaced_sets, write_sets
from dlm.stores.remote import AnyPath, RemotePath
from dlm.wire.ids import is_named

LOOK_S = 1.0
TELL_S = 10.0
CENSUS_S = 5.0


# A comparison's number of sentences, words per sentence, choices per word, and calls per model.
SENTENCES, WORDS, CHOICES, CALLS = 32, 8, 16, 384
SEED = 20191201


def sample(client: Client, sentences: int = SENTENCES, seed: int = SEED) -> list[str]:
    """Draws sentences from a served model; each word is one of the most probable next words."""
    rng, utterance = np.random.default_rng(seed), client.utterance()
    words = client.vocabulary.words
    out = []
    for _ in range(sentences):
        state, said = utterance.begin(), []
        for _ in range(WORDS):
            likely = utterance.next_words(state, CHOICES)
            word = likely[int(rng.integers(len(likely)))][0]
            if word == client.vocabulary.end_id:
                break
            said.append(as_text(words[word]))
            state = utterance.extend([state], [word]).states[0, 0]
        out.append(" ".join(said))
    return out


def compare(
    old: Client, new: Client, files: Client | None, sentences: Sequence[str], calls: int = CALLS
) -> Comparison:
    """Queries both models in turn for each sentence, until each model has had `calls` calls."""
    took: list[tuple[float, float]] = []
    failed, wrong = [0, 0], 0
    differences: list[float] = []
    for number, sentence in enumerate(sentences):
        before, after = None, None
        for turn in range(-(-calls // len(sentences))):
            if (number + turn) % 2:
                after, before = _call(new, sentence), _call(old, sentence)
            else:
                before, after = _call(old, sentence), _call(new, sentence)
            if before is None or after is None:
                break
            took.append((before[0], after[0]))
        failed[0] += before is None
        failed[1] += after is None
        if after is not None and files is not None:
            (told,) = files.utterance().score_sentences([sentence])
            wrong += not np.array_equal(told.token_log10_prob, after[1])
        if before is not None and after is not None and len(before[1]) == len(after[1]):
            differences += (after[1] - before[1]).tolist()
    old_ms, new_ms = np.median(took, axis=0).tolist() if took else (0.0, 0.0)
    return Comparison(
        len(sentences),
        failed[1],
        failed[0],
        wrong,
        old_ms,
        new_ms,
        tuple(after_ms / before_ms for before_ms, after_ms in took),
        float(np.mean(differences)) if differences else 0.0,
        max(differences, key=abs, default=0.0),
    )


def _call(client: Client, sentence: str) -> tuple[float, NDArray[np.float32]] | None:
    begun = time.perf_counter()
    try:
        (found,) = client.utterance().score_sentences([sentence])
    except DlmError:
        return None
    return 1e3 * (time.perf_counter() - begun), found.token_log10_prob


@dataclass(frozen=True, slots=True)
class RolloutPlaces:
    """The files that a roll-out may write (`cluster`, and the servers' list `sets`, or None if a
    configuration tool writes that list); the `folders` of the roll-out's two shard sets; and the
    `others` in the list, which stay unchanged."""

    cluster: AnyPath
    sets: AnyPath | None
    folders: Mapping[str, AnyPath]
    others: Sequence[AnyPath] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    old: Manifest
    new: Manifest


# ------------------------------------------------------------------------------ before it begins


@contextmanager
def only_one(cluster: AnyPath) -> Iterator[None]:
    """Raises `ConfigError` if another roll-out of `cluster` runs; for a URL, `edit` raises it."""
    if isinstance(cluster, RemotePath):
        yield
        return
    real = cluster.resolve()
    file = real.with_name(f".{real.name}.rollout")
    running = ConfigError(
        f"another dlm rollout of {cluster} is running. To go back, press Ctrl-C there, then run "
        "dlm rollout --undo; to continue, wait until it ends"
    )
    with locked(file, running, remove=True):
        yield


def models_served(
    toml: ClusterToml, connect: Callable[[str], Connection]
) -> tuple[dict[str, Manifest], str, frozenset[str]]:
    """Returns the shard sets that servers hold, the id of the set that new utterances get, and the
    models that the command's token names, if any. Raises ConfigError if no server answers, or none
    holds the default of cluster.toml."""
    census = take_census(toml.servers(), connect, CENSUS_S)
    held = {name: found.manifest for name, found in census.held.items()}
    if not held:
        raise ConfigError(
            f"no server in {toml.path} answers: {'; '.join(census.faults.values())}. Start the "
            "servers first"
        )
    default = census.choose(None, None, toml.model()).manifest.shard_set
    return held, default, frozenset(census.token_models)


def find_pair(
    toml: ClusterToml,
    new: Manifest | None,
    held: Mapping[str, Manifest],
    default: str,
    *,
    undo: bool,
) -> Pair:
    """Returns the models of the roll-out that cluster.toml describes; if it describes none, those
    of a roll-out to `new` (None for an undo). Raises ConfigError if another roll-out is under way,
    if there is none to undo, or if new utterances already use the new set."""
    under_way = toml.rollout()
    if under_way is None:
        if undo:
            raise ConfigError(
                f"{toml.path} describes no roll-out, so there is none to undo. To return to an "
                "earlier model, roll it out: dlm rollout DIR"
            )
        assert new is not None
        if default == new.shard_set:
            raise ConfigError(
                f"new utterances already use shard set {new.shard_set}; nothing is left to roll out"
            )
        return Pair(held[default], new)
    if new is not None and _named({new.shard_set: new}, under_way.model) is None:
        raise ConfigError(
            f"a roll-out of {under_way.model} is under way; finish it with the folder of that "
            f"model, or undo it (dlm rollout --undo) before you roll out {new.shard_set}"
        )
    found = new or _named(held, under_way.model)
    old = _named(held, under_way.replaces)
    if undo and old is None:
        raise ConfigError(
            f"no server holds shard set {under_way.replaces} any longer, and the servers' list "
            "does not give its folder, so the roll-out cannot be undone. Finish it with the folder "
            f"of {under_way.model}: dlm rollout DIR"
        )
    if found is None:  # the earlier run was killed before it told any server
        assert old is not None
        found = replace(old, shard_set=under_way.model)
    return Pair(old or replace(found, shard_set=under_way.replaces), found)


def manifests_of(sets: AnyPath | None) -> dict[str, Manifest]:
    """The manifests of the sets in the servers' list, including replaced ones."""
    folders = [] if sets is None else [*read_sets(sets), *replaced_sets(sets)]
    found = [manifest_of(one) for one in folders if (one / MANIFEST).is_file()]
    return {one.shard_set: one for one in found}


def _named(held: Mapping[str, Manifest], beginning: str) -> Manifest | None:
    found = [one for one in held.values() if is_named([beginning], one.model, one.shard_set)]
    return min(found, key=lambda one: not one.shard_set.startswith(beginning), default=None)


def check_pair(pair: Pair, endpoints: Sequence[Endpoint], *, other_words: bool) -> None:
    """Raises `ConfigError` if decoders, or the current servers, cannot use the new model."""
    old, new = pair.old, pair.new
    found = []
    if old.order != new.order:
        found.append(f"its order is {new.order}, but the served model's is {old.order}")
    if old.file("vocabulary").xxh3_128 != new.file("vocabulary").xxh3_128:
        found.append("its words have other ids")
    if found and not other_words:
        raise ConfigError(
            f"shard set {new.shard_set}: {'; '.join(found)}. Decoders that keep word ids or states "
            "from one utterance to the next would fail; if your decoders keep "
            "neither, add --other-words"
        )
    shards = {one.shard for one in endpoints if one.shard is not None}
    missing = sorted(set(range(new.shards)) - shards)
    if missing:
        raise ConfigError(
            f"shard set {new.shard_set} has {new.shards} shards, but cluster.toml lists no server "
            f"of shard {', '.join(map(str, missing))}. Add the set's folder to the servers' list, "
            "start servers of these shards with that list (dlm serve --sets FILE --shard N), and "
            "add them to cluster.toml"
        )


def not_needed(endpoints: Sequence[Endpoint], manifest: Manifest) -> tuple[str, ...]:
    """Returns the addresses of servers of shards that the set of `manifest` lacks."""
    return tuple(one.address for one in endpoints if (one.shard or 0) >= manifest.shards)


def check_token(named: frozenset[str], pair: Pair) -> None:
    """Raises `ConfigError` if the command's token allows some models, but not both of `pair`."""
    if not named:
        return
    missing = [
        one.model for one in (pair.old, pair.new) if not is_named(named, one.model, one.shard_set)
    ]
    if missing:
        raise ConfigError(
            f"the token of this command allows only model {', '.join(sorted(named))}, so servers "
            f"would hide model {' and '.join(missing)}. In the servers' token file, add the hidden "
            "model's id to models= for this token and for clients that will use that model; "
            "or give another --token-file"
        )


def check_files_whole(
    folder: Path, manifest: Manifest, available: Callable[[], int] = available_bytes
) -> None:
    """Raises `ConfigError` if a file is missing or incomplete, or if memory is too small."""
    for entry in manifest.files:
        path = folder / entry.name
        size = path.stat().st_size if path.is_file() else -1
        if size != entry.bytes:
            found = "is missing" if size < 0 else f"has {size} bytes"
            raise ConfigError(
                f"{path} {found}; the manifest says {entry.bytes} bytes. Copy the shard set again "
                "to a new folder, and rename the folder when the copy is complete"
            )
    wanted, free = sum(entry.bytes for entry in manifest.files), available()
    if wanted > free:
        raise ConfigError(
            f"{folder} needs {wanted >> 20} MiB of memory in addition to the model being served, "
            f"but only {free >> 20} MiB are free. Unload another model first, or use larger "
            "machines"
        )


def places_of(
    cluster: AnyPath,
    sets: AnyPath | None,
    pair: Pair,
    folder: AnyPath | None,
) -> RolloutPlaces:
    """Finds the folders of a roll-out's sets in the servers' list, and uses `folder` for the new
    set. Raises ConfigError if the list is invalid, or has neither of the sets."""
    folders = {pair.new.shard_set: folder.absolute()} if folder is not None else {}
    if sets is None:
        return RolloutPlaces(cluster, None, folders)
    others = []
    for left in replaced_sets(sets):  # servers were told to unload these sets
        if (left / MANIFEST).is_file():
            folders.setdefault(manifest_of(left).shard_set, left)
    listed = read_sets(sets)
    for one in listed:
        name = manifest_of(one).shard_set
        if name in (pair.old.shard_set, pair.new.shard_set):
            folders.setdefault(name, one)
        else:
            others.append(one)
    if len(others) == len(listed):
        raise ConfigError(
            f"{sets} lists neither shard set {pair.old.shard_set}, which is served, nor "
            f"{pair.new.shard_set}: the servers of this cluster use another list, or the "
            "served folder was replaced. Give the servers' list (--sets FILE)"
        )
    return RolloutPlaces(cluster, sets, folders, others)


# ----------------------------------------------------------------------------------- running


def seen(snapshot: ClusterSnapshot, pair: Pair) -> Seen:
    """Converts a snapshot of the servers to the form that `rollout.step` takes."""
    lacking: dict[str, tuple[str, ...]] = {}
    holding: dict[str, tuple[str, ...]] = {}
    busy = set()
    both = min(pair.old.shards, pair.new.shards)  # servers of further shards hold only one set
    for manifest in (pair.old, pair.new):
        name = manifest.shard_set
        rows = [row for row in snapshot.rows if (row.shard or 0) < manifest.shards]
        addresses = {row.address for row in rows}
        mine = [row for row in rows if row.shard_set == name[:ID_DIGITS]]
        able = {row.address for row in mine if row.state == "ready" and row.is_whole}
        lacking[name] = tuple(sorted(addresses - able))
        # If several processes share a port, a process that was not asked may still hold the set.
        maybe = [*mine, *(row for row in rows if row.alike != row.processes)]
        holding[name] = tuple(sorted({row.address for row in maybe if (row.shard or 0) < both}))
        if any(row.idle_s is None or row.idle_s < 2 * LOOK_S for row in mine):
            busy.add(name)
    answering = {row.shard for row in snapshot.rows if row.state == "ready"}
    silent = {row.address for row in snapshot.rows if row.state == "silent"}
    partly = {row.address for row in snapshot.rows if row.error is not None}
    if not answering:  # no server can report that a set is unused
        busy = {pair.old.shard_set, pair.new.shard_set}
    if set(range(max(pair.old.shards, pair.new.shards))) <= answering:
        answering.add(None)  # so that silent servers whose shard is not known are spared, too
    spared = {row.address for row in snapshot.rows if row.shard in answering} & silent
    processes = max((row.processes or 1 for row in snapshot.rows), default=1)
    return Seen(
        lacking, holding, frozenset(busy), tuple(sorted(partly)), frozenset(spared), processes
    )


class Rolling:
    """Runs a roll-out to its end, in this thread. The `given` credentials take precedence over
    those in cluster.toml."""

    def __init__(
        self,
        pair: Pair,
        places: RolloutPlaces,
        rules: Rules,
        given: ClientSecurity,
        tell: Callable[[str], None],
        *,
        sentences: Sequence[str] = (),
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pair, self._places, self._rules, self._given = pair, places, rules, given
        self._tell, self._pause, self._clock = tell, pause, clock
        self._sentences = list(sentences)
        self._clients: tuple[Client, Client, Client | None] | None = None
        self._stack, self._asking = ExitStack(), ExitStack()  # `_asking` holds the clients
        self._waited: tuple[str, ...] = ()
        self.last: Comparison | None = None
        self.ended: End | None = None
        self.written: list[str] = []

    def run(self, *, undo: bool) -> End:
        """Runs until the roll-out ends. If interrupted, it leaves the files as they are."""
        pair, rules = self._pair, self._rules
        toml = ClusterToml(self._places.cluster)
        security = self._given.over(toml.security())
        check_files(security)
        connect = partial(Connection, security=security)
        with self._stack:
            status = ClusterStatus(toml.servers(), connect, CENSUS_S, fresh=True)
            self._stack.callback(status.close)
            self._stack.enter_context(self._asking)
            state, actions = resumed(
                pair.old.shard_set, pair.new.shard_set, toml.rollout(), rules, self._clock()
            )
            if undo:
                state, actions = step(state, Undo(), rules, self._clock())
                self._check_known(state)
            self._tell_stage(state)
            silent_since: dict[str, float] = {}
            while True:
                state = self._carry_out(state, actions)
                if self.ended is not None:
                    return self.ended
                self._pause(LOOK_S)
                event, silent_since = lasting(
                    seen(status.poll(), pair), silent_since, self._clock()
                )
                self._tell_waiting(state, event)
                state, actions = self._next(state, event)

    def _check_known(self, state: Progress) -> None:
        places, old = self._places, self._pair.old.shard_set
        if state.stage is Phase.RELOAD and places.sets is not None and old not in places.folders:
            raise ConfigError(
                f"{places.sets} no longer lists the folder of shard set {old}, so servers could "
                "not load the set again; add the folder to the list, and repeat the command"
            )

    def _next(self, state: Progress, event: Event) -> tuple[Progress, Actions]:
        after, actions = step(state, event, self._rules, self._clock())
        if after.stage is not state.stage:
            if after.stage is Phase.COMPARE and isinstance(event, Seen) and event.missing(state):
                self._tell(f"continuing without {shown(event.missing(state))}, which is silent")
            self._tell_stage(after)
        if after.stage not in (Phase.COMPARE, Phase.SHARE):
            self._asking.close()  # closes the clients before their model is unloaded
            self._clients = None
        return after, actions

    def _carry_out(self, state: Progress, actions: Actions) -> Progress:
        for action in actions:
            if isinstance(action, TellServers):
                self._tell_servers(action)
            elif isinstance(action, TellClients):
                self._tell_clients(action)
            elif isinstance(action, Compare):
                state, more = self._next(state, Compared(self._compare()))
                state = self._carry_out(state, more)
            else:
                self.ended = action
                if action.failure and not state.failure:  # `_tell_stage` reports a state's failure
                    self._tell(action.failure)
                if action.silent:
                    self._tell(
                        f"{shown(action.silent)} did not answer and may still hold the set that "
                        "was to be unloaded. A server reads the list again when it resumes or "
                        "starts; check its state with dlm status"
                    )
        return state

    def _tell_servers(self, told: TellServers) -> None:
        places = self._places
        folders = [places.folders[one] for one in told.sets if one in places.folders]
        if places.sets is not None:
            left = [one for name, one in places.folders.items() if name not in told.sets]
            write_sets(places.sets, [*folders, *places.others], left)
            return
        lines = [str(places.folders.get(one, f"(folder of {one})")) for one in told.sets]
        self._tell("the file of each server (dlm serve --sets FILE) must list, in this order:")
        for line in lines:
            self._tell(f"  {line}")

    def _tell_clients(self, told: TellClients) -> None:
        places = self._places
        share = "ends" if told.rollout is None else f"share {told.rollout.share:g}"
        edit(
            places.cluster,
            lambda toml: edited(toml.text, told.model, told.rollout),
            f"dlm rollout: default {told.model[:ID_DIGITS]}, {share}",
        )
        if told.rollout is None and places.sets is not None and replaced_sets(places.sets):
            # The roll-out is over: the list keeps no replaced sets except those of this roll-out.
            pair, listed = self._pair, read_sets(places.sets)
            before = (places.folders.get(one.shard_set) for one in (pair.old, pair.new))
            write_sets(places.sets, listed, [one for one in before if one and one not in listed])
        if places.sets is None and not isinstance(places.cluster, RemotePath):
            self._tell(f"copy {places.cluster} to the clients' hosts")

    def _compare(self) -> Comparison:
        old, new, files = self._clients or self._connect()
        found = compare(old, new, files, self._sentences)
        if self._rules.is_slow(found):
            self._tell("the new model seems slow; it is measured again")
            found = compare(old, new, files, self._sentences)
        self.last = found
        self._tell(
            f"compared {found.sentences} sentences: median {found.old_ms:.2f} ms old, "
            f"{found.new_ms:.2f} ms new; failed {found.old_failed} old, {found.failed} new; "
            f"a word's log10 P differs by {found.difference:+.3f} on average, at most by "
            f"{found.largest:+.3f}"
        )
        return found

    def _connect(self) -> tuple[Client, Client, Client | None]:
        cluster, pair = self._places.cluster, self._pair
        config = ClientConfig(deadline_s=5.0, **asdict(self._given))
        old, new = (
            self._asking.enter_context(Client.connect(cluster, config, model=one.shard_set))
            for one in (pair.old, pair.new)
        )
        files, folder = None, self._places.folders.get(pair.new.shard_set)
        if isinstance(folder, Path) and all(
            (folder / one.name).is_file() for one in pair.new.files
        ):
            files = self._asking.enter_context(Client.local(folder, verify=False))
        if not self._sentences:
            self._sentences = sample(old)
        # This first comparison opens the connections, and makes the first look-ups.
        compare(old, new, files, self._sentences[:4], calls=1)
        self._clients = old, new, files
        return self._clients

    def _tell_waiting(self, state: Progress, event: Seen) -> None:
        missing = event.missing(state)
        if missing and missing != self._waited and self._clock() - state.since >= TELL_S:
            self._waited = missing
            self._tell(f"still waiting for {shown(missing)}")

    def _tell_stage(self, state: Progress) -> None:
        rules = self._rules
        text = {
            Phase.LOAD: "servers load the new set beside the old one",
            Phase.COMPARE: "comparing both on sampled sentences",
            Phase.SHARE: f"{100 * rules.share:g} % of new utterances get the new model, for "
            f"{rules.watch_for:g} s",
            Phase.ALL: f"all new utterances get the new model; the old one is unloaded after "
            f"{rules.idle:g} s without a message, or after {rules.longest:g} s",
            Phase.UNLOAD: "servers unload the old set",
            Phase.RELOAD: "servers load the old set again",
            Phase.RETREAT: "new utterances get the old model; the new one is unloaded after "
            f"{rules.idle:g} s without a message, or after {rules.longest:g} s",
            Phase.CLEAR: "servers unload the new set",
            Phase.ENDED: "ended",
        }[state.stage]
        if state.failure and state.stage in (Phase.RETREAT, Phase.CLEAR):
            text = f"{state.failure}: {text}"
        if state.stage is not Phase.ENDED:
            self._tell(text)
