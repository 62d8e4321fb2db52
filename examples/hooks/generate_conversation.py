"""An agent that thinks in messages.  --custom-generate-function-path examples/hooks/generate_conversation.py --max-turns 2

Needs prompts that are message lists. Each call of `generate_single` is one model turn; what the engine sampled is
recorded and trained, everything that you add to the conversation is context and masked.
"""

from slime.rollout import generate_single


async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        conversation = sample.prompt
        for turn in range(args.max_turns):
            text = await generate_single(conversation)
            conversation.append({"role": "assistant", "content": text})
            if turn + 1 < args.max_turns:
                conversation.append({"role": "user", "content": "Are you sure? Answer again."})
        sample.response = conversation[-1]["content"]
    return samples
