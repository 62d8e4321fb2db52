"""The trainer's model, built your way.  --custom-model-provider-path examples/hooks/model_provider.py:frozen_embedding

Start from the built-in model, as here, or return any module with Megatron's GPTModel interface whose parameters have its names.
"""

from slime.backends.megatron_utils.model_provider import gpt_model


def frozen_embedding(pre_process, post_process, vp_stage=None, args=None):
    """This rank's part: `pre_process` says that it holds the embedding, `post_process` the output layer."""
    model = gpt_model(args, pre_process, post_process, vp_stage)
    if pre_process:
        model.embedding.requires_grad_(False)
    return model
