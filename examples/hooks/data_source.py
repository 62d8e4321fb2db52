"""Prompts without a file.  --data-source-path examples/hooks/data_source.py

The class may take `(args)` or nothing. `get_samples` may return Samples, rows or texts; they are grouped and numbered for
you. `add_samples` gets back what was not finished. With `state_dict` the position survives a restart, and what was being
generated then is handed out again.
"""

import random


class Sums:
    def __init__(self, args):
        self.random = random.Random(args.rollout_seed)
        self.drawn = 0

    def get_samples(self, num_samples):
        return [self._row() for _ in range(num_samples)]

    def add_samples(self, samples):
        """Nothing is kept: there are always new sums."""

    def _row(self):
        a, b = self.random.randrange(10), self.random.randrange(10)
        self.drawn += 1
        return {"prompt": f"{a}+{b}=", "label": str(a + b)}

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        for _ in range(state["drawn"] - self.drawn):
            self._row()
