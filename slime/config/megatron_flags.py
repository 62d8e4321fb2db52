"""Megatron-LM's flags as Flag records: the hand table, plus a flag for every other field of the core's dataclasses.

Invariants: every configuration field of the recorded megatron-core is reachable by a flag or listed in INTERNAL;
nothing of Megatron is imported. It does not know how the trainer uses the values.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from slime.config.megatron_table import TABLE
from slime.config.spec import TYPES, Flag
from slime.config.status import MEGATRON_GROUPS

FIELDS_FILE = Path(__file__).with_name("megatron_fields.json")
SECTION = "Megatron"
OWNER = "slime/backends/megatron_utils"

#: Fields that the trainer fills with objects or derives from flags of another name; no flag of their own.
INTERNAL = frozenset(
    """
    _cpu_offloading_context activation_func autocast_dtype enable_autocast barrier_with_L1_time batch_p2p_comm
    batch_p2p_sync bias_activation_fusion bucket_size embedding_init_method finalize_model_grads_func fp8_param
    fp8_quantizer_factory fp4_param fp4_quantizer_factory gated_linear_unit grad_reduce_in_fp32 grad_scale_func
    grad_sync_func activation_func_fp8_input_store hetereogenous_dist_checkpoint heterogeneous_block_specs init_method
    layernorm_epsilon layernorm_zero_centered_gamma mtp_standalone no_sync_func num_moe_experts
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    num_microbatches_with_partial_activation_checkpoints output_layer_init_method param_sync_func params_dtype
    pipeline_dtype timers tp_only_amax_red use_te_activation_func average_in_collective
    reduce_scatter_with_fp32_accumulation pad_buckets_for_high_nccl_busbw check_for_nan_in_grad delay_wgrad_compute
    tp_comm_atomic_ag tp_comm_atomic_rs deallocate_pipeline_outputs fp8_param_gather
    cuda_graph_use_single_mempool cuda_graph_retain_backward_graph disable_parameter_transpose_cache
""".split()
)

#: Flags that configuration itself turns into other values.
OWNERS = {
    "finetune": "slime/config/checkpoint_paths.py",
    "recompute_activations": "slime/config/megatron_values.py",
    "use_rotary_position_embeddings": "slime/config/megatron_values.py",
    "sequence_parallel": "slime/config/megatron_values.py",
    "num_layers_per_virtual_pipeline_stage": "slime/config/layout.py",
    "num_virtual_stages_per_pipeline_rank": "slime/config/layout.py",
    "virtual_pipeline_model_parallel_size": "slime",
    "microbatch_group_size_per_vp_stage": "slime",
    "bf16": "slime/config/resolve.py",
    "fp16": "slime/config/resolve.py",
    "trust_remote_code": "slime",
    "seq_length": "slime/config/megatron_values.py",
    "max_position_embeddings": "slime",
}

#: kind -> (type, nargs)
_KINDS = {
    "int": ("int", None),
    "float": ("float", None),
    "str": ("str", None),
    "lower": ("lower", None),
    "pattern": ("pattern", None),
    "ints": ("int", "+"),
    "strs": ("str", "+"),
}


def _literal(text: str, kind: str):
    """Turn the default column of a table line into a value."""
    if text in ("None", "-"):
        return None
    if text in ("True", "False"):
        return text == "True"
    value = TYPES[_KINDS[kind][0]](text)
    return [value] if _KINDS[kind][1] else value


def _from_line(line: str, group: str) -> Flag:
    """Build the Flag of one table line."""
    status, reason = MEGATRON_GROUPS[group]
    name, kind, *rest = line.split()
    default, dest, choices = (rest + ["-", "-", "-"])[:3]
    attribute = name[2:].replace("-", "_") if dest == "-" else dest
    common = {
        "name": name,
        "help": "Megatron flag" if status == "live" else reason,
        "dest": attribute,
        "section": SECTION,
        "owner": OWNERS.get(attribute, OWNER),
        "src": "M",
        "status": status,
        "reason": reason,
    }
    if kind == "true":
        return Flag(**common, action="true", default=False)
    if kind == "false":
        return Flag(**common, action="false", default=True)
    type_name, nargs = _KINDS[kind]
    allowed = None if choices == "-" else tuple(choices.split(","))
    return Flag(**common, type=type_name, nargs=nargs, choices=allowed, default=_literal(default, kind))


def _from_field(name: str, entry: dict) -> Flag:
    """Build the Flag of a dataclass field that has no table line; such features are refused when used."""
    status, reason = MEGATRON_GROUPS["other"]
    spelled = name.lower().replace("_", "-")
    common = {"dest": name, "help": reason, "section": SECTION, "owner": OWNER, "src": "M"}
    common |= {"status": status, "reason": reason, "default": entry["default"]}
    if entry["type"] == "bool":
        if entry["default"]:
            return Flag(name=f"--no-{spelled}", action="false", **common)
        return Flag(name=f"--{spelled}", action="true", **common)
    kind = entry["type"] if entry["type"] in ("int", "float") else "str"
    return Flag(name=f"--{spelled}", type=kind, **common)


@lru_cache(maxsize=1)
def recorded_fields() -> dict[str, dict]:
    """Read the recorded fields of megatron-core's configuration dataclasses."""
    return json.loads(FIELDS_FILE.read_text())["fields"]


@lru_cache(maxsize=1)
def flags() -> tuple[Flag, ...]:
    """Give every Megatron flag, table lines first."""
    table = [_from_line(line, group) for group, text in TABLE.items() for line in text.split("\n") if line]
    known = {flag.dest for flag in table}
    generated = [
        _from_field(name, entry)
        for name, entry in recorded_fields().items()
        if name not in known and name not in INTERNAL
    ]
    return tuple(table + generated)
