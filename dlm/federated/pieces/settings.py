"""Settings of wordpieces."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlm.config import about, check, setting


@dataclass(frozen=True)
class PieceSettings:
    size: int = field(
        metadata=about(
            "Number of pieces, including <unk>, <s> and </s>, such as 4000 or 16000.", low=4
        )
    )
    max_length: int = setting(
        16,
        "Maximum characters per piece.",
        low=1,
        high=512,
        why="Default and bound are SentencePiece's.",
    )

    def __post_init__(self) -> None:
        check("pieces", self)
