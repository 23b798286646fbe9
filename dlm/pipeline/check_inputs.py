"""Checks that a pipeline's inputs are what they are declared to be, and fit together, before users
are counted."""

from __future__ import annotations

from pathlib import Path

from dlm.errors import ConfigError, PrivacyError
from dlm.estimate.text import Reader
from dlm.federated.counting.unigrams import read_wordlist
from dlm.federated.users import check_columns
from dlm.federated.words import RunVocabulary, WordList
from dlm.kenlm.open import open_ngrams
from dlm.kenlm.reader import KENLM
from dlm.ngram.vocab import as_bytes
from dlm.pipeline.settings import PipelineSettings
from dlm.record.inputs import check_public
from dlm.record.provenance import Provenance, is_record_line


def check_inputs(settings: PipelineSettings) -> None:
    """Checks that inputs are complete, and that topology or text shares a word with the network.

    Raises what reading them raises; also ConfigError if `users` and `held_out` are one file, and
    PrivacyError for users' text, or a file with a record of users, that is declared public.
    """
    inputs = settings.inputs
    _check_apart(settings)
    for path in filter(None, (inputs.users, inputs.held_out)):
        check_columns(path, inputs.user_column, inputs.text_column)
    for shared in filter(None, (inputs.text, inputs.topology)):
        if inputs.public:
            check_public(shared, inputs.public, "[inputs] public")
    if inputs.topology is not None:
        topology_records(inputs.topology)
    _check_words(settings)


def topology_records(arpa: Path) -> list[Provenance]:
    """The records in the header of an ARPA file; raises what `Provenance.from_json` does.
    KenLM's files have none."""
    with open_ngrams(arpa) as reader:
        lines = [line for line in reader.comments if is_record_line(line)]
    return [Provenance.from_json(line, f"the record in {arpa}") for line in lines]


def _check_apart(settings: PipelineSettings) -> None:
    inputs = settings.inputs
    of_users = {"users": inputs.users, "held_out": inputs.held_out}
    others = {f"inputs.{name}": path for name, path in inputs.files().items()}
    if settings.federate.pretrain.text:
        others["federate.pretrain.text"] = Path(settings.federate.pretrain.text)
    for user_name, users in of_users.items():
        for name, path in others.items():
            if users is None or name == f"inputs.{user_name}" or not path.samefile(users):
                continue
            if name == "inputs.held_out":
                raise ConfigError(
                    f"inputs.held_out and inputs.users are the same file, {path}; a model must be "
                    "evaluated on people that it has not learned from. Give other held-out users, "
                    "or none"
                )
            if name != "inputs.users":
                raise PrivacyError(
                    f"{name} and inputs.{user_name} are the same file, {path}; users' text is not "
                    f"public. Give {name} another file"
                )


def _check_words(settings: PipelineSettings) -> None:
    """Checks that n-grams or text share a word with the network, unless it has wordpieces."""
    inputs = settings.inputs
    words = None if settings.pieces is not None else _words(settings)
    if inputs.topology is not None:
        with open_ngrams(inputs.topology) as reader:
            # Reads to the end, to detect a truncated file; a KenLM file's header tells its size.
            if reader.compression != KENLM:
                for _ in reader.batches():
                    pass
            given = set(reader.vocabulary.words)
        if words is not None and not words & given:
            raise ConfigError(_foreign("inputs.topology", inputs.topology, settings))
    if inputs.text is not None and words is not None and not _has_a_word(settings, words):
        raise ConfigError(_foreign("inputs.text", inputs.text, settings))


def _words(settings: PipelineSettings) -> set[bytes] | None:
    inputs = settings.inputs
    if inputs.wordlist is not None:
        return set(map(as_bytes, read_wordlist(inputs.wordlist)))
    assert inputs.vocabulary is not None
    words = RunVocabulary.read(inputs.vocabulary).words
    return set(map(as_bytes, words.words)) if isinstance(words, WordList) else None


def _has_a_word(settings: PipelineSettings, words: set[bytes]) -> bool:
    given, text = settings.estimate, settings.inputs.text
    assert given is not None
    reader = Reader([str(text)], skip=given.skip, column=given.column)
    blocks = (block.lines for block in reader.read() if block.size)
    return any(not words.isdisjoint(lines.split()) for lines in blocks)


def _foreign(name: str, path: Path, settings: PipelineSettings) -> str:
    inputs = settings.inputs
    source = "wordlist" if inputs.wordlist is not None else "vocabulary"
    return (
        f"{name}: {path} has none of the words of inputs.{source}, so the model could use none of "
        "its n-grams; give text in the same language, spelling and case (inputs.tokenizer is "
        f"{inputs.tokenizer!r})"
    )
