"""The examples of dlm/asr for decoders run as they stand, in a decoder's surroundings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flashlight.lib.text", reason="pip install -e '.[asr]'")

from asr.decoding import BLANK, SPACE, TOKENS, posteriors, spelled, spoken_model
from cluster import Cluster, build
from dlm.asr.ctc import build_ctcdecoder
from dlm.client import Client
from dlm.client.cluster_file import Endpoint, write_cluster_file

ROOM = Path(__file__).parents[2] / "dlm/asr"


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each beside what its page says to define; the tutorial's test is in tests/test_docs.py."""
    pages = ((ROOM / name).read_text(encoding="utf-8") for name in ("README.md", "DECODERS.md"))
    (_, _, search), (flashlight, _, whole) = (
        re.findall(r"```python\n(.*?)```", page, re.S) for page in pages
    )
    words = spelled(20)
    files = build(spoken_model(words), tmp_path / "model", 2)
    said = [words[i] for i in (3, 1, 4, 1, 5)]
    logits = posteriors(said, 1, flat=1.0)
    names: dict[str, Any] = {
        "words": words,
        "tokens": TOKENS,
        "silence": SPACE,
        "blank": BLANK,
        "emissions": np.ascontiguousarray(logits),
        "labels": ["", " ", *TOKENS[2:]],
        "build_ctcdecoder": build_ctcdecoder,
        "logits": logits,
        "batch_size": 3,
    }
    with Cluster(files) as running:
        ends = [Endpoint(address) for address in running.addresses]
        write_cluster_file(tmp_path / "cluster.toml", ends)
        monkeypatch.chdir(tmp_path)
        exec(flashlight, names)
        assert capsys.readouterr().out.split() == said
        with Client.connect(running.addresses) as client:
            names["client"] = client
            exec(search, names)
            assert names["text"].split() == [one[0] for one in names["words"]] == said
            assert names["best"][0].split() == said
            names["tokens"] = words
            exec(whole, names)
            assert names["scores"].shape == names["next_states"].shape == (3, 20)
            assert names["final"].shape == (3,)
