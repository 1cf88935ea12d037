"""Make the JSON schemas in corp_cli/schemas from the dataclasses in corp_cli/report/schema.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

import corp_cli
from corp_cli.report.schema import FILES

FOLDER = Path(corp_cli.__file__).parent / "schemas"


class Strict(GenerateJsonSchema):
    """All fields of a dataclass are there, in their order, and no others."""

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        """An object with all its properties."""
        found = super().dataclass_schema(schema)
        return {**found, "required": list(found["properties"]), "additionalProperties": False}

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Names need no titles."""
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        """Defaults are for Python: a file holds every field."""
        return self.generate_inner(schema["schema"])

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        """As the dataclasses have it."""
        return value


def schemas() -> dict[str, str]:
    """Name of the schema's file → its text."""
    found = {}
    for name, of in FILES.items():
        content = TypeAdapter(of).json_schema(schema_generator=Strict)
        for part in (content, *content["$defs"].values()):
            part.pop("description", None)  # not every pydantic adds it; docs/report.md explains the fields
        content = {"$schema": Strict.schema_dialect, **content, "title": name}
        found[name.replace(".json", ".schema.json")] = json.dumps(content, indent=2) + "\n"
    return found


if __name__ == "__main__":
    for name, text in schemas().items():
        (FOLDER / name).write_text(text, "utf-8")
