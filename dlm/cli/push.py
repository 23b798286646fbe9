"""`dlm push` and `dlm fetch`: copy shard sets to stores and from stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.checks import READ_ANY, WRITE_FOLDER
from dlm.cli.options import Json, Silent
from dlm.cli.output import print_answer, stage_printer
from dlm.errors import ConfigError
from dlm.progress import Tell
from dlm.stores.remote import RemotePath, located

Url = Annotated[str, typer.Argument(metavar="URL", help="Store URL, such as s3://models/en.")]


def push(
    model: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder of a shard set; or a file."),
        READ_ANY,
    ],
    url: Url,
    as_json: Json = False,
    quiet: Silent = False,
) -> None:
    """Push a shard set to a store: s3://, gs:// or az://.

    The manifest is pushed last, so nobody serves an incomplete set. After Ctrl-C or a crash, the
    same command continues. A URL with another shard set is refused. You can also push a model,
    cluster.toml, or a list of shard sets (.sets); only the last two replace an existing object.

    Credentials are those of the store, from the environment (AWS_ACCESS_KEY_ID, ...) or the role of
    the machine; AWS_ENDPOINT_URL names another S3 server.

    Examples:
        dlm push shards/model s3://models/en-2026-11
    """
    from dlm.index.placed import push_file, push_set

    place = _place(url)
    if model.is_dir():
        pushed = push_set(model, place, stage_printer(quiet=quiet))
    else:
        pushed = push_file(model, place)
    told = f"{'pushed' if pushed else 'was there'}: {url}"
    print_answer({"url": url, "pushed": pushed}, [told], as_json=as_json, quiet=quiet)


def fetch(
    url: Url,
    directory: Annotated[
        Path, typer.Argument(metavar="PATH", help="Folder or file to create."), WRITE_FOLDER
    ],
    as_json: Json = False,
    quiet: Silent = False,
) -> None:
    """Fetch a shard set from a store to a folder, or a file.

    What is fetched is verified. After Ctrl-C or a crash, the same command continues. Commands that
    serve or score a model accept its URL directly; others read local files only.

    Examples:
        dlm fetch s3://models/en-2026-11 shards/model
        dlm fetch hf://edugp/kenlm/wikipedia/en.arpa.bin en.arpa.bin
    """
    import shutil

    from dlm.files import move, scratch_folder
    from dlm.index.placed import local_model

    if directory.exists():
        raise ConfigError(f"{directory} already exists; give another path")
    cached = local_model(_place(url), stage_printer(quiet=quiet))
    with scratch_folder(directory.absolute().parent, directory.name) as beside:
        made = beside / directory.name
        if cached.is_dir():
            shutil.copytree(cached, made, ignore=shutil.ignore_patterns(".*"))
        else:
            shutil.copyfile(cached, made)
        move(made, directory)
    facts = {"url": url, "directory": str(directory)}
    print_answer(facts, [f"fetched: {directory}"], as_json=as_json, quiet=quiet)


@contextmanager
def local_output(output: Path | str, tmp: Path | None, tell: Tell) -> Iterator[Path]:
    """Yields where a command writes a shard set or a file: `output`; or, if that is in a store, a
    path in `tmp`, from which the result is pushed when the block succeeds."""
    from dlm.files import scratch_folder
    from dlm.index.placed import push_file, push_set

    place = located(output)
    if not isinstance(place, RemotePath):
        yield Path(output)
        return
    with scratch_folder(tmp, "dlm-output") as folder:
        made = folder / place.name
        yield made
        if made.is_dir():
            push_set(made, place, tell)
        else:
            push_file(made, place)


def _place(url: str) -> RemotePath:
    found = located(url)
    if not isinstance(found, RemotePath):
        raise ConfigError(f"{url} is not a store URL; expected one such as s3://BUCKET/NAME")
    return found
