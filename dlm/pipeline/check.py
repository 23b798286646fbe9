"""Finds, before a pipeline's first stage, faults that would stop it only after hours."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from dlm.distill import files as distilling
from dlm.errors import ConfigError
from dlm.estimate.prune import run as pruning
from dlm.federated.counting.count_unigrams import list_record
from dlm.federated.counting.unigrams import read_wordlist
from dlm.federated.tokens import FIRST_WORD_ID
from dlm.federated.training.settings import TrainingSettings
from dlm.federated.users import count_users
from dlm.federated.words import RunVocabulary
from dlm.index.making import budget as sharding
from dlm.kenlm.open import open_ngrams
from dlm.pipeline.check_inputs import check_inputs, topology_records
from dlm.pipeline.settings import PipelineSettings, about
from dlm.pipeline.user_stages import check_populations, check_vouched
from dlm.record.counts_file import read_counts
from dlm.resources import check_disk
from dlm.units import counted

COMPRESSED = 5  # a text is about this many times as large as its compressed file
PLAIN = ("", ".txt", ".tsv", ".arpa")


def check(settings: PipelineSettings) -> None:
    """Checks that inputs are readable and, if needed, attested public, and that the disk has room.
    Raises what a stage would have raised, and ModuleNotFoundError without the extra `train`."""
    import dp_accounting  # noqa: F401

    import dlm.federated.training.train  # noqa: F401

    for name, path in settings.inputs.files().items():
        if not path.exists():
            raise ConfigError(f"inputs.{name}: {path} does not exist; give an existing file")
        # Stages read the inputs several times, so a pipe would block or be empty.
        if not path.is_file() and not (name == "topology" and path.is_dir()):
            raise ConfigError(f"inputs.{name}: {path} is a folder, a pipe or a device; give a file")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"inputs.{name}: {path} cannot be read: permission denied")
    text = settings.federate.pretrain.text
    if text and not (Path(text).is_file() and os.access(text, os.R_OK)):
        raise ConfigError(f"federate.pretrain.text: {text} is not a file that can be read")
    with about("inputs"):
        check_inputs(settings)
    if settings.unigrams is not None and settings.inputs.wordlist is not None:
        wordlist = settings.inputs.wordlist
        list_record(wordlist, wordlist.read_bytes(), settings.unigrams, setting="[inputs] public")
    check_vouched(settings)
    _check_training(settings.federate)
    _check_vocabulary(settings)
    _check_models(settings)
    if settings.pieces is not None:
        import sentencepiece  # noqa: F401

        if settings.inputs.vocabulary is not None:
            read_counts(settings.inputs.vocabulary)
    folder = settings.run.folder
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.folder: {folder} is a file; give a folder")
    held = _bytes_in(folder)
    needed = max(needed_bytes(settings) - held, 0)
    check_disk(folder, needed, "this pipeline", advice="another [run] folder")


def check_users(settings: PipelineSettings) -> int:
    """Counts the users in one pass over their file; ConfigError if the rounds have too few. A share
    to hold out is ignored: it is not yet known which users it takes."""
    inputs = settings.inputs
    with about("inputs"):
        found = count_users(inputs.users, inputs.user_column, inputs.text_column)
    check_populations(settings, found, lambda share, name: found)
    return found


def _bytes_in(folder: Path) -> int:
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += (Path(place) / name).lstat().st_size
    return found


def voids(settings: PipelineSettings) -> list[str]:
    """Says why the final model will have no guarantee, as far as the settings show."""
    inputs, found = settings.inputs, []
    if settings.run.seed is not None:
        found.append("run.seed is set, so the stages that use users' text are a simulation")
    if settings.unigrams is not None and settings.unigrams.noise_multiplier is None:
        found.append("unigrams.noise_multiplier is not set, so words are counted without noise")
    if settings.federate.privacy.mechanism == "none":
        found.append('federate.privacy.mechanism is "none", so training is without noise')
    if not inputs.public:
        if inputs.text is not None:
            found.append(f"nobody has attested that {inputs.text} is public (inputs.public)")
        elif inputs.topology is not None and not topology_records(inputs.topology):
            found.append(
                f"{inputs.topology} has no privacy record, and nobody has attested that it is "
                "public (inputs.public)"
            )
    if inputs.topology is not None:
        found += [
            f"the record of {inputs.topology} has no guarantee: {'; '.join(record.reasons)}"
            for record in topology_records(inputs.topology)
            if record.guarantee is None
        ]
    return found


def needed_bytes(settings: PipelineSettings) -> int:
    inputs = settings.inputs
    users = _plain_bytes(inputs.users)
    needed = 3 * users  # the sorted store, and twice that during sorting
    words = _words(settings)
    if words is not None:
        needed += 2 * _state_bytes(settings, words)
    if inputs.text is not None:
        text = _plain_bytes(inputs.text)
        order = settings.estimate.order if settings.estimate is not None else 1
        return needed + 12 * order * text
    if inputs.topology is not None:
        with open_ngrams(inputs.topology) as reader:
            counts = tuple(reader.counts)
        arpa = 40 * sum(counts)
        needed += 2 * arpa + sharding.output_bytes(counts) + sharding.spill_bytes(counts)
    return needed


def _check_training(settings: TrainingSettings) -> None:
    """Checks the training settings before users are counted, by building what needs no users."""
    from dlm.federated.training.train import mechanism_of

    with about("federate.privacy", "federate.sampling"):
        release = settings.privacy.release(settings.sampling.users_a_round(1))
        mechanism_of(settings, release)
    with about("federate.model"):
        settings.model.network(FIRST_WORD_ID + 1)
    with about("federate.server"):
        settings.server.transformation()


def _check_models(settings: PipelineSettings) -> None:
    """Checks that the topology's order and the memory suffice for the stages after training."""
    if settings.inputs.topology is not None:
        with open_ngrams(settings.inputs.topology) as reader:
            counts = tuple(reader.counts)
    else:
        assert settings.estimate is not None
        counts = (1,) * settings.estimate.order  # the smallest counts that a model can have
    least = max(distilling.needed_bytes(counts), sharding.least_bytes((1,)))
    if settings.prune is not None:
        numbers = settings.prune.goal.by_order
        if numbers is not None and len(numbers) != len(counts):
            raise ConfigError(
                f"prune.ngrams has numbers for {counted(len(numbers), 'order')}, but the model "
                f"will have {len(counts)}: give one entry per order, from order 1 up, with - for "
                "no limit"
            )
        one = (1,) * len(counts)
        least = max(least, min(pruning.needed_bytes(one), pruning.least_bytes(one)))
    limit = settings.run.memory_bytes
    if limit is not None and limit < least:
        raise ConfigError(
            f"run.memory is {settings.run.memory!r}; the stages after training need at least "
            f"{least:,} bytes. Raise run.memory, or leave it out to use the free memory"
        )


def _state_bytes(settings: PipelineSettings, words: int) -> int:
    from dlm.federated.training.rnn import network_size

    numbers = network_size(settings.federate.model.network(words))
    privacy, rounds = settings.federate.privacy, settings.federate.run.rounds
    buffers = {
        "none": 0,
        "gaussian": 0,
        "blt": privacy.buffers,
        "bandmf": privacy.bands or privacy.gap,
        "bandtoep": privacy.bands or privacy.gap,
        "bandfhu": privacy.bands or privacy.gap,
    }.get(privacy.mechanism, rounds.bit_length() + 1)
    return numbers * (12 + 8 * buffers)


def _words(settings: PipelineSettings) -> int | None:
    size = settings.federate.data.vocabulary_size
    if size:
        return size
    if settings.pieces is not None:
        return settings.pieces.size
    if settings.inputs.wordlist is not None:
        return len(read_wordlist(settings.inputs.wordlist))
    if settings.inputs.vocabulary is not None:
        return RunVocabulary.read(settings.inputs.vocabulary).size
    return None


def _check_vocabulary(settings: PipelineSettings) -> None:
    size, wordlist = settings.federate.data.vocabulary_size, settings.inputs.wordlist
    if wordlist is not None and size > len(words := read_wordlist(wordlist)):
        raise ConfigError(
            f"federate.data.vocabulary_size is {size:,}, but {wordlist} has only "
            f"{counted(len(words), 'word')}; "
            "give a longer list or a smaller vocabulary_size"
        )


def _plain_bytes(path: Path) -> int:
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    return sum(f.stat().st_size * (1 if f.suffix in PLAIN else COMPRESSED) for f in files)
