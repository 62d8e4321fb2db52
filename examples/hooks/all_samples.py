"""Look at everything that a round made.  --rollout-all-samples-process-path examples/hooks/all_samples.py:keep_failures"""

import json
import os


def keep_failures(args, all_groups, data_source):
    """Write down prompts that no sample solved, groups that the dynamic filter dropped included.

    `data_source` is the Data Buffer: `data_source.add_samples(groups)` would train groups again later.
    """
    with open(os.path.join(args.run_dir, "unsolved.jsonl"), "a", encoding="utf-8") as file:
        for group in all_groups:
            if max(sample.get_reward_value(args) for sample in group) <= 0:
                file.write(json.dumps(group[0].prompt) + "\n")
