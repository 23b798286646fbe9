"""Makes wordpieces from a file of counts, with their record, for `dlm pieces`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from dlm.errors import ConfigError
from dlm.federated.pieces.inventory import Inventory, build_inventory
from dlm.federated.pieces.settings import PieceSettings
from dlm.federated.words import PIECES_SUFFIX
from dlm.record.counts_file import read_counts, traces_of_users
from dlm.record.provenance import Provenance, content_digest
from dlm.record.signature import require_signed


@dataclass(frozen=True)
class MadePieces:
    """The inventory that was made, and its mean number of pieces per word, weighted by use."""

    inventory: Inventory
    per_word: float


def make_pieces(
    counts: Path,
    settings: PieceSettings,
    output: Path,
    *,
    public: str | None = None,
    public_key: Path | None = None,
) -> MadePieces:
    """Builds an inventory from the words of `counts`, and writes it, with its record, to `output`.
    Raises what `read_counts`, `require_signed` and `build_inventory` raise; also ConfigError if
    users' counts are declared public, or if `public` and `public_key` are both given."""
    # Check arguments before the long estimation, and before any output is replaced.
    _check_name(output)
    if public is not None and (beside := traces_of_users(counts)):
        raise ConfigError(
            f"--public-attested-by was given, but {beside[0]} says that {counts} comes from users; "
            "leave --public-attested-by out"
        )
    if public is not None and public_key is not None:
        raise ConfigError(
            "--public-attested-by and --public-key were both given, but public counts have no "
            "record; give only one"
        )
    content = counts.read_bytes()  # read once: pieces are made from the verified bytes
    found = read_counts(counts, content)
    if public_key is not None:
        signed = require_signed(counts, public_key, content)
        found = dataclasses.replace(found, provenance=signed)
    if public is not None:
        said = Provenance.public(public, f"the counts {counts.name}", content_digest(content))
        found = dataclasses.replace(found, provenance=said)
    inventory = build_inventory(found, settings.size, max_piece_length=settings.max_length)
    inventory.save(output)
    return MadePieces(inventory, inventory.pieces_per_word(found))


def _check_name(output: Path) -> None:
    if output.suffix != PIECES_SUFFIX:
        raise ConfigError(
            f"--output is {output}; expected a name that ends in {PIECES_SUFFIX}, since dlm "
            "federate recognises wordpieces by this ending"
        )
