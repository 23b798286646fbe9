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
        path       of the input
        what       its name, such as "the vocabulary words.txt"
        record     its record; None without one
        by         who says that it is public; "" if nobody does
        setting    the setting for that, such as "data.public"
        promises   whether the output should have a guarantee
        simulated  a simulation has no guarantee, and its figures assume that the input is public
    Raises
        PrivacyError  it is declared public, and files beside it come from users; the output should
                      have a guarantee, but neither is given or the record has none
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
    """Checks that no file beside an input that is declared public comes from users.

    Raises  PrivacyError  one does
    """
    if beside := traces_of_users(path):
        raise PrivacyError(
            f"{setting} is {by!r}, but {beside[0]} says that {path} comes from users; leave "
            f"{setting} out"
        )


def refuse_without_guarantee(what: str, record: Provenance) -> None:
    """Checks that an input's record has a guarantee.

    Raises
        PrivacyError  it has none, so users' privacy would be spent on output without a guarantee
    """
    if record.guarantee is None:
        raise PrivacyError(
            f"{what} has no guarantee ({'; '.join(record.reasons)}), so nothing made with it would "
            "have one. Use one that has (dlm unigrams with noise, dlm pieces of such counts) or "
            "that somebody says is public, or simulate the run"
        )
