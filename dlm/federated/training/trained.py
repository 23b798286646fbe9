"""Loads a trained network from its run's files; converts JAX trees to plain arrays and back."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dlm import checkpoint
from dlm.checkpoint import CHECKPOINT, Arrays, check_shapes
from dlm.errors import FormatError
from dlm.federated.run.run_folder import RunFolder
from dlm.federated.training import rnn
from dlm.federated.training.rounds import OptimizerConfig, TrainingState
from dlm.federated.training.settings import ModelSettings
from dlm.federated.words import RunVocabulary
from dlm.record.lookup import record_in
from dlm.record.provenance import Provenance
from dlm.record.signature import require_signed


@dataclass(frozen=True)
class TrainedModel:
    """A trained network after the last round that counts, with its privacy record, which covers all
    planned rounds while some remain. `vocabulary` is None if the encoder has neither words nor
    pieces."""

    network: rnn.RnnConfig
    params: rnn.Params
    vocabulary: RunVocabulary | None
    record: Provenance
    rounds: int


def why_diverged(folder: RunFolder) -> str:
    """Says why the run in a folder ended early; "" if it did not, or has not begun."""
    if not folder.has_begun:
        return ""
    return str(checkpoint.read(folder.path / CHECKPOINT).facts["state"].get("over", ""))


def load_model(
    run: str | os.PathLike[str], *, public_key: str | os.PathLike[str] | None = None
) -> TrainedModel:
    """Loads the network of a run's folder or checkpoint, with its vocabulary and its record, which
    stays unverified without a public key.

    Raises
        FormatError   the checkpoint is damaged or has another version
        PrivacyError  the record belongs to another file or was changed, or the key did not sign it
    """
    run = Path(run)
    place = run / CHECKPOINT if run.is_dir() else run
    content = place.read_bytes()  # read once: the verified bytes are the loaded ones
    found = checkpoint.parse(content, place)
    settings = found.settings
    try:
        network = ModelSettings(**settings["model"]).network(settings["vocab_size"])
        server, rounds = OptimizerConfig(**settings["server"]), int(found.facts["round"])
    except (KeyError, TypeError, ValueError) as exc:
        raise FormatError(
            f"{place} does not contain a network from dlm federate ({exc!r}); give a run's folder"
        ) from exc
    params = rnn.init(jax.random.key(0), network)
    moments = server.transformation().init(params)
    zero = jnp.float32(0.0)
    template = TrainingState(jnp.int32(0), params, moments, zero, zero, None)
    state: TrainingState = rebuilt(found.arrays, template, found.path)
    record = record_in(found)
    if public_key is not None:
        record = require_signed(place, Path(public_key), content)
    vocabulary = None
    if (words := found.attachments.get("vocabulary")) is not None:
        vocabulary = RunVocabulary.from_bytes(words, record)
    return TrainedModel(network, state.params, vocabulary, record, rounds)


def leaves(tree: Any) -> list[npt.NDArray[Any]]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def rebuilt(arrays: Arrays, template: Any, place: Path) -> Any:
    """Returns a tree like `template` with `arrays` as its leaves. Raises FormatError if the arrays
    have other shapes."""
    check_shapes(arrays, leaves(template), place)
    old, shape = jax.tree.flatten(template)
    found = [
        # A NumPy array stays a NumPy array, since JAX has no 64-bit types.
        array if isinstance(leaf, np.ndarray | np.generic) else jnp.asarray(array)
        for leaf, array in zip(old, arrays, strict=True)
    ]
    return jax.tree.unflatten(shape, found)
