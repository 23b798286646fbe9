"""The condition on a stage's input: a record, or somebody's attestation that it is public."""

from __future__ import annotations

from pathlib import Path

from dlm.errors import PrivacyError
from dlm.record.counts_file import traces_of_users
from dlm.record.provenance import Provenance

ASSUMED = "nobody: a simulation assumes it is public"  # who attests that an input is public


def record_or_word(
    path: Path,
    what: str,
    record: Provenance | None,
    *,
    by: str,
    setting: str,
    sha256: str,
    promises: bool,
    simulated: bool,
) -> Provenance | None:
    """Returns an input's record, or an attestation that the input contains no user's text.

    Args
        what       the input in words, such as "the vocabulary words.txt"
        by         who attests that the input is public; "" if nobody does
        setting    the setting that names this person, such as "data.public"
        promises   whether the output should have a guarantee
        simulated  whether the run is simulated; if so, an input without a record counts as public
    Raises
        PrivacyError  an input declared public has users' files beside it; or the output should have
                      a guarantee, but the input has no attestation, and no record with a guarantee
    """
    if by and not (record is not None and record.is_public):
        check_public(path, by, setting)
        return Provenance.public(by, what, sha256)
    if record is None and promises:
        raise PrivacyError(
            f"{what} has no privacy record, so nothing made with it would have a guarantee. If it "
            f"contains no user's text, set {setting} to the name of the person who attests it; "
            "otherwise use an input with a record (from dlm unigrams or dlm pieces)"
        )
    if record is not None and promises:
        refuse_without_guarantee(what, record)
    if record is None and simulated:
        return Provenance.public(ASSUMED, what, sha256)
    return record


def check_public(path: Path, by: str, setting: str) -> None:
    """Raises PrivacyError if a file beside a "public" input shows that users' text was counted."""
    if beside := traces_of_users(path):
        raise PrivacyError(
            f"{setting} is {by!r}, but {beside[0]} says that {path} comes from users; leave "
            f"{setting} out"
        )


def refuse_without_guarantee(what: str, record: Provenance) -> None:
    """Raises PrivacyError if a record has no guarantee: privacy would be spent for nothing."""
    if record.guarantee is None:
        raise PrivacyError(
            f"{what} has no guarantee ({'; '.join(record.reasons)}), so nothing made with it would "
            "have one. Use an input that has a guarantee (from dlm unigrams with noise, or from "
            "dlm pieces on its counts) or is declared public, or simulate the run"
        )
