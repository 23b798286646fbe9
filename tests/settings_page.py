"""The reference pages of settings, written from the fields of their dataclasses.

`python tests/settings_page.py` writes all of them; `test_settings.py` compares them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from pathlib import Path

from dlm.config import Setting, kind_name, number, settings_of

ROOT = Path(__file__).resolve().parents[1]

# Page -> its title, what stands above the tables, and the tables: heading -> its dataclass,
# imported on use: some need the packages of an extra.
PAGES: dict[str, tuple[str, str, dict[str, str]]] = {
    "dlm/server/SETTINGS.md": (
        "Settings of a server",
        "A setting comes from an option of `dlm serve` (`--port`), else from a variable "
        "(`DLM_SERVER_PORT`), else from the table `[server]` of the file that `--config` "
        "names, else it has its default. `dlm serve --help` lists those that are options.",
        {"[server]": "dlm.server.config:ServerConfig"},
    ),
    "dlm/gateway/SETTINGS.md": (
        "Settings of a gateway",
        "A setting comes from an option of `dlm gateway` (`--http-port`), else from a variable "
        "(`DLM_GATEWAY_HTTP_PORT`), else from the table `[gateway]` of the file that `--config` "
        "names, else it has its default. `dlm gateway --help` lists those that are options.",
        {"[gateway]": "dlm.gateway.config:GatewayConfig"},
    ),
    "dlm/client/SETTINGS.md": (
        "Settings of a client",
        "These are arguments of `ClientConfig`. Credentials that are not given come from "
        "`cluster.toml`.",
        {
            "ClientConfig": "dlm.client.config.settings:ClientConfig",
            "HeartbeatConfig": "dlm.client.config.settings:HeartbeatConfig",
            "FailoverConfig": "dlm.client.config.settings:FailoverConfig",
        },
    ),
    "dlm/cluster/SETTINGS.md": (
        "Settings of a roll-out",
        "A setting comes from an option of `dlm rollout` (`--share`), else from a variable "
        "(`DLM_ROLLOUT_SHARE`), else it has its default. `dlm rollout --help` lists those that are "
        "options.",
        {"[rollout]": "dlm.cluster.rollout:Rules"},
    ),
    "dlm/federated/SETTINGS.md": (
        "Settings of federated training",
        "These are the tables of the file that `dlm federate --config` reads; paths are relative "
        "to it. A variable (`DLM_FEDERATE_PRIVACY_GAP`) overrides a setting of the file. In a "
        "pipeline they stand below `[federate]`, and no variable changes them.",
        {
            "[run]": "dlm.federated.settings:RunSettings",
            "[data]": "dlm.federated.settings:DataSettings",
            "[model]": "dlm.federated.settings:ModelSettings",
            "[local]": "dlm.federated.local:LocalConfig",
            "[server]": "dlm.federated.rounds:OptimizerConfig",
            "[privacy]": "dlm.federated.settings:PrivacySettings",
            "[sampling]": "dlm.federated.settings:SamplingSettings",
            "[aggregation]": "dlm.federated.settings:AggregationSettings",
            "[pretrain]": "dlm.federated.settings:PretrainSettings",
        },
    ),
    "dlm/pipeline/SETTINGS.md": (
        "Settings of a pipeline",
        "These are the tables of the file that `dlm pipeline` reads. No variable changes them, and "
        "paths are relative to the file. Those below `[federate]` are "
        "[those of `dlm federate`](../federated/SETTINGS.md). In `[unigrams]`, "
        "`max_participations` is 1 unless `poisson` is given, and with noise, `delta` is 1e-6.",
        {
            "[run]": "dlm.pipeline.tables:FolderSettings",
            "[inputs]": "dlm.pipeline.tables:InputSettings",
            "[unigrams]": "dlm.federated.unigram_settings:CollectionSettings",
            "[pieces]": "dlm.federated.piece_settings:PieceSettings",
            "[estimate]": "dlm.estimate.settings:EstimateOptions",
            "[distill]": "dlm.distill.settings:DistillSettings",
            "[prune]": "dlm.estimate.goal:PruneSettings",
            "[shard]": "dlm.index.settings:ShardSettings",
        },
    ),
}


PIPELINE = "dlm/pipeline/SETTINGS.md"


def default_of(one: Setting) -> str:
    """The default as a file has it; "" for none."""
    if one.required:
        return "required"
    if one.default is None or one.default == "":
        return ""
    if isinstance(one.default, bool):
        return str(one.default).lower()
    if one.default == ():
        return "[]"
    return number(one.default) if isinstance(one.default, (int, float)) else str(one.default)


def row(one: Setting) -> str:
    """A row of the table."""
    values = one.expected or kind_name(one.kind)
    meaning = f"{one.meaning} {one.why}".strip().replace("|", "\\|").replace("<", "\\<")
    return f"| `{one.name}` | {values} | {default_of(one)} | {meaning} |"


def as_in_a_pipeline(table: str, settings: Iterable[Setting]) -> list[Setting]:
    """The settings of a command with the pipeline's own defaults, without what it sets itself."""
    from dlm.pipeline.settings import DEFAULTS, SET_HERE

    defaults = DEFAULTS.get(table, {})
    return [
        one._replace(default=defaults[one.name], required=False) if one.name in defaults else one
        for one in settings
        if one.name not in SET_HERE.get(table, {})
    ]


def text_of(page: str) -> str:
    """A page as it should be."""
    title, above, tables = PAGES[page]
    lines = [f"# {title}", "", above, ""]
    for heading, name in tables.items():
        lines += [f"## {heading}", "", "| setting | values | default | meaning |"]
        settings = settings_of(pkgutil.resolve_name(name))
        if page == PIPELINE:
            settings = as_in_a_pipeline(heading.strip("[]"), settings)
        rows = map(row, settings)
        lines += ["| --- | --- | --- | --- |", *rows, ""]
    lines.append("`python tests/settings_page.py` writes this page from the fields in the code.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / name).write_text(text_of(name), encoding="utf-8")
