from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_WARMING: _ClassVar[ServerState]
    SERVER_STATE_READY: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]

class DownloadFile(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DOWNLOAD_FILE_UNSPECIFIED: _ClassVar[DownloadFile]
    DOWNLOAD_FILE_VOCABULARY: _ClassVar[DownloadFile]
    DOWNLOAD_FILE_LOW_ORDERS: _ClassVar[DownloadFile]

class ChunkEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHUNK_ENCODING_UNSPECIFIED: _ClassVar[ChunkEncoding]
    CHUNK_ENCODING_RAW: _ClassVar[ChunkEncoding]
    CHUNK_ENCODING_ZSTD: _ClassVar[ChunkEncoding]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_WARMING: ServerState
SERVER_STATE_READY: ServerState
SERVER_STATE_DRAINING: ServerState
DOWNLOAD_FILE_UNSPECIFIED: DownloadFile
DOWNLOAD_FILE_VOCABULARY: DownloadFile
DOWNLOAD_FILE_LOW_ORDERS: DownloadFile
CHUNK_ENCODING_UNSPECIFIED: ChunkEncoding
CHUNK_ENCODING_RAW: ChunkEncoding
CHUNK_ENCODING_ZSTD: ChunkEncoding

class ScoreRequest(_message.Message):
    __slots__ = ("shard_set", "shard", "context_lengths", "context_words", "pairs", "word_counts", "words", "checksum", "sequence", "timeout_us", "sent_us", "context_block")
    SHARD_SET_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WORDS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    WORD_COUNTS_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_BLOCK_FIELD_NUMBER: _ClassVar[int]
    shard_set: bytes
    shard: int
    context_lengths: bytes
    context_words: bytes
    pairs: bytes
    word_counts: bytes
    words: bytes
    checksum: int
    sequence: int
    timeout_us: int
    sent_us: int
    context_block: bytes
    def __init__(self, shard_set: _Optional[bytes] = ..., shard: _Optional[int] = ..., context_lengths: _Optional[bytes] = ..., context_words: _Optional[bytes] = ..., pairs: _Optional[bytes] = ..., word_counts: _Optional[bytes] = ..., words: _Optional[bytes] = ..., checksum: _Optional[int] = ..., sequence: _Optional[int] = ..., timeout_us: _Optional[int] = ..., sent_us: _Optional[int] = ..., context_block: _Optional[bytes] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("shard_set", "shard", "log10_probs", "matched_orders", "ngram_lengths", "state_lengths", "checksum", "sequence", "reason", "message", "retry_after_ms", "context_block")
    SHARD_SET_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    LOG10_PROBS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_ORDERS_FIELD_NUMBER: _ClassVar[int]
    NGRAM_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    STATE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_BLOCK_FIELD_NUMBER: _ClassVar[int]
    shard_set: bytes
    shard: int
    log10_probs: bytes
    matched_orders: bytes
    ngram_lengths: bytes
    state_lengths: bytes
    checksum: int
    sequence: int
    reason: str
    message: str
    retry_after_ms: int
    context_block: bytes
    def __init__(self, shard_set: _Optional[bytes] = ..., shard: _Optional[int] = ..., log10_probs: _Optional[bytes] = ..., matched_orders: _Optional[bytes] = ..., ngram_lengths: _Optional[bytes] = ..., state_lengths: _Optional[bytes] = ..., checksum: _Optional[int] = ..., sequence: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., context_block: _Optional[bytes] = ...) -> None: ...

class ContextBlockRequest(_message.Message):
    __slots__ = ("shard_set", "shard", "context_lengths", "context_words", "pairs", "skips", "checksum")
    SHARD_SET_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WORDS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    SKIPS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    shard_set: bytes
    shard: int
    context_lengths: bytes
    context_words: bytes
    pairs: bytes
    skips: bytes
    checksum: int
    def __init__(self, shard_set: _Optional[bytes] = ..., shard: _Optional[int] = ..., context_lengths: _Optional[bytes] = ..., context_words: _Optional[bytes] = ..., pairs: _Optional[bytes] = ..., skips: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class ContextBlockReply(_message.Message):
    __slots__ = ("shard_set", "shard", "totals", "word_counts", "log10_backoffs", "words", "log10_probs", "matched_orders", "ngram_lengths", "state_lengths", "checksum")
    SHARD_SET_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    WORD_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LOG10_BACKOFFS_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    LOG10_PROBS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_ORDERS_FIELD_NUMBER: _ClassVar[int]
    NGRAM_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    STATE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    shard_set: bytes
    shard: int
    totals: bytes
    word_counts: bytes
    log10_backoffs: bytes
    words: bytes
    log10_probs: bytes
    matched_orders: bytes
    ngram_lengths: bytes
    state_lengths: bytes
    checksum: int
    def __init__(self, shard_set: _Optional[bytes] = ..., shard: _Optional[int] = ..., totals: _Optional[bytes] = ..., word_counts: _Optional[bytes] = ..., log10_backoffs: _Optional[bytes] = ..., words: _Optional[bytes] = ..., log10_probs: _Optional[bytes] = ..., matched_orders: _Optional[bytes] = ..., ngram_lengths: _Optional[bytes] = ..., state_lengths: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("shard_set",)
    SHARD_SET_FIELD_NUMBER: _ClassVar[int]
    shard_set: bytes
    def __init__(self, shard_set: _Optional[bytes] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("manifest", "shard", "state", "max_queries", "max_message_bytes", "server_version", "shard_set", "checksum", "shard_sets", "token_models")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MAX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_SET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SHARD_SETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MODELS_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    shard: int
    state: ServerState
    max_queries: int
    max_message_bytes: int
    server_version: str
    shard_set: bytes
    checksum: int
    shard_sets: _containers.RepeatedScalarFieldContainer[bytes]
    token_models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, manifest: _Optional[bytes] = ..., shard: _Optional[int] = ..., state: _Optional[_Union[ServerState, str]] = ..., max_queries: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., server_version: _Optional[str] = ..., shard_set: _Optional[bytes] = ..., checksum: _Optional[int] = ..., shard_sets: _Optional[_Iterable[bytes]] = ..., token_models: _Optional[_Iterable[str]] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("shard_set", "file", "offset", "shard")
    SHARD_SET_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    shard_set: bytes
    file: DownloadFile
    offset: int
    shard: int
    def __init__(self, shard_set: _Optional[bytes] = ..., file: _Optional[_Union[DownloadFile, str]] = ..., offset: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class DownloadChunk(_message.Message):
    __slots__ = ("offset", "file_bytes", "encoding", "data", "raw_bytes", "shard_set", "shard", "checksum")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARD_SET_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    offset: int
    file_bytes: int
    encoding: ChunkEncoding
    data: bytes
    raw_bytes: int
    shard_set: bytes
    shard: int
    checksum: int
    def __init__(self, offset: _Optional[int] = ..., file_bytes: _Optional[int] = ..., encoding: _Optional[_Union[ChunkEncoding, str]] = ..., data: _Optional[bytes] = ..., raw_bytes: _Optional[int] = ..., shard_set: _Optional[bytes] = ..., shard: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("sequence", "shard_set", "shard")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SHARD_SET_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    shard_set: bytes
    shard: int
    def __init__(self, sequence: _Optional[int] = ..., shard_set: _Optional[bytes] = ..., shard: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("sequence", "shard_set", "shard", "state", "instance", "messages", "queries", "refused", "in_flight", "uptime_ms", "checksum", "cpu_ms", "idle_ms", "processes", "alike", "memory_bytes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SHARD_SET_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CPU_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    ALIKE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    shard_set: bytes
    shard: int
    state: ServerState
    instance: int
    messages: int
    queries: int
    refused: int
    in_flight: int
    uptime_ms: int
    checksum: int
    cpu_ms: int
    idle_ms: int
    processes: int
    alike: int
    memory_bytes: int
    def __init__(self, sequence: _Optional[int] = ..., shard_set: _Optional[bytes] = ..., shard: _Optional[int] = ..., state: _Optional[_Union[ServerState, str]] = ..., instance: _Optional[int] = ..., messages: _Optional[int] = ..., queries: _Optional[int] = ..., refused: _Optional[int] = ..., in_flight: _Optional[int] = ..., uptime_ms: _Optional[int] = ..., checksum: _Optional[int] = ..., cpu_ms: _Optional[int] = ..., idle_ms: _Optional[int] = ..., processes: _Optional[int] = ..., alike: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...
