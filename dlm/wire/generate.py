"""Generates dlm/wire/_pb from proto/: ``python -m dlm.wire.generate [OUTPUT]`` in a checkout.

The output has Python modules for every contract, and an OpenAPI description of the gateway, to
whose methods callers POST canonical JSON.

Needs the `dev` extra, which pins grpcio-tools: the 1.81 series writes code that protobuf 6.33 and 7
both load. The output is committed, so users need no generator.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "dlm.wire._pb"
GATEWAY = "dlm/v1/lm.proto"
PROTOS = ("dlm/v1/shard.proto", GATEWAY)
OPENAPI = "lm.openapi.json"

# Field numbers of FileDescriptorProto, DescriptorProto and so on, which make up a comment's path.
_MESSAGES, _ENUMS, _SERVICES, _FIELDS, _METHODS = 4, 5, 6, 2, 2
_BY_KIND: dict[int, dict[str, Any]] = {
    FieldDescriptorProto.TYPE_STRING: {"type": "string"},
    FieldDescriptorProto.TYPE_BYTES: {"type": "string", "format": "byte"},
    FieldDescriptorProto.TYPE_BOOL: {"type": "boolean"},
    FieldDescriptorProto.TYPE_UINT32: {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    FieldDescriptorProto.TYPE_UINT64: {"type": "string", "pattern": "^[0-9]+$"},
}
# JSON cannot write these values as numbers.
_NOT_FINITE = {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}
_NUMBERS = {
    FieldDescriptorProto.TYPE_FLOAT: "float",
    FieldDescriptorProto.TYPE_DOUBLE: "double",
}
_ERROR = {
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "message": {"type": "string", "description": "what was found and what to do"},
        "reason": {"type": "string", "description": "see proto/README.md"},
    },
    "required": ["code", "message"],
}


def generate(output: Path) -> list[Path]:
    """Writes everything made from the proto files to `output`; returns the paths."""
    from google.protobuf import descriptor_pb2
    from grpc_tools import protoc

    output.mkdir(parents=True, exist_ok=True)
    written = []
    for proto in PROTOS:
        # The modules are moved out of dlm/v1, so that they need no package dlm.v1 beside the
        # real one. The descriptor's name is the path below proto/.
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


def openapi(file: FileDescriptorProto) -> dict[str, Any]:
    """Returns the OpenAPI description, with the comments in the proto file's source info."""
    comments = {
        tuple(place.path): " ".join((place.leading_comments or place.trailing_comments).split())
        for place in file.source_code_info.location
    }
    (service,) = file.service
    paths = {}
    for number, method in enumerate(service.method):
        if method.client_streaming or method.server_streaming:
            continue
        paths[f"/{file.package}.{service.name}/{method.name}"] = {
            "post": {
                "operationId": method.name,
                "summary": comments.get((_SERVICES, 0, _METHODS, number), ""),
                "parameters": [
                    {
                        "name": "Connect-Timeout-Ms",
                        "in": "header",
                        "description": "milliseconds until the answer is of no use",
                        "schema": {"type": "integer", "minimum": 0},
                    }
                ],
                "requestBody": {"required": True, "content": _json(_reference(method.input_type))},
                "responses": {
                    "200": {"description": "OK", "content": _json(_reference(method.output_type))},
                    "default": {"description": "refused", "content": _json(_reference("Error"))},
                },
            }
        }
    schemas: dict[str, Any] = {"Error": _ERROR}
    for number, enum in enumerate(file.enum_type):
        schemas[enum.name] = {
            "type": "string",
            "description": comments.get((_ENUMS, number), ""),
            "enum": [value.name for value in enum.value],
        }
    for number, message in enumerate(file.message_type):
        schemas[message.name] = _message(message, (_MESSAGES, number), comments)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"{file.package}.{service.name}", "version": file.package.split(".")[-1]},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name.rpartition('.')[2]}"}


def _message(
    message: DescriptorProto, place: tuple[int, ...], comments: dict[tuple[int, ...], str]
) -> dict[str, Any]:
    properties = {}
    for number, field in enumerate(message.field):
        schema = _field(field)
        if told := comments.get((*place, _FIELDS, number)):
            schema = {**schema, "description": told}
        properties[field.json_name] = schema
    out: dict[str, Any] = {"type": "object", "properties": properties}
    if told := comments.get(place):
        out["description"] = told
    return {**out, "additionalProperties": False}


def _field(field: FieldDescriptorProto) -> dict[str, Any]:
    if field.type_name:
        schema = _reference(field.type_name)
    elif field.type in _NUMBERS:
        number = {"type": "number", "format": _NUMBERS[field.type]}
        schema = {"anyOf": [number, _NOT_FINITE]}
    else:
        schema = dict(_BY_KIND[field.type])
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return {"type": "array", "items": schema}
    return schema


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dlm/wire/_pb"):
        print(path)  # noqa: T201
