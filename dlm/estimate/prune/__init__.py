"""Relative-entropy pruning: a model without the n-grams that matter least."""

from dlm.estimate.goal import Goal
from dlm.estimate.prune.criterion import ln_histories, own_scores, raised_scores
from dlm.estimate.prune.files import PrunedFile, prune_file
from dlm.estimate.prune.measure import PerplexityChange, measure
from dlm.estimate.prune.renormalise import new_weights
from dlm.estimate.prune.run import PruneResult, file_bytes, least_bytes, needed_bytes, prune

__all__ = [
    "Goal",
    "PerplexityChange",
    "PruneResult",
    "PrunedFile",
    "file_bytes",
    "least_bytes",
    "ln_histories",
    "measure",
    "needed_bytes",
    "new_weights",
    "own_scores",
    "prune",
    "prune_file",
    "raised_scores",
]
