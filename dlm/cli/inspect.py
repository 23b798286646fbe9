"""`dlm info`, `dlm verify`, `dlm export`: what is in a shard set, and whether it is whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.progress import stage_printer

if TYPE_CHECKING:
    from dlm.index.layout import Manifest

Directory = Annotated[Path, typer.Argument(help="Folder of a shard set.")]


def summary(manifest: Manifest, directory: Path) -> None:
    """Prints a shard set for a person."""
    from dlm.index.describe import describe

    facts = describe(manifest)
    counts = " + ".join(f"{c:,}" for c in facts["counts"])
    rows = [
        ("shard set", facts["shard_set"]),
        ("model", facts["model"]),
        ("n-grams by order", f"{counts} = {sum(facts['counts']):,}"),
    ]
    if sum(facts["blanks"]):
        rows.append(("blanks by order", " + ".join(f"{c:,}" for c in facts["blanks"])))
    rows += [
        ("encoding", facts["encoding"]),
        ("bytes", f"{facts['bytes']:,} ({facts['bytes_per_ngram']:.2f} an n-gram)"),
        ("shards", f"{facts['shards']}, the heaviest {facts['balance']:.4f} of the mean"),
    ]
    rows += [
        (f"  {entry['name']}", f"{entry['bytes']:,} bytes, {entry['ngrams']:,} n-grams")
        for entry in facts["files"]
    ]
    rows += [("privacy", privacy(manifest, directory)), ("provenance", "")]
    for key, value in facts["provenance"].items():
        rows += [(f"  {key}", _told(v)) for v in (value if isinstance(value, list) else [value])]
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        print(f"{name:{width}}{value}".rstrip())


NO_RECORD = "no record, and so no guarantee for those whose text the model was made of"
WRONG = "WRONG, nothing can be claimed: "


def privacy(manifest: Manifest, directory: Path) -> str:
    """What protects those whose text a shard set was made of: what its one record says.

    Two records, one that was changed, and one whose epsilon does not follow from its noise say
    nothing. The latter is found where the extra `train` is installed.
    """
    from dlm.errors import DlmError
    from dlm.federated.lookup import FileSnapshot, record_of_file
    from dlm.federated.provenance import LINE_PREFIX
    from dlm.federated.recorded import sidecar
    from dlm.index.layout import MANIFEST

    place = directory / MANIFEST
    said = [str(line) for line in manifest.provenance.get("comments", [])]
    claims = (line for line in said if line.startswith(LINE_PREFIX) and "{" in line)
    if not any(claims) and not sidecar(place).exists():
        return NO_RECORD
    try:
        record = record_of_file(FileSnapshot.read(place))
    except DlmError as exc:
        return f"{WRONG}{exc}"
    if record.guarantee is not None and record.stages:
        from dlm.federated.account.recheck import recheck

        found = recheck(record)
        if found.follows is False:
            return f"{WRONG}{found.text}"
    return record.statement()


def _told(value: object) -> str:
    """A value of the provenance; of a privacy record what it says.

    A line that does not begin as a record is somebody's own words, and claims nothing.
    """
    from dlm.errors import DlmError
    from dlm.federated.provenance import LINE_PREFIX, Provenance

    text = str(value)
    if not text.startswith(LINE_PREFIX):
        return text
    if not text.removeprefix(LINE_PREFIX).lstrip().startswith("{"):
        return f"{text} (not a record)"
    try:
        return LINE_PREFIX + Provenance.from_json(text).statement()
    except DlmError as exc:
        return f"{LINE_PREFIX}{WRONG}{exc}"


def helm_values(manifest: Manifest, workers: int) -> str:
    """Values of the chart deploy/helm/dlm for a shard set, as YAML; what `dlm info --helm` prints.

    The limit is a quarter above what a server takes; see `server_mib`.
    """
    from dlm.index.describe import server_mib

    memory = server_mib(manifest, workers)
    return (
        f"# Shard set {manifest.shard_set} of model {manifest.model}, workers: {workers}.\n"
        f"shards: {manifest.shards}\n"
        f"workers: {workers}\n"
        "resources:\n"
        "  requests:\n"
        f'    cpu: "{workers}"\n'
        f"    memory: {memory}Mi\n"
        "  limits:\n"
        f"    memory: {-(-memory * 5 // 4)}Mi\n"
    )


def info(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    helm: Annotated[
        bool, typer.Option("--helm", help="Print values of the Helm chart: shards and resources.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=1, max=256, help="With --helm: processes of each server.")
    ] = 1,
) -> None:
    """Tell what a shard set holds, from its manifest alone.

    The line "privacy" says what the model's privacy record promises, or that it has none.

    Example: dlm info shards/model
    """
    from dlm.errors import ConfigError
    from dlm.index.describe import describe
    from dlm.index.layout import read_manifest

    if as_json and helm:
        raise ConfigError("--json and --helm were both given; one of them is expected")
    manifest = read_manifest(directory)
    if helm:
        print(helm_values(manifest, workers), end="")
    elif as_json:
        facts = {**describe(manifest), "privacy": privacy(manifest, directory)}
        print(json.dumps(facts, indent=1))
    else:
        summary(manifest, directory)


def verify(
    directory: Directory,
    arpa: Annotated[
        Path | None, typer.Option(help="Compare every n-gram with this ARPA file too.")
    ] = None,
    shards: Annotated[
        list[int] | None,
        typer.Option(
            "--shard",
            help="Check only the files that a server of this shard reads; again for another.",
        ),
    ] = None,
) -> None:
    """Check every invariant of a shard set.

    Exit status 1 where one does not hold. A host that has only some shards names them: --shard
    checks every byte of their files, of the low orders and of the vocabulary.

    Example: dlm verify shards/model --arpa model.arpa.zst
    """
    from dlm.cli.paths import check_reads
    from dlm.errors import ConfigError
    from dlm.index.check.verify import verify as run
    from dlm.index.check.verify import verify_files

    check_reads("--arpa", arpa, folders=True)
    if shards and arpa is not None:
        raise ConfigError("--shard and --arpa were both given; to compare with a model needs all")
    tell = stage_printer()

    if shards:
        report = verify_files(directory, shards, progress=tell)
    else:
        report = run(directory, arpa=arpa, progress=tell)
    for warning in report.warnings:
        print(f"warning: {warning}")
    for violation in report.violations:
        print(f"violation: {violation}")
    if report.violations:
        count = len(report.violations)
        print(f"{directory}: {count:,} violation{'s' * (count != 1)}")
        raise typer.Exit(1)
    if shards:
        named = ", ".join(str(shard) for shard in sorted(set(shards)))
        print(f"{directory}: the files of shard {named} are whole; others were not checked")
        return
    compared = "" if arpa is None else f", every n-gram as in {arpa}"
    print(f"{directory}: whole{compared}")


def export(
    directory: Directory,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="ARPA file to write, .gz, .zst or .xz; - is stdout."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write the ARPA model that a shard set holds.

    Example: dlm export shards/model --output model.arpa.zst
    """
    from dlm.cli.paths import check_writes
    from dlm.errors import ConfigError
    from dlm.index.check.decode import export_arpa

    if output is not None and str(output) == "-":
        output = None
    if output is not None and output.exists() and not force:
        raise ConfigError(f"{output} exists; give another --output, or --force to replace it")
    check_writes("--output", output, arpa=True)
    export_arpa(directory, sys.stdout.buffer if output is None else output)
