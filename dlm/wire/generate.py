"""Makes dlm/wire/_pb from proto/: ``python -m dlm.wire.generate [OUTPUT]`` in a checkout.

The modules of every contract, and the OpenAPI description of the gateway's (`openapi.py`).

Needs the `dev` extra. grpcio-tools is pinned there: its 1.81 series writes code that protobuf 6.33
and 7 both load, and the result is committed, so users need no generator.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from dlm.wire.openapi import openapi

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "dlm.wire._pb"
GATEWAY = "dlm/v1/lm.proto"
PROTOS = ("dlm/v1/shard.proto", GATEWAY)
OPENAPI = "lm.openapi.json"


def generate(output: Path) -> list[Path]:
    """Writes all that is made of the proto files to `output`; returns the paths."""
    from google.protobuf import descriptor_pb2
    from grpc_tools import protoc

    output.mkdir(parents=True, exist_ok=True)
    written = []
    for proto in PROTOS:
        # Only the file's name is given, so that the modules are flat and need no package dlm.v1
        # beside the real one; the descriptor's name is the path below proto/.
        arguments = ["protoc", f"--proto_path={ROOT / 'proto'}", f"--python_out={output}"]
        if protoc.main([*arguments, f"--pyi_out={output}", proto]) != 0:
            raise SystemExit(f"protoc could not compile {proto}")
        stem = Path(proto).stem
        for suffix in ("_pb2.py", "_pb2.pyi"):
            source = output / Path(proto).parent / f"{stem}{suffix}"
            text = re.sub(r"[ \t]+$", "", source.read_text(), flags=re.MULTILINE)
            target = output / f"{stem}{suffix}"
            target.write_text(text)
            source.unlink()
            written.append(target)
        for folder in sorted((output / "dlm").rglob("*"), reverse=True):
            folder.rmdir()
        (output / "dlm").rmdir()
    target = output / OPENAPI
    arguments = ["protoc", f"--proto_path={ROOT / 'proto'}", "--include_source_info"]
    if protoc.main([*arguments, f"--descriptor_set_out={target}", GATEWAY]) != 0:
        raise SystemExit(f"protoc could not compile {GATEWAY}")
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    target.write_text(json.dumps(openapi(file), indent=1) + "\n")
    return [*written, target]


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dlm/wire/_pb"):
        print(path)  # noqa: T201
