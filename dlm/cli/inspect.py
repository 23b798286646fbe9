"""`dlm info`, `dlm verify` and `dlm export`: what is in a shard set or a KenLM file."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dlm.cli.checks import READ_ANY, check_writes
from dlm.cli.options import Json, PublicKey, Quiet, Tmp
from dlm.cli.output import print_answer, stage_printer
from dlm.errors import ConfigError, DlmError
from dlm.resources import available_bytes, parse_size
from dlm.units import counted

if TYPE_CHECKING:
    from dlm.index.layout import Manifest
    from dlm.kenlm.reader import NgramReader

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a shard set."), READ_ANY]
Model = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="Folder of a shard set, or a KenLM binary file."),
    READ_ANY,
]


def facts_of(manifest: Manifest, directory: Path, public_key: Path | None = None) -> dict[str, Any]:
    from dlm.index.describe import describe

    return {**describe(manifest), "privacy": privacy(manifest, directory, public_key)}


def summary(facts: Mapping[str, Any]) -> list[str]:
    """The contents of a shard set, from `facts_of`, as text for people."""
    from dlm.ngram.arpa.header import provenance_facts

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
        ("bytes", f"{facts['bytes']:,} ({facts['bytes_per_ngram']:.2f} per n-gram)"),
        ("shards", f"{facts['shards']}, the largest {facts['imbalance']:.4f} times the mean size"),
    ]
    rows += [
        (f"  {entry['name']}", f"{entry['bytes']:,} bytes, {counted(entry['ngrams'], 'n-gram')}")
        for entry in facts["files"]
    ]
    promise = facts["privacy"]
    rows += [("privacy", promise), ("provenance", "")]
    for key, value in facts["provenance"].items():
        for one in value if isinstance(value, list) else [value]:
            made = provenance_facts(str(one))
            if made is None:
                rows.append((f"  {key}", _shown(one, promise)))
            else:
                rows.append(("  made by", _brief(made.pop("made_by", "unknown"))))
                rows += [(f"    {_brief(name)}", _brief(fact)) for name, fact in made.items()]
    width = max(len(name) for name, _ in rows) + 2
    return [f"{name:{width}}{value}".rstrip() for name, value in rows]


NO_RECORD = "no record of private training, so no guarantee is stated"
WRONG = "WRONG, no guarantee can be claimed: "
ROW = 100  # maximum number of characters of a fact in a row


def privacy(manifest: Manifest, directory: Path, public_key: Path | None = None) -> str:
    """The guarantee that a shard set's privacy record states.

    No guarantee is stated if there are two records, if the record was changed, if its epsilon does
    not follow from its noise (checked only with the extra `train`), or if a file is not the one
    that the key signed.
    """
    from dlm.index.layout import MANIFEST
    from dlm.record.lookup import FileSnapshot, record_of_file
    from dlm.record.provenance import is_record_line
    from dlm.record.sidecar import sidecar

    place = directory / MANIFEST
    said = [str(line) for line in manifest.provenance.get("comments", [])]
    if not any(map(is_record_line, said)) and not sidecar(place).exists():
        return NO_RECORD
    why = ""
    try:
        if public_key is None:
            record = record_of_file(FileSnapshot.read(place))
        else:
            from dlm.record.signature import look_at, read_public_key

            found = look_at(place, read_public_key(public_key))
            if found.record is None:
                return f"{WRONG}{found.text}"
            record = found.record
            why = "" if found.standing == "verified" else f" Unverified: {found.text}."
    except ConfigError:  # the key cannot be read
        raise
    except DlmError as exc:
        return f"{WRONG}{exc}"
    if record.guarantee is not None and record.stages:
        from dlm.federated.account.recheck import recheck

        checked = recheck(record)
        if checked.follows is False:
            return f"{WRONG}{checked.text}"
    return record.statement(with_standing=not why) + why


def _shown(value: object, promise: str) -> str:
    """Returns a value of the provenance as text; a privacy record becomes a reference to `promise`,
    its statement. A line that does not begin like a record is free text and claims nothing."""
    from dlm.record.provenance import LINE_PREFIX, is_record_line

    text = str(value)
    if not text.startswith(LINE_PREFIX):
        return text
    if not is_record_line(text):
        return f"{text} (not a record)"
    if promise.startswith(WRONG):
        return f"{LINE_PREFIX}{WRONG}see the statement above"
    return f"{LINE_PREFIX}the record of the statement above"


def _brief(value: Any) -> str:
    """One fact of a provenance line, in one short row; --json prints the whole fact."""
    text = _joined(value)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= ROW else f"{text[: ROW - 4]} ..."


def _joined(value: Any) -> str:
    if isinstance(value, dict):
        left = {k: v for k, v in value.items() if k not in ("name", "comments") and v is not None}
        facts = ", ".join(f"{k} {_joined(v)}" for k, v in left.items() if v not in ({}, []))
        return f"{value['name']} ({facts})" if "name" in value else facts
    if isinstance(value, list):
        return ("; " if any(isinstance(v, list | dict) for v in value) else " ").join(
            map(_joined, value)
        )
    return "-" if value is None else str(value)


def helm_values(manifest: Manifest) -> str:
    """Values of the chart deploy/helm/dlm for a shard set, as YAML, which `dlm info --helm` prints.
    The memory limit is a quarter above what a server needs; see `server_mib`."""
    from dlm.index.describe import server_mib

    memory = server_mib(manifest)
    return (
        f"# Shard set {manifest.shard_set} of model {manifest.model}.\n"
        f"shards: {manifest.shards}\n"
        "resources:\n"
        "  requests:\n"
        '    cpu: "1"\n'
        f"    memory: {memory}Mi\n"
        "  limits:\n"
        f"    memory: {-(-memory * 5 // 4)}Mi\n"
    )


def kenlm_facts(path: Path) -> dict[str, Any]:
    from dlm.kenlm.layout import open_file

    _, layout = open_file(path)
    bits = [[level.prob_bits, level.backoff_bits] for level in layout.levels]
    return {
        "file": str(path),
        "type": layout.model_type.name.lower(),
        "order": layout.order,
        "counts": list(layout.counts),
        "words": layout.words,
        "words_stored": layout.words_at is not None,
        "quantised_bits": bits[0] if layout.model_type.is_quantised else None,
        "probing_multiplier": None if layout.model_type.is_trie else round(layout.multiplier, 6),
        "bytes": layout.size,
    }


def _kenlm_summary(facts: Mapping[str, Any]) -> list[str]:
    counts, bits = facts["counts"], facts["quantised_bits"]
    rows = [
        ("KenLM file", facts["file"]),
        ("type", facts["type"]),
        ("n-grams by order", " + ".join(f"{c:,}" for c in counts) + f" = {sum(counts):,}"),
        ("words", f"{facts['words']:,}" + ("" if facts["words_stored"] else ", not stored")),
        ("bytes", f"{facts['bytes']:,} ({facts['bytes'] / max(sum(counts), 1):.2f} per n-gram)"),
    ]
    if bits is not None:
        rows.append(("quantised to", f"{bits[0]} bits of probability, {bits[1]} of back-off"))
    return [f"{name:18}{value}" for name, value in rows]


def info(
    directory: Model,
    as_json: Json = False,
    helm: Annotated[
        bool,
        typer.Option("--helm", help="Print values for the Helm chart: shards and resources."),
    ] = False,
    public_key: PublicKey = None,
) -> None:
    """Show the contents of a shard set or of a KenLM file.

    These facts come from the manifest, or from the header; no n-gram is read.

    The line "privacy" states the guarantee of the model's privacy record, or that none exists. With
    --public-key, it says whether that key signed the record and all files of the set.

    Examples:
        dlm info shards/model
        dlm info shards/model --public-key key.pub
        dlm info shards/model --helm > values.yaml
    """
    from dlm.index.layout import read_manifest
    from dlm.kenlm.layout import is_kenlm_file

    if as_json and helm:
        raise ConfigError("--json and --helm were both given; give one of them")
    if is_kenlm_file(directory):
        if helm or public_key is not None:
            raise ConfigError(
                f"--helm and --public-key apply to a shard set, but {directory} is a KenLM file; "
                "make a shard set with dlm shard, or leave these options out"
            )
        facts = kenlm_facts(directory)
        print_answer(facts, _kenlm_summary(facts), as_json=as_json)
        return
    manifest = read_manifest(directory)
    if helm:
        print(helm_values(manifest), end="")
        return
    facts = facts_of(manifest, directory, public_key)
    print_answer(facts, summary(facts), as_json=as_json)


def verify(
    directory: Directory,
    arpa: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="ARPA or KenLM file to compare every n-gram with."),
        READ_ANY,
    ] = None,
    shards: Annotated[
        list[int] | None,
        typer.Option(
            "--shard",
            metavar="K",
            help="Check only the files that a server of shard K reads. May be repeated.",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check every invariant of a shard set.

    Exits with 1 if one is violated. On a host that has only some of the shards, name them: --shard
    checks every byte of their files, of the low orders and of the vocabulary.

    Examples:
        dlm verify shards/model
        dlm verify shards/model --arpa model.arpa.zst
        dlm verify shards/model --shard 0 --shard 1
    """
    from dlm.index.check.verify import verify as run, verify_files
    from dlm.kenlm.layout import is_kenlm_file

    if is_kenlm_file(directory):
        raise ConfigError(
            f"{directory} is a KenLM file; expected a shard set's folder. KenLM's files have no "
            f"checksums: `dlm info {directory}` checks the header and the sizes, and `dlm export "
            f"{directory} --output FILE` checks every n-gram"
        )
    if shards and arpa is not None:
        raise ConfigError(
            "--shard and --arpa were both given; comparing with a model needs all shards. Give one "
            "of the two"
        )
    if arpa is not None:
        _refuse_quantised(directory, arpa)
    tell = stage_printer(quiet=quiet)

    if shards:
        report = verify_files(directory, shards, progress=tell)
    else:
        report = run(directory, arpa=arpa, progress=tell)
    lines = [f"warning: {warning}" for warning in report.warnings]
    lines += [f"violation: {violation}" for violation in report.violations]
    if report.violations:
        lines.append(f"{directory}: {counted(len(report.violations), 'violation')}")
    elif shards:
        named = ", ".join(str(shard) for shard in sorted(set(shards)))
        checked = f"the files of shard {named} are valid; other shards were not checked"
        lines.append(f"{directory}: {checked}")
    else:
        compared = "" if arpa is None else f"; every n-gram equals that of {arpa}"
        lines.append(f"{directory}: valid{compared}")
    facts = {
        "directory": str(directory),
        "valid": not report.violations,
        "complete": report.complete,
        "violations": [dataclasses.asdict(one) for one in report.violations],
        "warnings": report.warnings,
    }
    print_answer(facts, lines, as_json=as_json)
    if report.violations:
        raise typer.Exit(1)


def _refuse_quantised(directory: Path, arpa: Path) -> None:
    """Refuses a quantised set, whose values differ from its ARPA file's on purpose."""
    from dlm.index.layout import read_manifest

    try:
        bits = read_manifest(directory).provenance.get("bits")
    except (DlmError, OSError):  # `verify` reports what is wrong with it
        return
    if bits is not None:
        raise ConfigError(
            f"{directory} is quantised ({bits} bits), so its values differ from those of "
            f"{arpa} on purpose. Leave --arpa out to check the set itself; to compare, run `dlm "
            f"export {directory} --output exported.arpa` first"
        )


class Reading(NamedTuple):
    """How to read a KenLM file: word list, memory, temporary folder; `force`: no time limit."""

    vocab: Path | None
    memory: int | None
    folder: Path | None
    force: bool

    @property
    def memory_bytes(self) -> int:
        return available_bytes() if self.memory is None else self.memory

    def open(self, path: Path, tell: Callable[[str], None]) -> NgramReader:
        from dlm.kenlm.open import open_ngrams

        return open_ngrams(
            path,
            vocab=self.vocab,
            memory_bytes=self.memory_bytes,
            folder=self.folder,
            force=self.force,
            progress=tell,
        )


def _export_probing(
    model: Path, output: Path, reading: Reading, tell: Callable[[str], None]
) -> None:
    from dlm.index.check.decode import decode
    from dlm.index.layout import MANIFEST, read_manifest
    from dlm.index.ngrams import read_raw
    from dlm.kenlm.write import check_memory, write_probing
    from dlm.record.provenance import is_record_line

    if (model / MANIFEST).exists():
        check_memory(model, read_manifest(model).counts, reading.memory_bytes)
        tell(f"reading {model}")
        decoded = decode(model)
        vocabulary, orders = decoded.vocabulary, decoded.orders
        comments = decoded.manifest.provenance.get("comments", [])
    else:
        with reading.open(model, tell) as reader:
            check_memory(model, reader.counts, reading.memory_bytes)
            tell(f"reading {model}")
            orders, comments = read_raw(reader), reader.comments
            vocabulary = reader.vocabulary
    write_probing(output, vocabulary, orders, progress=tell)
    if any(is_record_line(str(line)) for line in comments):
        print(
            f"dlm: {output} does not carry the privacy record of {model}: a KenLM file "
            f"cannot hold one. Keep {model} beside the new file",
            file=sys.stderr,
        )


def export(
    directory: Model,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="ARPA file to write; .gz, .zst or .xz compresses it.  [default: standard output]",
        ),
    ] = None,
    to: Annotated[
        str, typer.Option("--format", help="arpa; or probing, a KenLM file, which needs --output.")
    ] = "arpa",
    vocab: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Words, one per line, of a KenLM file that stores none."),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Memory limit for reading or writing a KenLM file, such as 2G.  "
            "[default: the free memory]",
        ),
    ] = None,
    tmp: Tmp = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Overwrite an existing file, and allow a search of a KenLM file that takes over "
            "ten hours.",
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Convert a shard set or a KenLM file back into ARPA.

    With --format probing, a shard set, an ARPA file or a KenLM file becomes a probing file, as
    KenLM's build_binary makes it, for C++ decoders.

    A KenLM probing file holds hashes instead of words, so a search must find its n-grams; the
    time it takes is estimated. The ARPA file is written only if every hash matches one n-gram.

    Examples:
        dlm export shards/model --output exported.arpa.zst
        dlm export shards/model | head
        dlm export model.binary --output recovered.arpa.zst
        dlm export shards/model --format probing --output exported.binary
    """
    from dlm.index.check.decode import export_arpa
    from dlm.kenlm.layout import is_kenlm_file
    from dlm.kenlm.write import export_ngrams

    if output is not None and str(output) == "-":
        output = None
    if output is not None and output.exists() and not force:
        raise ConfigError(
            f"--output: {output} already exists; name another file, or pass --force to overwrite it"
        )
    check_writes("--output", output, arpa=True, inputs=(directory, vocab))
    target = sys.stdout.buffer if output is None else output
    tell = stage_printer(quiet=quiet)
    beside = None if output is None else output.absolute().parent
    if to not in ("arpa", "probing") or (to == "probing" and output is None):
        raise ConfigError(
            f"--format is {to}{'' if output else ' without --output'}; expected arpa, or probing "
            "with --output FILE"
        )
    is_file = is_kenlm_file(directory)
    of_files = (vocab, tmp, None if to == "probing" else memory)
    if not is_file and of_files != (None, None, None):
        raise ConfigError(
            f"--vocab, --memory and --tmp apply to a KenLM file, but {directory} is not one; "
            "leave these options out"
        )
    reading = Reading(vocab, memory, tmp or beside, force)
    if to == "probing":
        assert output is not None
        _export_probing(directory, output, reading, tell)
        return
    if not is_file:
        export_arpa(directory, target)
        return
    with reading.open(directory, tell) as reader:
        export_ngrams(reader, target, progress=tell)
