"""One training rank: builds the model, trains on the shards it is given, saves, and gives its weights out.

The order inside `train` is the algorithm: reference log-probs, old log-probs (unless the current forward can stand for
them), advantages, the optimizer steps of the rollout, metrics. Knows no Ray, no engines, no rollout code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slime.observability.progress import Progress
from slime.observability.timer import Timers
from slime.utils import device
from slime.utils.misc import load_function, spell_out_hooks

HOOK_OPTIONS = (
    "custom_loss_function_path",
    "custom_advantage_function_path",
    "custom_pg_loss_reducer_function_path",
    "custom_tis_function_path",
    "rollout_data_postprocess_path",
    "custom_model_provider_path",
    "custom_megatron_init_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
)


class MegatronActor:
    """Rank `rank` of `world_size` of the role's model.

    Args:
        args: the run's arguments; `num_rollout` is an int by the time of `init`.
        role: actor, or critic.
        progress: told of every trained micro-batch of this rank, under the phase "train".
    """

    def __init__(
        self,
        args,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        role: str = "actor",
        progress: Progress | None = None,
    ):
        self.args, self.rank, self.role = args, rank, role
        self.progress = progress or Progress()
        self._where = (rank, world_size, master_addr, master_port)
        self._timers = Timers()
        self.model: list = []
        self.optimizer = self.scheduler = self.runner = self.backup = self.offload = self.routing = None
        self._reference_moved = False  # --ref-update-interval has replaced the weights of --ref-load
        self._read_tokens = 0  # that the last training pass ran through the model

    # ---- start ----------------------------------------------------------------------------------------------------

    def init(self, load_dir: str | None = None) -> int:
        """Join the other ranks, build model and optimizer, load weights.

        Args:
            load_dir: complete checkpoint of this run to continue from; None starts from `--load`, `--ref-load` or
                `--hf-checkpoint`, whichever is given first.
        Returns: the first rollout id to train: the loaded one plus 1, or 0.
        """
        from slime.backends.megatron_utils import initialize
        from slime.backends.megatron_utils.layer_spec import uses_transformer_engine

        args = self.args
        if args.context_parallel_size > 1:
            raise ValueError(f"--context-parallel-size {args.context_parallel_size}: only 1 is built")
        _check_hooks(args)
        if args.share_prompts and uses_transformer_engine():
            raise ValueError(
                "--share-prompts: Transformer Engine's attention cannot read one prompt for several samples"
            )
        initialize.initialize(args, *self._where)
        if args.custom_megatron_init_path is not None:
            load_function(args.custom_megatron_init_path)(args)
        self._build()
        start = self._load_actor(load_dir)
        self._load_reference(load_dir)
        return start

    def _build(self) -> None:
        from slime.backends.megatron_utils import optimizer
        from slime.backends.megatron_utils.expert_routing import ExpertRouting
        from slime.backends.megatron_utils.model_provider import build_model
        from slime.backends.megatron_utils.offload import Offload
        from slime.backends.megatron_utils.train_step import StepRunner
        from slime.backends.megatron_utils.weight_backup import WeightBackup

        bare = build_model(self.args)
        optimizer.freeze_parameters(self.args, bare)
        self.model = [optimizer.wrap_model(self.args, bare)]
        self.backup = WeightBackup(self.model)
        self.routing = ExpertRouting(self.args, self.model, self.role)
        if self.args.num_rollout > 0:
            self.optimizer = optimizer.build_optimizer(self.args, self.model)
            self.scheduler = optimizer.build_scheduler(self.args, self.optimizer)
            self.runner = StepRunner(
                self.args,
                self.model,
                self.optimizer,
                self.scheduler,
                self.role,
                self.progress,
                self._timers,
                self.routing,
            )
        self.offload = Offload(self.model, self.optimizer)

    def _load_actor(self, load_dir: str | None) -> int:
        from slime.backends.megatron_utils import checkpoint

        args = self.args
        if load_dir is not None:
            checkpoint.load(args, load_dir, self.model, self.optimizer, self.scheduler)
            return _iteration_of(load_dir) + 1
        source = args.load or args.ref_load or args.hf_checkpoint
        step = args.ckpt_step if args.load else args.ref_ckpt_step
        checkpoint.load_weights(args, self.model, source, step)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
        return 0

    def _load_reference(self, load_dir: str | None) -> None:
        """Load the reference: the one that --ref-update-interval has put into the checkpoint, else --ref-load."""
        from slime.backends.megatron_utils import checkpoint

        if not self.needs_reference:
            return
        self.backup.store("actor")
        source, step = self.args.ref_load or self.args.hf_checkpoint, self.args.ref_ckpt_step
        if load_dir is not None and checkpoint.reference_dir(load_dir).is_dir():
            source, step, self._reference_moved = str(checkpoint.reference_dir(load_dir)), None, True
        checkpoint.load_weights(self.args, self.model, source, step)
        self.backup.store("ref")
        self.backup.live = "ref"
        self.backup.switch("actor")

    # ---- facts ----------------------------------------------------------------------------------------------------

    @property
    def dp_rank(self) -> int:
        """Which shard of a rollout is this rank's."""
        from megatron.core import parallel_state as mpu

        return mpu.get_data_parallel_rank()

    @property
    def is_main_rank(self) -> bool:
        """Whether this rank reports: first data and tensor rank of the last pipeline stage."""
        from megatron.core import parallel_state as mpu

        first = (
            mpu.get_data_parallel_rank(with_context_parallel=True) == 0 and mpu.get_tensor_model_parallel_rank() == 0
        )
        return first and mpu.is_pipeline_last_stage()

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model takes part."""
        return self.role == "actor" and (self.args.kl_coef != 0 or self.args.use_kl_loss)

    def can_reuse_forward(self, num_steps: int) -> bool:
        """Return whether the old log-probs equal those of the training forward, so that no pass is needed for them."""
        args = self.args
        return (
            num_steps == 1
            and args.loss_type == "policy_loss"
            and args.kl_coef == 0
            and not (args.use_rollout_logprobs or args.get_mismatch_metrics or args.use_critic)
            and not (args.keep_old_actor or args.use_opd or args.custom_advantage_function_path)
            and args.advantage_estimator != "gspo"
            and (not args.use_routing_replay or args.use_rollout_routing_replay)
        )

    # ---- training -------------------------------------------------------------------------------------------------

    def train(self, rollout_id: int, shard: dict) -> dict[str, dict]:
        """Train on this rank's shard of a rollout, all optimizer steps.

        Returns: on the main rank {"steps": {step: {"train/...": x}}, "rollout": {"rollout/...": x, "perf/...": x}},
        on the others {}.
        """
        assert not self.offload.is_asleep, "training a sleeping rank"
        with self._timers("train"):
            data, batches = self._prepare(rollout_id, shard)
            with self._timers("actor_train"):
                steps, first_step = self._run_steps(rollout_id, data, batches)
            rollout = self._rollout_metrics(data, first_step) if self._is_last_stage else {}
            self._update_reference(rollout_id)
            self._dump(rollout_id, data)
        rollout.update(self._performance(data))
        return {"steps": steps, "rollout": rollout} if self.is_main_rank else {}

    def _prepare(self, rollout_id: int, shard: dict):
        """Return the shard on the device with every column that training needs, and its micro-batches."""
        from slime.backends.megatron_utils import optimizer
        from slime.backends.megatron_utils.data import ShardBatches, stream_multiple, to_device

        with self._timers("data_preprocess"):
            data = to_device(shard, device.device())
            batches = ShardBatches(data, stream_multiple(self.args), device.device(), self.args.share_prompts)
        if self.args.loss_type == "policy_loss":
            self._forward_passes(data, batches)
        if self._is_last_stage and self.args.compute_advantages_and_returns:
            from slime.backends.megatron_utils.advantages import compute_advantages_and_returns

            compute_advantages_and_returns(self.args, data)
        if self.args.rollout_data_postprocess_path is not None:
            load_function(self.args.rollout_data_postprocess_path)(self.args, rollout_id, data)
        if self.args.reset_optimizer_states:
            optimizer.reset_states(self.optimizer)
        return data, batches

    def _forward_passes(self, data: dict, batches) -> None:
        self.routing.forget()
        if "ref" in self.backup.tags():
            data.update(self._log_probs_of("ref", "ref_", batches))
        needed = not self.args.use_rollout_logprobs or self.args.get_mismatch_metrics
        if needed and not self.can_reuse_forward(len(data["num_microbatches"])):
            data.update(self._log_probs_of("actor", "", batches, with_entropy=self.args.use_rollout_entropy))
        self.backup.switch("actor")

    def _log_probs_of(self, tag: str, prefix: str, batches, with_entropy: bool = False) -> dict:
        from slime.backends.megatron_utils.log_probs import log_prob_pass

        with self._timers(f"{prefix}log_probs"):
            self.backup.switch(tag)
            hook = self.args.custom_megatron_before_log_prob_hook_path
            if hook is not None:
                load_function(hook)(self.args, self.model, prefix)
            routing = self.routing if tag == "actor" else None
            columns = log_prob_pass(self.args, self.model, batches, with_entropy=with_entropy, routing=routing)
        return {f"{prefix}{name}": column for name, column in columns.items()}

    def _run_steps(self, rollout_id: int, data: dict, batches) -> tuple[dict[int, dict[str, float]], dict]:
        """Return (metrics by step, log-probs of the first step's forward by shard position)."""
        from slime.backends.megatron_utils.data import samples_without_advantage

        reports, captured, first_step = {}, {}, {}
        per_rollout = len(data["num_microbatches"])
        self.progress.set_total("train", sum(data["num_microbatches"]))
        idle = samples_without_advantage(data) if self.args.skip_zero_advantage else frozenset()
        steps = batches.steps(idle)
        self._read_tokens = sum(batch.tokens.numel() for step in steps for batch in step)
        for step_id, micro_batches in enumerate(steps):
            size = data["global_batch_sizes"][step_id]
            report = self.runner.run(rollout_id, step_id, micro_batches, data, size)
            captured.update(report.log_probs)
            first_step = first_step or report.log_probs
            prefix = "train/critic-" if self.role == "critic" else "train/"
            step = rollout_id * per_rollout + step_id
            reports[step] = {f"{prefix}{name}": value for name, value in report.metrics.items()}
        if "log_probs" not in data and per_rollout == 1 and len(captured) == len(data["tokens"]):
            data["log_probs"] = [captured[i] for i in range(len(captured))]
        return reports, first_step

    def _rollout_metrics(self, data: dict, first_step: dict) -> dict[str, float]:
        from slime.backends.megatron_utils import metrics, mismatch

        report = metrics.rollout_metrics(self.args, data)
        if self.role == "actor" and self.args.loss_type == "policy_loss":
            report.update(mismatch.mismatch_metrics(self.args, data, first_step))
        return report

    def _update_reference(self, rollout_id: int) -> None:
        interval = self.args.ref_update_interval
        if interval is not None and "ref" in self.backup.tags() and (rollout_id + 1) % interval == 0:
            with self._timers("ref_model_update"):
                self.backup.store("ref")
                self._reference_moved = True

    def _dump(self, rollout_id: int, data: dict) -> None:
        if self.args.save_debug_train_data is not None and self._is_last_stage:
            from slime.backends.megatron_utils.train_dump import save_train_dump

            save_train_dump(self.args, rollout_id, self.rank, data)

    def _performance(self, data: dict) -> dict[str, float]:
        tokens = sum(len(t) for t in data["tokens"])
        seconds = self._timers.seconds("actor_train")
        values = {"perf/actor_train_tok_per_s": tokens / seconds if seconds else 0.0}
        values["perf/actor_train_read_tokens"] = float(self._read_tokens)
        if not (self.args.share_prompts or self.args.skip_zero_advantage):  # their work is not that of the samples
            values.update(self._tflops(data))
        values.update({f"perf/{name}": value for name, value in device.memory_summary().items()})
        values.update(self._timers.pop_metrics())
        return values

    def _tflops(self, data: dict) -> dict[str, float]:
        """Return the TFLOP/s of this rank's passes; a training pass costs three forward passes."""
        from slime.batching.flops import ModelShape, sample_flops

        shape = ModelShape.from_args(self.args)
        ranks = self.args.tensor_model_parallel_size * self.args.pipeline_model_parallel_size
        forward = sum(sample_flops(len(t), shape) for t in data["tokens"]) / ranks / 1e12
        work = {"actor_train": 3 * forward, "log_probs": forward, "ref_log_probs": forward}
        times = {name: self._timers.seconds(name) for name in work}
        return {f"perf/{name}_tflops": work[name] / times[name] for name in work if times[name] > 0}

    @property
    def _is_last_stage(self) -> bool:
        from megatron.core import parallel_state as mpu

        return mpu.is_pipeline_last_stage()

    # ---- memory ---------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give memory back until `wake`; only exports work meanwhile."""
        with self._timers("sleep"):
            self.offload.sleep()

    def wake(self) -> None:
        with self._timers("wake_up"):
            self.offload.wake()

    @contextmanager
    def weights_in_place(self) -> Iterator[None]:
        """Have the weights on the device, also of a sleeping rank, for an export."""
        was_asleep = self.offload.is_asleep
        if was_asleep:
            self.offload.unpark_weights()
        try:
            yield
        finally:
            if was_asleep:
                self.offload.park_weights()

    # ---- weights --------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator:
        """Yield (Hugging Face name, tensor) of the whole model; every rank must walk it when tp or pp is above 1."""
        from slime.backends.megatron_utils.megatron_to_hf import export_hf_weights

        assert self.backup.live == "actor", f"the weights in place are {self.backup.live!r}"
        return export_hf_weights(self.model[0], self.args)

    def help_export(self) -> None:
        """Take part in an export that another rank walks; nothing to do where every rank holds the whole model."""
        if self.args.tensor_model_parallel_size * self.args.pipeline_model_parallel_size > 1:
            for _ in self.export_weights():
                pass

    def export_checksums(self) -> dict[str, str]:
        """Return the checksum of every exported tensor."""
        from slime.utils.checksum import tensor_checksum

        return {name: tensor_checksum(tensor) for name, tensor in self.export_weights()}

    def save(self, directory: str) -> None:
        """Write model, optimizer, schedule and random state into an existing directory; all ranks call it."""
        from slime.backends.megatron_utils import checkpoint

        assert not self.offload.is_asleep, "saving a sleeping rank"
        with self._timers("save_model"):
            checkpoint.save(self.args, directory, self.model, self.optimizer, self.scheduler)
            if self._reference_moved:
                self.backup.switch("ref")
                checkpoint.save_weights(str(checkpoint.reference_dir(directory)), self.model)
                self.backup.switch("actor")

    def save_hf(self, directory: str) -> None:
        """Write the model as a Hugging Face folder; all ranks call it."""
        from slime.backends.megatron_utils.megatron_to_hf.writer import save_hf

        save_hf(self.model[0], self.args, directory)


def _iteration_of(directory: str) -> int:
    import re

    match = re.search(r"iter_(\d+)(\.replaced)?/?$", directory)
    if match is None:
        raise ValueError(f"checkpoint directory {directory} is not named iter_NNNNNNN")
    return int(match[1])


def warm_up() -> None:
    """Import Megatron and everything that building a model needs, seconds of work, before anything else is known."""
    from slime.backends.megatron_utils import cpu_compat

    cpu_compat.install()
    from slime.backends.megatron_utils import checkpoint, model_provider, optimizer, train_step  # noqa: F401


def _check_hooks(args) -> None:
    """Load the trainer's hooks before anything is built: a wrong path is the user's mistake and ends the run at start."""
    try:
        spell_out_hooks(args, HOOK_OPTIONS)
    except (ImportError, AttributeError) as error:
        raise ValueError(str(error)) from error
