"""The ``slime`` command, and what every entry point does with errors and signals."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable

import slime

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def run_command(command: Callable[[], object]) -> None:
    """Run an entry point and exit with a status: one readable line for a user's mistake, a clean end on Ctrl-C or SIGTERM.

    ``SLIME_DEBUG=1`` shows the traceback of every error.
    """
    from slime.utils.dependencies import check_dependencies

    signal.signal(signal.SIGTERM, _interrupt)
    try:
        check_dependencies()
        command()
    except KeyboardInterrupt:
        print("slime: interrupted; all processes of the run have ended", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(_report(error, EXIT_USAGE))
    except (RuntimeError, OSError) as error:
        sys.exit(_report(error, EXIT_FAILED))


def _report(error: Exception, status: int) -> int:
    if os.environ.get("SLIME_DEBUG"):
        logging.getLogger(__name__).exception("full traceback")
    print(f"slime: error: {error}", file=sys.stderr)
    return status


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    # These have flags of their own: everything after their name is passed on.
    if argv[:1] == ["engine"]:
        from slime.engine.__main__ import main as engine_main

        sys.exit(engine_main(argv[1:]))
    if argv[:1] == ["convert"]:
        from slime.convert import main as convert_main

        run_command(lambda: convert_main(argv[1:]))
        return
    parser = argparse.ArgumentParser(
        prog="slime", description="Post-training of language models by reinforcement learning.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"slime {slime.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_quickstart(commands)
    _add_ledger(commands)
    commands.add_parser("engine", help="the embedded rollout engine alone (SGLang's HTTP API); see slime engine --help")
    commands.add_parser("convert", help="Hugging Face folder to Megatron checkpoint and back; see slime convert --help")
    arguments = parser.parse_args(argv)
    run_command(lambda: arguments.run(arguments))


def _add_quickstart(commands) -> None:
    from slime.quickstart import recipe

    quickstart = commands.add_parser(
        "quickstart", help="the whole loop on this machine: tiny model, SFT, GRPO, evaluation"
    )
    quickstart.add_argument("--seed", type=int, default=0, help="of model, data and sampling (default: 0)")
    quickstart.add_argument(
        "--num-rollout", type=int, default=recipe.NUM_ROLLOUT, help="GRPO rounds (default: %(default)s)"
    )
    quickstart.add_argument("--output-dir", default="outputs", help="runs are written below it (default: %(default)s)")
    quickstart.set_defaults(run=_run_quickstart)


def _run_quickstart(arguments) -> None:
    from slime.quickstart.run import run

    run(seed=arguments.seed, num_rollout=arguments.num_rollout, output_dir=arguments.output_dir)


def _add_ledger(commands) -> None:
    ledger = commands.add_parser("ledger", help="what became of every prompt of a run; status 1 if it does not add up")
    ledger.add_argument("directory", help="run directory, folder of --save, or one checkpoint")
    ledger.add_argument("--json", action="store_true", help="one line for programs, with all problems")
    ledger.set_defaults(run=_run_ledger)


def _run_ledger(arguments) -> None:
    from slime.rollout import ledger_command

    sys.exit(ledger_command.run(arguments.directory, as_json=arguments.json))
