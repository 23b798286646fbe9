"""What a stage asks of an input: a record, or somebody's word that it is public."""

from __future__ import annotations

from pathlib import Path

from dlm.errors import PrivacyError
from dlm.record.counts_file import traces_of_users
from dlm.record.provenance import Provenance

ASSUMED = "nobody: a simulation takes it to be"  # who says that it is public


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
    """The record of an input, or somebody's word that no user's text is in it.

    Args
        what       the input in words, such as "the vocabulary words.txt"
        by         who says that it is public; "" if nobody does
        setting    the setting for that, such as "data.public"
        promises   whether the output should have a guarantee
        simulated  no guarantee, and an input without a record is taken to be public
    Raises
        PrivacyError  declared public beside files that come from users; or the output should have a
                      guarantee, and neither is given or the record has none
    """
    if by and not (record is not None and record.is_public):
        check_public(path, by, setting)
        return Provenance.public(by, what, sha256)
    if record is None and promises:
        raise PrivacyError(
            f"{what} has no privacy record, so nothing made with it would have a guarantee. If it "
            f"contains no user's text, set {setting} to the name of who says so; otherwise use one "
            "with a record (dlm unigrams, dlm pieces)"
        )
    if record is not None and promises:
        refuse_without_guarantee(what, record)
    if record is None and simulated:
        return Provenance.public(ASSUMED, what, sha256)
    return record


def check_public(path: Path, by: str, setting: str) -> None:
    """Raises PrivacyError if a file beside an input that is declared public comes from users."""
    if beside := traces_of_users(path):
        raise PrivacyError(
            f"{setting} is {by!r}, but {beside[0]} says that {path} comes from users; leave "
            f"{setting} out"
        )


def refuse_without_guarantee(what: str, record: Provenance) -> None:
    """Raises PrivacyError without a guarantee: privacy would be spent on output that has none."""
    if record.guarantee is None:
        raise PrivacyError(
            f"{what} has no guarantee ({'; '.join(record.reasons)}), so nothing made with it would "
            "have one. Use one that has (dlm unigrams with noise, dlm pieces of such counts) or "
            "that is declared public, or simulate the run"
        )
