"""Write slime/config/sglang_flags.json from SGLang's source: server flags with the --sglang- prefix.

Usage: ``python tools/gen_sglang_flags.py FOLDER VERSION`` where FOLDER holds the unpacked ``sglang`` package. The source
is parsed, never imported, so neither torch nor a GPU is needed. Flags that the framework sets itself are left out.
Only names, types and defaults are recorded.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "slime" / "config" / "sglang_flags.json"

#: Set by the framework for every engine.
HIDDEN = frozenset(
    """model_path config trust_remote_code random_seed enable_memory_saver tp_size port nnodes node_rank
    dist_init_addr gpu_id_step base_gpu_id nccl_port skip_server_warmup enable_return_routed_experts""".split()
)
#: Registered by hand in the server's source, or deprecated but still used by scripts.
MANUAL = {
    "sampling_backend": {"type": "str"},
    "reasoning_parser": {"type": "str"},
    "tool_call_parser": {"type": "str"},
    "kv_canary_real_data": {"type": "str", "default": "none"},
    "disable_cuda_graph": {"type": "bool", "default": False},
    "enable_dp_attention": {"type": "bool", "default": False},
    "enable_flashinfer_allreduce_fusion": {"type": "bool", "default": False},
    "cuda_graph_max_bs": {"type": "int"},
    "cuda_graph_bs": {"type": "int", "nargs": "+"},
}


def literal(node: ast.AST | None):
    """Evaluate a plain default; anything computed becomes None."""
    try:
        value = ast.literal_eval(node)
        json.dumps(value)
        return value
    except (ValueError, TypeError, SyntaxError):
        return None


def unwrap(annotation: str) -> tuple[str, str | None]:
    """Split a type into its scalar name and nargs."""
    text = annotation.replace(" ", "").replace("|None", "")
    if text.startswith("Optional[") and text.endswith("]"):
        text = text[9:-1]
    if text.lower().startswith("list["):
        return unwrap(text[5:-1])[0], "+"
    return (text if text in ("bool", "int", "float", "str") else "str"), None


def describe(node: ast.AnnAssign) -> tuple[str, dict] | None:
    """Turn one annotated field ``name: A[T, help or Arg(...)] = default`` into a spelling and its JSON form."""
    marker = node.annotation
    if not (isinstance(marker, ast.Subscript) and ast.unparse(marker.value) == "A"):
        return None
    kind_node, meta = marker.slice.elts[:2]
    if isinstance(meta, ast.Call) and ast.unparse(meta.func) != "Arg":
        return None
    options = {k.arg: k.value for k in meta.keywords} if isinstance(meta, ast.Call) else {}
    if literal(options.get("no_cli")):
        return None
    kind, nargs = unwrap(ast.unparse(kind_node))
    if "type_parser" in options:
        readable = ast.unparse(options["type_parser"]) == "human_readable_int"
        kind, nargs = ("int", None) if readable else ("str", None)
    nargs = literal(options.get("nargs")) or nargs
    entry: dict = {"action": "store", "default": literal(node.value) if node.value else None}
    if "action" in options:
        is_switch = "BooleanOptionalAction" in ast.unparse(options["action"])
        entry["action"] = "bool" if is_switch else "store"
        nargs = None if is_switch else nargs or "+"
    elif kind == "bool":
        entry["action"] = "true"
    if entry["action"] == "store":
        kind = "lower" if node.target.id in ("log_level", "log_level_http") else kind
        entry |= {"type": kind} if kind != "str" else {}
        entry |= {"nargs": nargs} if nargs else {}
    spelled = literal(options.get("cli_name")) or "--" + node.target.id.replace("_", "-")
    aliases = literal(options.get("aliases")) or []
    names = [f"--sglang-{name.removeprefix('--')}" for name in [spelled, *aliases]]
    entry["dest"] = f"sglang_{node.target.id}"
    if len(names) > 1:
        entry["aliases"] = names[1:]
    return names[0], entry


def snapshot(package: Path, version: str) -> dict:
    """Collect the flags of an unpacked sglang package."""
    flags: dict[str, dict] = {}
    for path in sorted((package / "srt" / "arg_groups" / "fields").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found = describe(node)
                if found and node.target.id not in HIDDEN:
                    flags[found[0]] = found[1]
    for name, meta in MANUAL.items():
        entry = {"action": "true" if meta["type"] == "bool" else "store", "default": meta.get("default")}
        entry |= {key: meta[key] for key in ("type", "nargs") if meta.get(key) in ("int", "+")}
        flags[f"--sglang-{name.replace('_', '-')}"] = entry | {"dest": f"sglang_{name}"}
    return {"sglang": version, "flags": dict(sorted(flags.items()))}


def render(package: Path, version: str) -> str:
    """Give the text of the checked-in file."""
    data = snapshot(package, version)
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in data["flags"].items())
    return f'{{\n "sglang": {json.dumps(version)},\n "flags": {{\n{rows}\n }}\n}}\n'


if __name__ == "__main__":
    TARGET.write_text(render(Path(sys.argv[1]), sys.argv[2]))
    print(f"wrote {TARGET}", file=sys.stderr)
