"""What was called when, over all processes of a run: a line per call."""

import json
import os


def note(args, name, *facts):
    line = json.dumps([name, *facts]) + "\n"
    with open(os.path.join(args.run_dir, "events.jsonl"), "a", encoding="utf-8") as file:
        file.write(line)
