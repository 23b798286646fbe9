from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_FULL: _ClassVar[Source]
    SOURCE_BIGRAM_FALLBACK: _ClassVar[Source]
    SOURCE_LOCAL_FALLBACK: _ClassVar[Source]
SOURCE_FULL: Source
SOURCE_BIGRAM_FALLBACK: Source
SOURCE_LOCAL_FALLBACK: Source

class WordIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Phrases(_message.Message):
    __slots__ = ("phrases", "id")
    PHRASES_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    phrases: _containers.RepeatedCompositeFieldContainer[Phrase]
    id: str
    def __init__(self, phrases: _Optional[_Iterable[_Union[Phrase, _Mapping]]] = ..., id: _Optional[str] = ...) -> None: ...

class Phrase(_message.Message):
    __slots__ = ("text", "bonus")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BONUS_FIELD_NUMBER: _ClassVar[int]
    text: str
    bonus: float
    def __init__(self, text: _Optional[str] = ..., bonus: _Optional[float] = ...) -> None: ...

class SentencesRequest(_message.Message):
    __slots__ = ("sentences", "ids", "bos", "eos", "phrases", "with_shards")
    SENTENCES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_FIELD_NUMBER: _ClassVar[int]
    EOS_FIELD_NUMBER: _ClassVar[int]
    PHRASES_FIELD_NUMBER: _ClassVar[int]
    WITH_SHARDS_FIELD_NUMBER: _ClassVar[int]
    sentences: _containers.RepeatedScalarFieldContainer[str]
    ids: _containers.RepeatedCompositeFieldContainer[WordIds]
    bos: bool
    eos: bool
    phrases: Phrases
    with_shards: bool
    def __init__(self, sentences: _Optional[_Iterable[str]] = ..., ids: _Optional[_Iterable[_Union[WordIds, _Mapping]]] = ..., bos: _Optional[bool] = ..., eos: _Optional[bool] = ..., phrases: _Optional[_Union[Phrases, _Mapping]] = ..., with_shards: _Optional[bool] = ...) -> None: ...

class SentencesReply(_message.Message):
    __slots__ = ("scores", "model", "phrases_id")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PHRASES_ID_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[SentenceScore]
    model: str
    phrases_id: str
    def __init__(self, scores: _Optional[_Iterable[_Union[SentenceScore, _Mapping]]] = ..., model: _Optional[str] = ..., phrases_id: _Optional[str] = ...) -> None: ...

class SentenceScore(_message.Message):
    __slots__ = ("log10_prob", "oovs", "log10_oovs", "log10_probs", "matched_orders", "oov", "sources", "bonus", "shards")
    LOG10_PROB_FIELD_NUMBER: _ClassVar[int]
    OOVS_FIELD_NUMBER: _ClassVar[int]
    LOG10_OOVS_FIELD_NUMBER: _ClassVar[int]
    LOG10_PROBS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_ORDERS_FIELD_NUMBER: _ClassVar[int]
    OOV_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    BONUS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    log10_prob: float
    oovs: int
    log10_oovs: float
    log10_probs: _containers.RepeatedScalarFieldContainer[float]
    matched_orders: _containers.RepeatedScalarFieldContainer[int]
    oov: _containers.RepeatedScalarFieldContainer[bool]
    sources: _containers.RepeatedScalarFieldContainer[Source]
    bonus: float
    shards: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, log10_prob: _Optional[float] = ..., oovs: _Optional[int] = ..., log10_oovs: _Optional[float] = ..., log10_probs: _Optional[_Iterable[float]] = ..., matched_orders: _Optional[_Iterable[int]] = ..., oov: _Optional[_Iterable[bool]] = ..., sources: _Optional[_Iterable[_Union[Source, str]]] = ..., bonus: _Optional[float] = ..., shards: _Optional[_Iterable[int]] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("states", "words", "word_ids", "own_words", "without_states", "phrases")
    STATES_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    OWN_WORDS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_STATES_FIELD_NUMBER: _ClassVar[int]
    PHRASES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[bytes]
    words: _containers.RepeatedScalarFieldContainer[str]
    word_ids: _containers.RepeatedScalarFieldContainer[int]
    own_words: bool
    without_states: bool
    phrases: Phrases
    def __init__(self, states: _Optional[_Iterable[bytes]] = ..., words: _Optional[_Iterable[str]] = ..., word_ids: _Optional[_Iterable[int]] = ..., own_words: _Optional[bool] = ..., without_states: _Optional[bool] = ..., phrases: _Optional[_Union[Phrases, _Mapping]] = ...) -> None: ...

class ExtendReply(_message.Message):
    __slots__ = ("log10_probs", "matched_orders", "states", "oov", "sources", "model", "reason", "message", "retry_after_ms", "bonuses", "phrases_id")
    LOG10_PROBS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_ORDERS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    OOV_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    BONUSES_FIELD_NUMBER: _ClassVar[int]
    PHRASES_ID_FIELD_NUMBER: _ClassVar[int]
    log10_probs: _containers.RepeatedScalarFieldContainer[float]
    matched_orders: _containers.RepeatedScalarFieldContainer[int]
    states: _containers.RepeatedScalarFieldContainer[bytes]
    oov: _containers.RepeatedScalarFieldContainer[bool]
    sources: _containers.RepeatedScalarFieldContainer[Source]
    model: str
    reason: str
    message: str
    retry_after_ms: int
    bonuses: _containers.RepeatedScalarFieldContainer[float]
    phrases_id: str
    def __init__(self, log10_probs: _Optional[_Iterable[float]] = ..., matched_orders: _Optional[_Iterable[int]] = ..., states: _Optional[_Iterable[bytes]] = ..., oov: _Optional[_Iterable[bool]] = ..., sources: _Optional[_Iterable[_Union[Source, str]]] = ..., model: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., bonuses: _Optional[_Iterable[float]] = ..., phrases_id: _Optional[str] = ...) -> None: ...

class NextWordsRequest(_message.Message):
    __slots__ = ("state", "text", "count", "phrases")
    STATE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PHRASES_FIELD_NUMBER: _ClassVar[int]
    state: bytes
    text: str
    count: int
    phrases: Phrases
    def __init__(self, state: _Optional[bytes] = ..., text: _Optional[str] = ..., count: _Optional[int] = ..., phrases: _Optional[_Union[Phrases, _Mapping]] = ...) -> None: ...

class NextWordsReply(_message.Message):
    __slots__ = ("words", "model")
    WORDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    words: _containers.RepeatedCompositeFieldContainer[NextWord]
    model: str
    def __init__(self, words: _Optional[_Iterable[_Union[NextWord, _Mapping]]] = ..., model: _Optional[str] = ...) -> None: ...

class NextWord(_message.Message):
    __slots__ = ("word", "id", "log10_prob")
    WORD_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    LOG10_PROB_FIELD_NUMBER: _ClassVar[int]
    word: str
    id: int
    log10_prob: float
    def __init__(self, word: _Optional[str] = ..., id: _Optional[int] = ..., log10_prob: _Optional[float] = ...) -> None: ...

class RescoreRequest(_message.Message):
    __slots__ = ("hypotheses", "acoustic_scale", "lm_scale", "word_penalty", "phrases")
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    ACOUSTIC_SCALE_FIELD_NUMBER: _ClassVar[int]
    LM_SCALE_FIELD_NUMBER: _ClassVar[int]
    WORD_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PHRASES_FIELD_NUMBER: _ClassVar[int]
    hypotheses: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    acoustic_scale: float
    lm_scale: float
    word_penalty: float
    phrases: Phrases
    def __init__(self, hypotheses: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ..., acoustic_scale: _Optional[float] = ..., lm_scale: _Optional[float] = ..., word_penalty: _Optional[float] = ..., phrases: _Optional[_Union[Phrases, _Mapping]] = ...) -> None: ...

class Hypothesis(_message.Message):
    __slots__ = ("text", "acoustic")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ACOUSTIC_FIELD_NUMBER: _ClassVar[int]
    text: str
    acoustic: float
    def __init__(self, text: _Optional[str] = ..., acoustic: _Optional[float] = ...) -> None: ...

class RescoreReply(_message.Message):
    __slots__ = ("hypotheses", "model", "phrases_id")
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PHRASES_ID_FIELD_NUMBER: _ClassVar[int]
    hypotheses: _containers.RepeatedCompositeFieldContainer[Rescored]
    model: str
    phrases_id: str
    def __init__(self, hypotheses: _Optional[_Iterable[_Union[Rescored, _Mapping]]] = ..., model: _Optional[str] = ..., phrases_id: _Optional[str] = ...) -> None: ...

class Rescored(_message.Message):
    __slots__ = ("index", "total", "lm", "fallback", "bonus")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    LM_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    BONUS_FIELD_NUMBER: _ClassVar[int]
    index: int
    total: float
    lm: float
    fallback: bool
    bonus: float
    def __init__(self, index: _Optional[int] = ..., total: _Optional[float] = ..., lm: _Optional[float] = ..., fallback: _Optional[bool] = ..., bonus: _Optional[float] = ...) -> None: ...

class ModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelsReply(_message.Message):
    __slots__ = ("models", "servers", "traffic")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    servers: _containers.RepeatedCompositeFieldContainer[ShardServer]
    traffic: Traffic
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., servers: _Optional[_Iterable[_Union[ShardServer, _Mapping]]] = ..., traffic: _Optional[_Union[Traffic, _Mapping]] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("queries", "local_hits", "fallbacks", "calls", "within_s", "shards")
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_HITS_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    queries: int
    local_hits: int
    fallbacks: int
    calls: _containers.RepeatedScalarFieldContainer[int]
    within_s: _containers.RepeatedScalarFieldContainer[float]
    shards: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, queries: _Optional[int] = ..., local_hits: _Optional[int] = ..., fallbacks: _Optional[int] = ..., calls: _Optional[_Iterable[int]] = ..., within_s: _Optional[_Iterable[float]] = ..., shards: _Optional[_Iterable[int]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("model", "shard_set", "kind", "order", "counts", "vocabulary_size", "bos_id", "eos_id", "begin_state", "null_state")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SHARD_SET_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    BOS_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_STATE_FIELD_NUMBER: _ClassVar[int]
    NULL_STATE_FIELD_NUMBER: _ClassVar[int]
    model: str
    shard_set: str
    kind: str
    order: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    vocabulary_size: int
    bos_id: int
    eos_id: int
    begin_state: bytes
    null_state: bytes
    def __init__(self, model: _Optional[str] = ..., shard_set: _Optional[str] = ..., kind: _Optional[str] = ..., order: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ..., vocabulary_size: _Optional[int] = ..., bos_id: _Optional[int] = ..., eos_id: _Optional[int] = ..., begin_state: _Optional[bytes] = ..., null_state: _Optional[bytes] = ...) -> None: ...

class ShardServer(_message.Message):
    __slots__ = ("shard", "state", "ready", "delay_ms")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    shard: int
    state: str
    ready: bool
    delay_ms: float
    def __init__(self, shard: _Optional[int] = ..., state: _Optional[str] = ..., ready: _Optional[bool] = ..., delay_ms: _Optional[float] = ...) -> None: ...
