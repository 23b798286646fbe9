"""Warnings about a model that learned little, from the files of a finished pipeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dlm.federated.report.noise_level import noise_warning
from dlm.federated.run.run_files import METRICS
from dlm.pipeline.settings import PipelineSettings
from dlm.pipeline.stage import Places

MANY_OOVS = 0.25  # share of unknown words above which a perplexity means little
FEW_WORDS = 0.1  # share of a wordlist below which most words were lost


def warnings(settings: PipelineSettings) -> list[str]:
    at = Places(settings.run.folder)
    found = [noise_warning(at.network / METRICS, settings.federate)]
    if settings.inputs.held_out is not None and at.held_out.exists():
        found += held_out_warnings(json.loads(at.held_out.read_text(encoding="utf-8")))
    return [warning for warning in found if warning is not None]


def held_out_warnings(measured: Mapping[str, Any]) -> list[str]:
    found = []
    own, topology = measured["perplexity"], measured.get("perplexity_of_topology")
    if topology is not None and own > topology:
        found.append(
            "WARNING: the model is worse than the topology alone: held-out perplexity "
            f"{shown(own)} against {shown(topology)}. Use more users per round "
            "([federate.sampling] report_goal) or a smaller network, or serve the topology"
        )
    share = measured["oovs"] / measured["tokens"]
    if share >= MANY_OOVS:
        found.append(
            f"WARNING: the model does not know {share:.0%} of the held-out words. They all count "
            "as <unk>, which is easy to predict, so the perplexity looks better than it is"
        )
    return found


def wordlist_warning(used: int, listed: int) -> str | None:
    if used >= FEW_WORDS * listed:
        return None
    return (
        f"WARNING: only {used:,} of the {listed:,} words of the wordlist were used by enough "
        "users to rise above the noise; the model will not know the others. Count more users, or "
        "give a public list as [inputs] vocabulary"
    )


def shown(perplexity: float) -> str:
    if perplexity < 1e6:
        return f"{perplexity:,.2f}"
    return f"{perplexity:.1e}".replace("e+", "e")
