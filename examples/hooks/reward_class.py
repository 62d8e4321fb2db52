"""A reward model that is loaded once.  --custom-rm-path examples/hooks/reward_class.py --rm-model-path FOLDER"""


class CustomRewardModel:
    def __init__(self, model_path):
        """`model_path` is --rm-model-path (or --hf-checkpoint). Load your model here; this one only counts letters."""
        self.model_path = model_path

    def compute_reward(self, prompts, responses):
        """Texts (or message lists) in, one float each out. Runs in a thread, so it may take its time."""
        return [sum(map(str.isalpha, response)) / max(1, len(response)) for response in responses]
