"""Write slime/config/megatron_fields.json: the fields of the installed megatron-core's configuration dataclasses.

Run it after changing the megatron-core version; a test compares the checked-in file with what this prints.
It does not know how users spell Megatron's flags (slime/config/megatron_table.py does).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import sys
import warnings
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "slime" / "config" / "megatron_fields.json"
SCALARS = {"bool": "bool", "int": "int", "float": "float", "str": "str"}


def type_name(annotation) -> str:
    """Give the simplest of bool, int, float, str, list, other that describes a field."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    text = SCALARS.get(text) or re.sub(r"typing\.|NoneType|None|Optional|Literal|Union|[\[\] ]", "", str(annotation))
    parts = {part for part in re.split(r"[,|]", text) if part}
    if all(part.startswith(("'", '"')) for part in parts):
        return "str"
    return SCALARS.get(parts.pop(), "other") if len(parts) == 1 else "other"


def default_value(field: dataclasses.Field):
    """Give a JSON value of a field's default; None where it has none or it is not plain data."""
    value = field.default
    if isinstance(value, enum.Enum):
        return value.name
    return value if isinstance(value, bool | int | float | str) else None


def snapshot() -> dict:
    """Collect the fields of all configuration dataclasses, each with the classes that have it."""
    warnings.filterwarnings("ignore")
    from megatron.core import __version__
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fields: dict[str, dict] = {}
    for cls in (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        for field in dataclasses.fields(cls):
            entry = {"type": type_name(field.type), "default": default_value(field), "classes": []}
            fields.setdefault(field.name, entry)["classes"].append(cls.__name__)
    return {"megatron_core": __version__, "fields": dict(sorted(fields.items()))}


def render() -> str:
    """Give the text of the checked-in file."""
    data = snapshot()
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in data["fields"].items())
    return f'{{\n "megatron_core": {json.dumps(data["megatron_core"])},\n "fields": {{\n{rows}\n }}\n}}\n'


if __name__ == "__main__":
    TARGET.write_text(render())
    print(f"wrote {TARGET}", file=sys.stderr)
