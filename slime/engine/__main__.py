"""`python -m slime.engine`: run one embedded engine."""

from __future__ import annotations

import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Parse flags, arrange to end with the parent, serve. Returns the exit code."""
    from slime.engine.server_args import parse
    from slime.utils.parent_watch import exit_with_parent

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        args = parse(argv)
        if args.parent_pid is not None:
            exit_with_parent(args.parent_pid)
    except ValueError as error:
        print(f"slime engine: error: {error}", file=sys.stderr)
        return 1
    os.environ.setdefault("OMP_NUM_THREADS", str(args.num_threads))
    from slime.engine.server import serve

    return serve(args)


if __name__ == "__main__":
    sys.exit(main())
