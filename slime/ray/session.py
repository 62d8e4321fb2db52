"""One run, seen from the driver: processes up, the verbs of the loop, everything down again.

``train.py`` reads as the algorithm because each verb here does one thing and reports it: metrics to the tracker, progress to the
console. The driver is the only writer of metrics.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from slime.config import checkpoint_dirs
from slime.observability.console import Console
from slime.observability.logging_utils import set_writer
from slime.observability.mismatch_alarm import MismatchAlarm
from slime.observability.timer import step_time_metrics
from slime.observability.tracking import BEFORE_TRAINING, Tracker
from slime.ray import boot, checkpoint
from slime.ray.interrupts import uninterrupted
from slime.ray.observable import observable
from slime.ray.placement_group import create_slots, layout
from slime.ray.rollout_manager import ENGINE_CHECK_S, OBSERVING, RolloutManager
from slime.ray.round_report import RoundReport, add_seconds, merged, timed, untrained_text
from slime.ray.run_folders import RunFolders
from slime.ray.slot_turns import SlotTurns
from slime.ray.trainer import Trainer
from slime.ray.wait import wait_for
from slime.utils.misc import should_run_periodic_action
from slime.utils.platform import process_age_s
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_START_DEADLINE_S = 1200.0
_STOP_DEADLINE_S = 6.0


@dataclass
class Generation:
    """A round being generated: ``reference`` until it is finished, ``batch`` (one boxed shard per rank) afterwards."""

    rollout_id: int
    reference: object
    started_at: float
    batch: list | None = None


class Session:
    """Context manager of one run. Leaving it, for whatever reason, ends every process that it started.

    A round is ``generate`` (or ``prompts`` ... ``batch``), ``train``, ``update_weights`` where ``sync_due``, ``end_round``;
    ``save`` and ``evaluate`` come between. docs/python_api.md has a loop of one's own.

    Args:
        looks_ahead: the loop generates rounds before the earlier ones are trained.
    """

    def __init__(self, args, looks_ahead: bool = False):
        self.args = args
        if args.async_buffer_size > 1 and not looks_ahead:
            args.start_notes.append(
                f"--async-buffer-size {args.async_buffer_size} has no effect in this loop, which generates and trains in "
                "turn; train_async.py looks ahead"
            )
        self.num_rollout = self.start_rollout_id = self._prompts_before = 0
        self.num_rollout_per_epoch: int | None = None
        self._weight_version = -1
        self._resumed: checkpoint_dirs.Checkpoint | None = None
        self._engine_urls: list[str] = []
        self._manager = self._trainer = self.tracker = None
        self._own_round_began = 0.0
        self._has_begun = False  # a round was begun
        self._generated_with: dict[int, int] = {}  # round that is not trained yet -> weight version
        self._held_out: dict[str, list] | None = None  # shards of an SFT run's evaluation sets
        self._report = RoundReport()
        self._generated: dict[int, dict[str, float]] = {}  # round that has not ended yet -> metrics of its generation
        self._mismatch = MismatchAlarm()
        self._engines_checked_at = 0.0
        self._startup_s: float | None = None
        self._saving: tuple[str, dict] | None = None  # directory being written, and the facts of its manifest

    # --- up and down ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        self._folders, self.console = RunFolders(self.args), Console()
        try:
            self.tracker = Tracker(self.args)
            set_writer(self.tracker.log)
            self.console.start(self.args.start_notes, self.args.run_dir)
            self._start()
        except BaseException as error:
            is_mistake = isinstance(error, (ValueError, FileNotFoundError))
            has_logs = any(Path(self.args.run_dir, "logs").glob("*"))
            self._stop(leaves_nothing=is_mistake or not has_logs)
            raise
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        try:
            if error_type is None:
                self._finish_save()
        finally:
            self._stop()

    def _start(self) -> None:
        args = self.args
        num_slots, _ = layout(args)
        self.console.begin("starting Ray")
        boot.connect(args, num_slots)

        slots = create_slots(args)
        host = boot.bind_host()
        self._resumed = checkpoint_dirs.latest(args.resume_from)
        self.console.begin("starting engines, reading prompts")
        manager_class = observable(RolloutManager, OBSERVING)
        self._manager = manager_class.options(num_cpus=1, num_gpus=0).remote(args, slots["rollout"], host)
        if len(slots["actor"]):
            self._trainer = Trainer(args, slots, host)
        info = wait_for(self._manager.start.remote(), "the rollout side to start", deadline_s=_START_DEADLINE_S)
        for note in info["notes"]:
            self.console.say(f"  note: {note}")
        args.sglang_model_routers = info["routers"]
        if info["routers"]:
            args.sglang_router_ip, args.sglang_router_port = info["routers"]["default"]
        self.num_rollout = args.num_rollout = self.console.num_rounds = info["num_rollout"]
        self.num_rollout_per_epoch, self._engine_urls = info["num_rollout_per_epoch"], info["engine_urls"]
        self._turns = SlotTurns(args, self._manager, self._trainer)
        self._turns.release_engines()  # the trainer is built in the memory that engines will have later
        if self._trainer is not None:
            self.console.begin("building the trainer")
            self._trainer.init(self.num_rollout, args.resume_from, _START_DEADLINE_S)
        self._find_first_round()
        self._turns.to_engines()

    def _find_first_round(self) -> None:
        """Where the rounds begin: --start-rollout-id, else after the checkpoint, else 0. Versions and prompts go on too."""
        args, resumed = self.args, self._resumed
        if resumed is not None:
            what = "loading the Data Buffer"
            wait_for(self._manager.load.remote(resumed.directory, resumed.rollout_id), what, deadline_s=600)
            self._weight_version = resumed.weight_version
        self.start_rollout_id, self._prompts_before = checkpoint_dirs.done_before(args)
        if self.num_rollout > 0:
            self.tracker.rewind(self.start_rollout_id, args.num_steps_per_rollout)
        if resumed is not None:
            why = " (--start-rollout-id)" if args.start_rollout_id is not None else ""
            self.console.say(f"continuing from {resumed.directory}: next is round {self.start_rollout_id}{why}")

    def _stop(self, leaves_nothing: bool = False) -> None:
        """End everything within seconds; a second Ctrl-C meanwhile does not leave processes behind.

        Args:
            leaves_nothing: the folders that the run made go too, since nobody needs what is in them.
        """
        with uninterrupted():
            self._stop_all()
            if leaves_nothing:
                self._folders.withdraw()
            self._folders.release()

    def _stop_all(self) -> None:
        """End everything within seconds: servers first (they hold ports), then actors, then a local Ray."""
        import ray

        if ray.is_initialized():
            if self._manager is not None:
                ray.wait([self._manager.dispose.remote()], timeout=_STOP_DEADLINE_S)
                ray.kill(self._manager)
            if self._trainer is not None:
                self._trainer.stop()
            ray.shutdown()
        self._manager = self._trainer = None
        self.console.stop_live()
        set_writer(None)
        if self.tracker is not None:
            self.tracker.close()

    # --- the verbs of the loop -------------------------------------------------------------------------------------------------

    @property
    def is_eval_only(self) -> bool:
        """``--num-rollout 0`` with an eval interval: one evaluation and nothing else."""
        return self.num_rollout == 0 and self.args.eval_interval is not None

    def rounds(self) -> range:
        """Numbers of the rounds that are left: from 0, or from the one after the checkpoint that the run continues."""
        if self.start_rollout_id >= self.num_rollout > 0:
            self.console.say(f"nothing to do: round {self.start_rollout_id} of {self.num_rollout} is already trained")
        return range(self.start_rollout_id, self.num_rollout)

    def begin_generate(self, rollout_id: int) -> Generation:
        """Queue a round; the rollout process generates one at a time."""
        self._begin_round(rollout_id)
        return Generation(rollout_id, self._manager.generate.remote(rollout_id), time.monotonic())

    def _begin_round(self, rollout_id: int) -> None:
        self._turns.to_generation()
        self._note_startup()
        self._generated_with[rollout_id], self._has_begun = self._weight_version, True

    def finish_generate(self, generation: Generation) -> list:
        """Wait for a round. Returns one boxed shard per data-parallel rank; calling it again returns the same."""
        if generation.batch is None:
            with self._timed("generate", generation.rollout_id):
                generation.batch, metrics = wait_for(
                    generation.reference,
                    f"generation of round {generation.rollout_id}",
                    deadline_s=self.args.stall_timeout,
                    on_poll=self._poll_progress,
                )
            self._log_generated(generation.rollout_id, metrics)
        return generation.batch

    def generate(self, rollout_id: int) -> list:
        """A round of samples, generated, scored, filtered and converted. Returns one boxed shard per data-parallel rank."""
        return self.finish_generate(self.begin_generate(rollout_id))

    def prompts(self, rollout_id: int) -> list[Sample]:
        """Begin a round that this process generates itself, in place of ``generate``; ``batch`` ends it.

        The engines hold the weights of the last ``update_weights`` and answer at ``args.sglang_router_ip`` and ``_port``, where the
        functions of ``slime.rollout.sglang_rollout`` ask them.

        Returns: ``--rollout-batch-size`` prompts of the Data Buffer, ``--n-samples-per-prompt`` samples of each, one after another.
        """
        self._begin_round(rollout_id)
        samples = wait_for(self._manager.prompts.remote(rollout_id), "the Data Buffer", deadline_s=600)
        self._own_round_began = time.monotonic()
        self.console.begin("generate", rollout_id)
        return samples

    def batch(self, rollout_id: int, samples: list[Sample], **columns: list) -> list:
        """Hand a round of ``prompts`` over to training. Returns what ``generate`` returns.

        Args:
            samples: with tokens and reward; prompts that are left out are not trained and count as filtered.
            columns: one entry per sample, in place of what would be computed: ``rewards`` (numbers, taken as they are), or
                ``advantages`` (a number for each response token; ``returns`` are the same where not given).

        Raises: ValueError for samples that cannot be trained on, or a column that does not fit them.
        """
        seconds = time.monotonic() - self._own_round_began
        add_seconds("generate", seconds, self._report.seconds)
        call = self._manager.batch.remote(rollout_id, samples, columns, seconds)
        batch, metrics = wait_for(call, f"conversion of round {rollout_id}", deadline_s=600)
        self._log_generated(rollout_id, metrics)
        return batch

    def hand_over_to_trainer(self, rollout_id: int) -> None:
        """On shared slots: engines release their memory, then the trainer takes its own back."""
        if self._turns.is_needed:
            with self._timed("offload", rollout_id):
                self._turns.to_trainer()

    def hand_over_to_engines(self, rollout_id: int) -> None:
        """On shared slots: the trainer sleeps, then engines take their weights back; the KV cache comes with the next request."""
        if self._turns.is_needed:
            with self._timed("offload", rollout_id):
                self._turns.to_engines()

    def train(self, rollout_id: int, batch: list) -> None:
        """Log-probs, advantages where the batch has none, and all optimizer steps of one round."""
        version = self._generated_with.pop(rollout_id)
        if self._trainer is None:
            return
        self._turns.to_trainer()  # nothing to do after hand_over_to_trainer, or on slots of its own
        if not self._engine_urls:  # replayed samples: nobody knows
            version = None
        with self._timed("train", rollout_id):
            per_rank = self._trainer.train(
                *(rollout_id, batch, version),
                deadline_s=self.args.stall_timeout,
                on_poll=lambda: self._show(self._trainer.progress()),
            )
            prompts = wait_for(self._manager.mark_trained.remote(rollout_id), "the Data Buffer", deadline_s=600)
        steps, rollout = merged(per_rank)
        for step, metrics in steps.items():
            self._log(metrics, "train/step", step)
        self._log(rollout, "rollout/step", rollout_id)
        for warning in (
            self._mismatch.text(rollout_id, rollout),
            untrained_text(rollout_id, self._generated.get(rollout_id, {})),
        ):
            if warning is not None:
                self.console.say(warning)
        self._log(prompts, "rollout/step", rollout_id)

    def prepare_weights(self) -> None:
        """With ``--update-weight-transport disk``, write the files of the next ``update_weights`` while engines generate.

        Only saves time: ``update_weights`` does what was not done before.
        """
        if self._trainer is not None and self._engine_urls and self.args.update_weight_transport == "disk":
            with self._timed("sync", None):
                version = self._weight_version + 1
                self._trainer.write_weights(self._engine_urls, version, self._check_engines_now_and_then)

    def update_weights(self) -> None:
        """Bring every engine to the trainer's weights under the next version; nothing to do without engines or trainer."""
        self._weight_version += 1
        if self._trainer is None or not self._engine_urls:
            return
        self._turns.to_engines()  # nothing to do after hand_over_to_engines, or on slots of its own
        with self._timed("sync", None):
            try:
                metrics = self._trainer.update_weights(
                    self._engine_urls,
                    self._weight_version,
                    set(self._generated_with.values()),
                    on_poll=self._check_engines_now_and_then,
                )
            except RuntimeError:
                self._check_engines()  # an engine that died is the cause, and the better message
                raise
        self._report.metrics |= metrics

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Evaluate with the weights that the engines hold now; without engines, the loss of an SFT run's held-out sets.

        It stands at the round's number in metrics and dumps, but for the first of two evaluations of round 0
        (``evaluation_step``).

        Returns: the metrics.
        """
        step = self.evaluation_step(rollout_id)
        if not self._engine_urls:
            return self._evaluate_loss(rollout_id, step)
        self._turns.to_generation()
        self._note_startup()
        with self._timed("eval", rollout_id):
            metrics = wait_for(
                self._manager.eval.remote(rollout_id, step),
                f"evaluation at round {rollout_id}",
                deadline_s=self.args.stall_timeout,
                on_poll=self._poll_progress,
            )
        self._report_evaluation(step, metrics)
        return metrics

    def _evaluate_loss(self, rollout_id: int, step: int) -> dict[str, float]:
        if self._trainer is None:
            return {}
        with self._timed("eval", rollout_id):
            if self._held_out is None:
                self._held_out = wait_for(self._manager.held_out_shards.remote(), "held-out samples", deadline_s=600)
            losses = {name: self._trainer.loss(shards) for name, shards in self._held_out.items()}
        metrics = {f"eval/{name}-loss": loss for name, loss in losses.items()}
        self._report_evaluation(step, metrics)
        return metrics

    def _report_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._log(metrics, "eval/step", step)
        scores = {name: value for name, value in metrics.items() if name.count("/") == 1 and "_ratio" not in name}
        if scores:
            self.console.say("evaluation  " + "  ".join(f"{name} {value:.3f}" for name, value in scores.items()))

    def save(self, rollout_id: int) -> None:
        """One complete checkpoint: trainer, Data Buffer, export, manifest last.

        With ``--async-save`` the trainer's files are written while rounds go on; the manifest follows at the end of the first
        round that finds them written, at the next save, or at the end of the run.
        """
        args = self.args
        with self._timed("save", rollout_id), checkpoint.telling_free_space(args.save):
            self._finish_save()
            partial = checkpoint.begin(args.save, rollout_id)
            self._trainer.save(partial)
            wait_for(self._manager.save.remote(partial, rollout_id), "saving the Data Buffer", deadline_s=600)
            if args.save_hf:  # before the commit: a run killed in the export does it again
                self._trainer.save_hf(args.save_hf.replace("{rollout_id}", str(rollout_id)))
            facts = {
                "rollout_id": rollout_id,
                "weight_version": self._weight_version,
                "run_id": args.run_id,
                "started_from": args.started_from,
                "precision": args.precision,
                "model": checkpoint_dirs.model_shape(args.model_arch),
                "prompts": self._prompts_before + (rollout_id + 1 - self.start_rollout_id) * args.rollout_batch_size,
                "keep_last": args.save_keep_last,
                "after": self._resumed.sequence if self._resumed else 0,
            }
            self._saving = partial, facts
            if not args.async_save:
                self._finish_save()

    def _finish_save(self, wait: bool = True) -> None:
        """Commit the checkpoint that is being written; without ``wait`` only if nothing has to be waited for."""
        if self._saving is None or not (wait or self._trainer.save_is_written()):
            return
        (partial, facts), self._saving = self._saving, None
        with checkpoint.telling_free_space(self.args.save):
            self._trainer.finish_save()
            self.console.say(f"saved {checkpoint.commit(partial, **facts)}")

    def end_round(self, rollout_id: int) -> None:
        """Log what the round took and print its line; commit a checkpoint that has been written meanwhile."""
        self._finish_save(wait=False)
        seconds = self._report.seconds
        wall = {f"perf/{name}_wall_time": value for name, value in seconds.items()}
        wall["perf/round_time"] = sum(seconds.values())
        wall |= step_time_metrics(seconds.get("generate", 0.0), seconds.get("train", 0.0))
        names = ("perf/update_weights", "perf/startup_time")
        other = {name: value for name, value in self._report.metrics.items() if name.startswith(names)}
        self._log(wall | other, "rollout/step", rollout_id)
        self.console.round_summary(rollout_id, self._generated.pop(rollout_id, {}) | self._report.metrics)
        self._report = RoundReport()

    # --- what is due -----------------------------------------------------------------------------------------------------------

    def eval_due_before(self, rollout_id: int) -> bool:
        is_first = rollout_id == 0 and not self.args.skip_eval_before_train
        return is_first and self.args.eval_interval is not None

    def evaluation_step(self, rollout_id: int) -> int:
        """``rollout_id``; before the first round -1 where round 0 is evaluated again when it is trained."""
        is_first_of_two = self.num_rollout > 0 and self.eval_due_before(rollout_id) and self.eval_due(rollout_id)
        return BEFORE_TRAINING if is_first_of_two and not self._has_begun else rollout_id

    def eval_due(self, rollout_id: int) -> bool:
        return should_run_periodic_action(rollout_id, self.args.eval_interval, self.num_rollout_per_epoch)

    def save_due(self, rollout_id: int) -> bool:
        """Every ``--save-interval`` rounds, at the end of an epoch, and after the last round."""
        if self.args.save is None or self._trainer is None:
            return False
        return rollout_id == self.num_rollout - 1 or should_run_periodic_action(
            rollout_id, self.args.save_interval, self.num_rollout_per_epoch
        )

    def sync_due(self, rollout_id: int) -> bool:
        """Every ``--update-weights-interval`` rounds, and after the last one so that a final evaluation sees it."""
        return (rollout_id + 1) % self.args.update_weights_interval == 0 or rollout_id == self.num_rollout - 1

    # --- reporting -------------------------------------------------------------------------------------------------------------

    def _timed(self, phase: str, rollout_id: int | None):
        self.console.begin(phase, rollout_id)
        return timed(phase, self._report.seconds)

    def _poll_progress(self):
        return self._show(wait_for(self._manager.progress.remote(), "the rollout's progress", deadline_s=120))

    def _check_engines_now_and_then(self) -> None:
        if time.monotonic() - self._engines_checked_at > ENGINE_CHECK_S:
            self._check_engines()

    def _check_engines(self) -> None:
        """Raise RuntimeError with the ends of their logs when engines died."""
        wait_for(self._manager.check_engines.remote(), "the rollout engines", deadline_s=120)
        self._engines_checked_at = time.monotonic()

    def _show(self, snapshot: dict) -> dict:
        """Show a snapshot; returns what has to change for the run to count as alive."""
        self.console.update(snapshot)
        # The counters too: a round whose filter drops group after group has nothing done for long, and works all the same.
        done = {name: (phase["done"], phase["counters"]) for name, phase in snapshot["phases"].items()}
        return done | {name: hook for name, hook in snapshot.items() if name == "oldest hook"}

    def _note_startup(self) -> None:
        """When the engines are asked for the first time: how long that took from the start of the command."""
        if self._startup_s is None:
            self._startup_s = self._report.metrics["perf/startup_time"] = process_age_s()

    def _log_generated(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Log a round's generation, which may end while the round before is trained."""
        self.tracker.log(metrics, "rollout/step", rollout_id)
        self._generated[rollout_id] = metrics

    def _log(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        if metrics:
            self.tracker.log(metrics, step_key, step)
            self._report.metrics |= metrics
