"""Build this rank's part of the model, and run it so that logits exist only where they are needed.

Invariant: the output layer sees only the rows chosen by `forward_logits`; with sequence parallelism, where rows are
spread over tensor ranks, it sees all and the choice is made afterwards. The result is the same.
"""

from __future__ import annotations

import torch

from slime.backends.megatron_utils import hook_results
from slime.backends.megatron_utils.layer_spec import decoder_spec
from slime.backends.megatron_utils.model_config import padded_vocab_size, resolve_architecture, transformer_config
from slime.backends.megatron_utils.value_head import ValueHead
from slime.utils import device


def build_chunks(args, with_value_head: bool = False) -> list[torch.nn.Module]:
    """Return what this pipeline stage holds: one model, or one for each virtual stage."""
    resolve_architecture(args)
    config = transformer_config(args)
    stages = args.virtual_pipeline_model_parallel_size
    chunks = [None] if stages is None else range(stages)
    return [build_model(args, config, stage, with_value_head) for stage in chunks]


def build_model(args, config=None, vp_stage: int | None = None, with_value_head: bool = False) -> torch.nn.Module:
    """Return the GPTModel of this pipeline stage, on this process's device, in training mode.

    `--custom-model-provider-path` names a `(pre_process, post_process) -> module` that replaces ours; one that takes `vp_stage` or `args`
    is given them too. A value head takes the place of its output layer as well.
    """
    from megatron.core import parallel_state as mpu

    resolve_architecture(args)
    where = {
        "pre_process": mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    }
    if vp_stage is not None:
        where["vp_stage"] = vp_stage
    if args.custom_model_provider_path is not None:
        model = hook_results.model(args, **where)
    else:
        model = gpt_model(args, ties=not with_value_head, config=config, **where)
    post_process = where["post_process"]
    if with_value_head and post_process:
        model.output_layer = ValueHead(model.config, args.seed)
    model.to(device.device())
    if post_process:
        model.logit_rows = None
        model.output_layer.register_forward_pre_hook(_RowChooser(model))
    return model.train()


def gpt_model(args, pre_process: bool, post_process: bool, vp_stage: int | None = None, ties: bool = True, config=None):
    """Return the built-in model of this pipeline stage, its layers those of `--spec`; what a custom provider may start from.

    Args:
        ties: the output layer shares the embedding's weights where the architecture does. config: Megatron's TransformerConfig.
    """
    from megatron.core.models.gpt import GPTModel

    config = transformer_config(args) if config is None else config
    if args.spec:
        layers = hook_results.spec(args, config, vp_stage)
    else:
        layers = decoder_spec(config, vp_stage, with_adapters=args.lora_rank > 0)
    model = GPTModel(
        config,
        layers,
        vocab_size=padded_vocab_size(args),
        max_sequence_length=args.max_position_embeddings or args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=False,
        parallel_output=True,
        share_embeddings_and_output_weights=ties and not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        vp_stage=vp_stage,
    )
    if args.spec:
        hook_results.check_attention(hook_results.SPEC, hook_results.spec_path(args.spec), model)
    return model


def get_model_provider_func(args, role: str = "actor"):
    """Return the built-in `provider(pre_process, post_process, vp_stage=None)`, for a user's that changes its model.

    Whatever the role: what a critic has in place of the output layer is put there afterwards.
    """

    def provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None):
        resolve_architecture(args)
        return gpt_model(args, pre_process, post_process, vp_stage)

    return provider


class _RowChooser:
    """Forward pre-hook of the output layer: keep the rows asked for."""

    def __init__(self, model):
        self.model = model

    def __call__(self, layer, inputs):
        rows = self.model.logit_rows
        if rows is None or self.model.config.sequence_parallel:
            return None
        return (inputs[0].index_select(0, rows), *inputs[1:])


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the bare module inside Megatron's wrappers (DDP, Float16Module)."""
    while hasattr(model, "module"):
        model = model.module
    return model


def forward_logits(model, tokens, positions, packed, rows) -> torch.Tensor:
    """Run the model over a packed stream.

    Args:
        tokens, positions: [1, T] int64. packed: PackedBatchParams. rows: [N] stream positions whose logits are wanted,
            None for all.
    Returns: [1, N, V / tp] float32 logits ([1, N, 1] values with a value head) on the last pipeline stage, hidden states for
        the next one elsewhere.
    """
    bare = unwrap(model)
    bare.logit_rows = rows
    out = model(tokens, positions, None, packed_seq_params=packed)
    bare.logit_rows = None
    if not bare.post_process:
        return out
    chosen = rows is not None and bare.config.sequence_parallel
    return out.index_select(1, rows).float() if chosen else out.float()
