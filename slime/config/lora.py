"""Flags of low-rank adapters (declarations only); what they imply stands in lora_rules.py."""

from __future__ import annotations

from slime.config.spec import Flag, section

F = Flag

# fmt: off
LORA = section(
    "LoRA",
    "slime/backends/megatron_utils",
    [
        F("--lora-rank", "rank of the low-rank adapters that are trained instead of the model; 0 trains the model", "int", 0, src="O"),
        F("--lora-alpha", "adapters add (alpha / rank) x B x A", "float", 32.0, src="O"),
        F("--lora-dropout", "share of an adapter's inputs that are dropped in training", "float", 0.0, src="O"),
        F("--target-modules", "projections with adapters: q_proj ... down_proj, Megatron's linear_qkv, linear_proj, linear_fc1, linear_fc2, or all-linear (when not given)", nargs="+", aliases=("--lora-target-modules",), src="O"),
        F("--lora-adapter-path", "PEFT folder to start from; with several adapters name=folder; rank, alpha and targets come from it when not given", nargs="+", src="O"),
        F("--lora-adapters", "names of the adapters trained together; a sample's metadata key lora says which is its own", nargs="+", src="O"),
        F("--lora-sync", "what engines get at a weight sync: the merged model, or the adapter beside the base that they hold", default="merged", choices=("merged", "adapter"), src="O", owner="slime"),
    ],
)
# fmt: on
FLAGS = LORA
