"""KenLM's settings and its small value types."""

from __future__ import annotations

from dlm.client import ClientConfig


class KenlmLoadMethod:
    """How a model is loaded into memory. Models on servers are not loaded.

    LAZY, POPULATE_OR_LAZY  files are mapped and shared by processes; for large models. KenLM's own
                            files always are
    the others              unpacked into the process's own memory if enough is free: faster
    """

    LAZY = 0
    POPULATE_OR_LAZY = 1
    POPULATE_OR_READ = 2
    READ = 3
    PARALLEL_READ = 4


class ArpaComplaint:
    """Which faults of an ARPA file KenLM reports. dlm rejects a faulty file with any setting."""

    ALL = 0
    EXPENSIVE = 1
    NONE = 2


class KenlmConfig:
    """KenLM's `Config`, with one more setting.

    load_method    whether a model in this process is unpacked, see `KenlmLoadMethod`
    arpa_complain  accepted for compatibility; has no effect
    show_progress  whether opening a model reports sharding and compilation to standard error
    vocab          path of a list of the words, one per line, of a KenLM file that stores none
                   (`build_binary -v`); only `Model.vocab` and what lists words need it
    client         a `ClientConfig` for servers; None: `ClientConfig(bigram_fallback=True)`
    """

    def __init__(self) -> None:
        self.load_method = KenlmLoadMethod.POPULATE_OR_READ
        self.show_progress = True
        self.arpa_complain = ArpaComplaint.ALL
        self.vocab: str | None = None
        self.client: ClientConfig | None = None


class WordScore:
    """KenLM's `FullScoreReturn`: read-only.

    log_prob      log10 P
    ngram_length  of the longest n-gram found, as KenLM counts it
    oov           whether the vocabulary lacks the word
    """

    __slots__ = ("_values",)

    def __init__(self, log_prob: float, ngram_length: int, oov: bool) -> None:
        self._values = float(log_prob), int(ngram_length), bool(oov)

    @property
    def log_prob(self) -> float:
        return self._values[0]

    @property
    def ngram_length(self) -> int:
        return self._values[1]

    @property
    def oov(self) -> bool:
        return self._values[2]

    def __repr__(self) -> str:
        return f"FullScoreReturn{self._values}"
