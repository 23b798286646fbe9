"""Every error that dlm raises on purpose.

::

    DlmError
    ├── ConfigError            a setting is wrong; nothing was attempted
    ├── FormatError            a file is not what it should be
    │   ├── ArpaError          ... an ARPA file
    │   ├── KenlmFormatError   ... a KenLM binary file
    │   ├── ShardFormatError   ... a shard set, its manifest or one of its files
    │   ├── LatticeError       ... a lattice, or an n-best list
    │   ├── TextError          ... text: a faulty line, or a stream that does not decompress
    │   ├── AudioError         ... audio: empty, too short, damaged, of an unknown format
    │   └── SpillError         ... a sorted run, which a sort writes when memory is short
    ├── EstimationError        a model cannot be estimated from these counts, or from this text
    │   ├── TrainingDiverged   ... a network became worse than guessing during training
    │   └── SourceError        ... the source of distillation gives no distribution of words
    ├── PrivacyError           a privacy guarantee cannot be given
    ├── QueryError             the caller's query has no answer
    │   └── ModelMismatch      a state of one model was given to another
    ├── UnavailableError       no answer in time (`retryable`: trying again may help)
    │   ├── ShardDown          ... the shard server cannot be reached
    │   │   └── ClientClosed   ... this client was closed
    │   ├── DeadlineExceeded   ... the deadline passed
    │   ├── Overloaded         ... refused because of load, by the server or by this client
    │   ├── StaleShardSet      ... the servers hold another shard set now
    │   └── ModelSwitched      ... the client switched to its local fallback meanwhile
    ├── AuthenticationError    the server does not let this client in; a retry does not help
    └── ProtocolError          a peer broke the contract of proto/README.md
        └── UnknownCall        ... or follows an older contract, which lacks this call

A message says what was found, what was expected, where, and what to do.
"""

from __future__ import annotations


class DlmError(Exception):
    """Base of every error that dlm raises on purpose."""


class ConfigError(DlmError):
    """A setting is wrong; nothing was attempted."""


class FormatError(DlmError):
    """A file does not have the expected format."""


class ArpaError(FormatError):
    """An ARPA file is malformed. Attributes that do not apply are None.

    `order` is the section the fault is in, `line` is 1-based, `byte_offset` counts from the
    start of the *decompressed* text to the start of that line.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        order: int | None = None,
        line: int | None = None,
        byte_offset: int | None = None,
        advice: str | None = None,
    ) -> None:
        self.path = path
        self.order = order
        self.line = line
        self.byte_offset = byte_offset
        self.advice = advice
        place = []
        if order is not None:
            place.append(f"{order}-grams")
        if line is not None:
            place.append(f"line {line}")
        if byte_offset is not None:
            place.append(f"byte {byte_offset}")
        text = message
        if path is not None or place:
            text += " (" + ", ".join(([path] if path is not None else []) + place) + ")"
        if advice:
            text += f". {advice}"
        super().__init__(text)


class KenlmFormatError(FormatError):
    """A KenLM binary file is damaged, incomplete, or of another version, kind or byte order.

    `section` is the part with the fault, such as "header" or "3-grams"; `byte_offset` is the place
    of the fault in the file, or None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        section: str = "",
        byte_offset: int | None = None,
        advice: str = "",
    ) -> None:
        self.path = path
        self.section = section
        self.byte_offset = byte_offset
        self.advice = advice
        place = f"{path}, {section}" + ("" if byte_offset is None else f", byte {byte_offset}")
        # The message of an unpickled error already contains the place and the advice.
        super().__init__(f"{message} ({place}). {advice}" if section else message)


class ShardFormatError(FormatError):
    """A shard set, its manifest or one of its files is damaged, incomplete or of another format."""


class SpillError(FormatError):
    """A sorted run on disk is damaged or incomplete: the working folder, not a model, is lost."""


class LatticeError(FormatError):
    """A lattice or an n-best list is malformed; `line` is 1-based, None where it does not apply."""

    def __init__(self, message: str, *, path: str | None = None, line: int | None = None) -> None:
        self.path = path
        self.line = line
        place = [*([] if path is None else [path]), *([] if line is None else [f"line {line}"])]
        super().__init__(f"{', '.join(place)}: {message}" if place else message)


class EstimationError(DlmError):
    """A model cannot be estimated from these counts, or from this text."""


class TextError(FormatError, EstimationError):
    """An input is not text, does not decompress, or has a line that is not a sentence."""


class AudioError(FormatError):
    """An audio file is empty, too short, damaged, or of a format that cannot be read."""


class TrainingDiverged(EstimationError):
    """A network became worse than guessing during training; completed rounds are kept."""


class SourceError(EstimationError):
    """The source of distillation gives no distribution over its words."""


class PrivacyError(DlmError):
    """A privacy guarantee cannot be given."""


class QueryError(DlmError):
    """The caller's query has no answer."""


class ModelMismatch(QueryError, TypeError):
    """A state or id of one model or shard set was given to an utterance of another."""


class UnavailableError(DlmError):
    """There was no answer in time.

    retryable      whether the same call may succeed later
    retry_after_s  seconds to wait before a retry, if known; else None
    """

    retryable = True
    retry_after_s: float | None = None


class ShardDown(UnavailableError):
    """The server of a shard cannot be reached or is shutting down."""


class ClientClosed(ShardDown):
    """The client was closed before or during this call: open another client.

    This error is a ShardDown, so that code that handles ShardDown also handles a closed client.
    """

    retryable = False


class DeadlineExceeded(UnavailableError):
    """The deadline passed before the answer came."""


class Overloaded(UnavailableError):
    """The message was refused because of load, or not sent; `retry_after_s` says when to retry.

    The server is overloaded (OVERLOADED), or this client has too many calls open at the server
    (CLIENT_LIMIT), or this client's queue is so long that the answer would come too late.
    """


class StaleShardSet(UnavailableError):
    """The servers hold a different shard set from the one that this utterance was opened on.

    A retry on this utterance does not help: open a new utterance, which uses the new set.
    """

    retryable = False


class ModelSwitched(UnavailableError):
    """The client switched to its local fallback while this utterance used the full model.

    Raised only if the utterance was opened with ``on_switch="rescore"``: open a new utterance, and
    score the sentence from its start.
    """


class ProtocolError(DlmError):
    """A peer broke the contract of proto/README.md."""


class UnknownCall(ProtocolError):
    """The server is older than this client and does not know a call."""


class AuthenticationError(DlmError):
    """The server does not accept this client; the same call fails until its token changes."""


def shown(value: object) -> str:
    """A value as text for a message; integers of thousands of digits have no `repr`."""
    large = isinstance(value, int) and value.bit_length() > 64
    return "a very large number" if large else repr(value)
