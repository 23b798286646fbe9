"""The OpenAPI description of a gRPC service as it is called by POST with canonical JSON."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

# Numbers of fields of FileDescriptorProto, DescriptorProto and so on: a comment's place.
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


def openapi(file: FileDescriptorProto) -> dict[str, Any]:
    """The description, with the comments of the proto file; needs its source info."""
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
