"""Settings of decoding and of rescoring."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlm.config import check, setting

MIN_WEIGHT = 1e-6  # minimum weight of LM scores with phrases: bonuses are divided by the weight


@dataclass(frozen=True)
class BeamSettings:
    """Weights and pruning of the beam search for words: the options of `dlm transcribe`."""

    lm_weight: float = setting(
        2.0,
        "Weight of the model's log10 P relative to the acoustic ln P.",
        low=0,
        why="2 is best for read English speech and a 5-gram; use less (1.5) with a poor model.",
    )
    word_score: float = setting(0.0, "Score added per word; above 0 favours short words.")
    hypotheses: int = setting(
        100,
        "Beam width: hypotheses to keep at a time.",
        low=1,
        metavar="N",
        why="500 hypotheses take five times as long as 100, for 3 % fewer errors.",
    )
    labels: int = setting(25, "Number of most probable labels to try per frame.", low=1)
    threshold: float = setting(
        30.0,
        "Drop hypotheses that are this far (natural log) below the best one.",
        above=0,
        high=math.inf,
    )
    nbest: int = setting(1, "Sentences per segment, with --json.", low=1, metavar="N")

    def __post_init__(self) -> None:
        check("transcribe", self)


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """How a lattice is searched: the options of `dlm rescore`.

    An arc's LM score becomes new_weight * new + old_weight * old. Weights 1 and 0 replace the old
    score; 0.5 and 0.5 interpolate logarithms; -1 and 1 subtract a model from Kaldi's graph scores.
    """

    new_weight: float = setting(1.0, "Weight of the model's scores.")
    old_weight: float = setting(0.0, "Weight of the LM scores in IN.")
    beam: float = setting(
        10.0,
        "Pruning beam, in LM scores; inf searches exactly.",
        above=0,
        high=math.inf,
        why="How far a hypothesis may be below the best at its position, in unscaled natural logs.",
    )
    hypotheses: int | None = setting(
        None, "Hypotheses to keep per position; all by default.", low=1, metavar="N"
    )

    def __post_init__(self) -> None:
        check("rescore", self)

    @property
    def exact(self) -> bool:
        """Whether no hypothesis is ever dropped."""
        return self.beam == math.inf and self.hypotheses is None
