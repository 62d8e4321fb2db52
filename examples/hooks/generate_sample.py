"""Generation of one sample, your way.  --custom-generate-function-path examples/hooks/generate_sample.py"""

from slime.rollout.sglang_rollout import generate as built_in_generate


async def generate(args, sample, sampling_params, evaluation=False):
    """Training explores at a temperature that depends on the prompt; evaluation stays as configured."""
    if not evaluation:
        sampling_params = {**sampling_params, "temperature": 1.2 if len(sample.prompt) > 20 else 0.8}
    return await built_in_generate(args, sample, sampling_params, evaluation=evaluation)
