"""One training rank: builds the model, trains on the shards it is given, saves, and gives its weights out.

The order inside `train` is the algorithm: the role's forward passes (`roles.passes`: frozen weights, then the old policy; a
critic's values), advantages, the optimizer steps of the rollout, metrics. Knows no Ray, no engines, no rollout code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager

from slime.backends.megatron_utils import roles
from slime.backends.megatron_utils.roles import TRAIN_ROLES
from slime.observability.progress import Progress
from slime.observability.timer import Timers
from slime.utils import device
from slime.utils.hook_calls import call_hook, check_trainer_hooks
from slime.utils.quantization import quantized, scheme_of


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
        self.args, self.rank, self.role = args, rank, TRAIN_ROLES[role]
        self.progress = progress or Progress()
        self._where = (rank, world_size, master_addr, master_port)
        self._timers = Timers()
        self.model: list = []
        self.optimizer = self.scheduler = self.runner = self.offload = None
        self.backup = self.passes = self.routing = None
        self._reference_moved = False  # --ref-update-interval has replaced the weights of --ref-load
        self._writing = None  # a save that goes on in the background
        self.columns: dict[str, list] = {}  # for other roles, of the round trained last
        self._read_tokens = 0  # that the last training pass ran through the model

    # ---- start ----------------------------------------------------------------------------------------------------

    def init(self, load_dir: str | None = None) -> int:
        """Join the other ranks, build model and optimizer, load weights.

        Args:
            load_dir: complete checkpoint of this run to continue from, all roles' state in it; None starts from `--load`,
                `--ref-load` or `--hf-checkpoint`, whichever is given first.
        Returns: the first rollout id to train: the loaded one plus 1, or 0.
        """
        from slime.backends.megatron_utils import initialize
        from slime.backends.megatron_utils.layer_spec import uses_transformer_engine

        args = self.args
        initialize.offer_names(args)
        check_trainer_hooks(args)
        if args.share_prompts and uses_transformer_engine():
            raise ValueError(
                "--share-prompts: Transformer Engine's attention cannot read one prompt for several samples"
            )
        initialize.initialize(args, *self._where)
        if args.custom_megatron_init_path is not None:
            call_hook(args, "custom_megatron_init_path", args)
        self._build()
        start = self._load_trained(load_dir)
        self._load_frozen(load_dir)
        return start

    def _build(self) -> None:
        from slime.backends.megatron_utils import lora, optimizer
        from slime.backends.megatron_utils.expert_routing import ExpertRouting
        from slime.backends.megatron_utils.forward_passes import ForwardPasses
        from slime.backends.megatron_utils.model_provider import build_chunks
        from slime.backends.megatron_utils.offload import Offload
        from slime.backends.megatron_utils.train_step import StepRunner
        from slime.backends.megatron_utils.weight_backup import WeightBackup

        bare = build_chunks(self.args, self.role.with_value_head)
        if self.has_adapters:
            for chunk in bare:
                lora.attach(self.args, chunk)
        optimizer.freeze_parameters(self.args, bare)
        self.model = optimizer.wrap_model(self.args, bare)
        self.backup = WeightBackup(self.model)
        self.routing = ExpertRouting(self.args, self.model, self.role.name)
        self.passes = ForwardPasses(self.args, self.role, self.model, self.backup, self.routing, self._timers)
        if self.args.num_rollout > 0:
            self.optimizer = optimizer.build_optimizer(self.args, self.model)
            self.scheduler = optimizer.build_scheduler(self.args, self.optimizer)
            self.runner = StepRunner(
                self.args,
                self.model,
                self.optimizer,
                self.scheduler,
                self.role.name,
                self.progress,
                self._timers,
                self.routing,
            )
        self.offload = Offload(self.model, self.optimizer)

    def _load_trained(self, load_dir: str | None) -> int:
        from slime.backends.megatron_utils import checkpoint
        from slime.backends.megatron_utils.lora import weights

        args = self.args
        if load_dir is not None:
            directory = checkpoint.role_dir(load_dir, self.role.folder)
            checkpoint.load(args, str(directory), self.model, self.optimizer, self.scheduler)
            return _iteration_of(load_dir) + 1
        source = args.load or args.ref_load or args.hf_checkpoint
        step = args.ckpt_step if args.load else args.ref_ckpt_step
        checkpoint.load_weights(args, self.model, *checkpoint.role_source(source, step, self.role.folder))
        for name, folder in args.lora_adapter_path.items() if self.has_adapters else ():
            weights.load_folder(self.model, args, name, folder)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
        return 0

    def _load_frozen(self, load_dir: str | None) -> None:
        """Load frozen weights; a reference that --ref-update-interval has put into the checkpoint wins over --ref-load."""
        from slime.backends.megatron_utils import checkpoint

        for frozen in roles.frozen_roles(self.args, self.role):
            source, step = frozen.source(self.args)
            if frozen.tag == "ref" and load_dir is not None and checkpoint.reference_dir(load_dir).is_dir():
                source, step, self._reference_moved = str(checkpoint.reference_dir(load_dir)), None, True
            with self.backup.filling(frozen.tag):
                if self.has_adapters:
                    self._fill_reference_adapters(source if self._reference_moved else None)
                else:
                    checkpoint.load_weights(self.args, self.model, source, step)

    def _fill_reference_adapters(self, directory: str | None) -> None:
        """The reference of adapters is the base without them, or the adapters that --ref-update-interval put into a folder."""
        from slime.backends.megatron_utils import checkpoint, lora

        if directory is not None:
            checkpoint.load_adapters(self.model, directory)
        else:
            lora.clear(self.model)

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
    def has_adapters(self) -> bool:
        """Whether low-rank adapters are trained instead of the model."""
        return not self.role.with_value_head and self.args.lora_rank > 0

    # ---- training -------------------------------------------------------------------------------------------------

    def score(self, rollout_id: int, shard: dict, old_version: int | None = None) -> dict:
        """Run the role's forward passes alone, for the roles that need their result before this one trains.

        Returns: what `train` of this role and of others takes as `columns`: per-sample lists of CPU tensors (log-probs or
        values; on the last pipeline stage), and "passes", the tags that need not run again.
        """
        assert not self.offload.is_asleep, "scoring with a sleeping rank"
        with self._timers("score"):
            data, batches = self._lay_out(shard)
            known = set(data)
            done = self.passes.run(data, batches, old_version)
        return {"passes": done, **_on_cpu({name: data[name] for name in data.keys() - known})}

    def train(
        self, rollout_id: int, shard: dict, columns: Sequence[dict] = (), old_version: int | None = None
    ) -> dict[str, dict]:
        """Train on this rank's shard of a rollout, all optimizer steps. Leaves what other roles need in `columns`.

        Args:
            columns: what `score` and `train` of this rank of other roles, and `score` of this one, gave for the shard.
            old_version: of the weights that generated it (`--keep-old-actor`); None: those in training.
        Returns: on the main rank {"steps": {step: {"train/...": x}}, "rollout": {"rollout/...": x, "perf/...": x}},
        on the others {}.
        """
        from slime.backends.megatron_utils import performance
        from slime.observability.logging_utils import take_logged

        assert not self.offload.is_asleep, "training a sleeping rank"
        with self._timers("train"):
            data, batches = self._lay_out(shard)
            self._prepare(rollout_id, data, batches, columns, old_version)
            with self._timers(f"{self.role.name}_train"):
                steps, first_step = self._run_steps(rollout_id, data, batches)
            rollout = self._rollout_metrics(data, first_step) if self._is_last_stage else {}
            self._update_reference(rollout_id)
            self._dump(rollout_id, data)
        rollout.update(performance.metrics(self.args, self.role, data, self._read_tokens, self._timers))
        rollout.update(take_logged())
        gives = self.role.with_value_head and self._is_last_stage
        self.columns = _on_cpu({"values": data["values"]}) if gives else {}
        return {"steps": steps, "rollout": rollout} if self.is_main_rank else {}

    def loss(self, shard: dict) -> float | None:
        """The negative log-likelihood of samples that are not trained, averaged like the loss; on the main rank, else None."""
        from slime.backends.megatron_utils import metrics
        from slime.backends.megatron_utils.log_probs import log_prob_pass

        assert not self.offload.is_asleep, "evaluating a sleeping rank"
        data, batches = self._lay_out(shard)
        data.update(log_prob_pass(self.args, self.model, batches))
        if not self._is_last_stage:
            return None
        loss = -metrics.rollout_metrics(self.args, data)["rollout/log_probs"]
        return loss if self.is_main_rank else None

    def _lay_out(self, shard: dict):
        """Return the shard on the device, and its micro-batches."""
        from slime.backends.megatron_utils.context_parallel import zigzag
        from slime.backends.megatron_utils.data import ShardBatches, stream_multiple, to_device, with_own_columns

        with self._timers("data_preprocess"):
            data = to_device(with_own_columns(shard), device.device())
            multiple, shares = stream_multiple(self.args), self.args.share_prompts
            return data, ShardBatches(data, multiple, device.device(), shares, zigzag())

    def _prepare(self, rollout_id: int, data: dict, batches, columns: Sequence[dict], old_version) -> None:
        """Add every column that training needs."""
        from slime.backends.megatron_utils import hook_results, optimizer
        from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
        from slime.backends.megatron_utils.data import to_device

        done = set()
        for part in columns:
            done |= set(part.get("passes", ()))
            data.update(to_device({name: rows for name, rows in part.items() if name != "passes"}, device.device()))
        self.passes.run(data, batches, old_version, done)
        if self._is_last_stage and self.args.compute_advantages_and_returns:
            compute_advantages_and_returns(self.args, data)
        if self.args.rollout_data_postprocess_path is not None and not self.role.with_value_head:
            hook_results.postprocess(self.args, rollout_id, data)
        if self.args.reset_optimizer_states:
            optimizer.reset_states(self.optimizer)

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
            prefix = f"train/{self.role.metric_prefix}"
            step = rollout_id * per_rollout + step_id
            reports[step] = {f"{prefix}{name}": value for name, value in report.metrics.items()}
        whole = not self.args.skip_zero_advantage  # what all ranks know: they reduce the same columns
        if "log_probs" not in data and per_rollout == 1 and whole and len(captured) == len(data["tokens"]):
            data["log_probs"] = [captured[i] for i in range(len(captured))]
        return reports, first_step

    def _rollout_metrics(self, data: dict, first_step: dict) -> dict[str, float]:
        from slime.backends.megatron_utils import metrics, mismatch

        report = metrics.rollout_metrics(self.args, data)
        if not self.role.with_value_head and self.args.loss_type == "policy_loss":
            report.update(mismatch.mismatch_metrics(self.args, data, first_step))
        return report

    def _update_reference(self, rollout_id: int) -> None:
        interval = self.args.ref_update_interval
        if interval is not None and "ref" in self.backup.tags() and (rollout_id + 1) % interval == 0:
            with self._timers("ref_model_update"):
                self.backup.store("ref")
                self._reference_moved = True

    def _dump(self, rollout_id: int, data: dict) -> None:
        if self.args.save_debug_train_data is not None and self._is_last_stage and not self.role.with_value_head:
            from slime.backends.megatron_utils.train_dump import save_train_dump

            save_train_dump(self.args, rollout_id, self.rank, data)

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

    def remember(self, version: int, in_use: Set[int]) -> None:
        """With `--keep-old-actor`, keep the weights in training as those that engines get as `version`.

        Args:
            in_use: versions whose rounds are not trained yet; copies of all others are forgotten.
        """
        if not self.args.keep_old_actor:
            return
        kept = {roles.old_tag(one) for one in {version, *in_use}}
        self.backup.drop(lambda tag: tag in kept or not roles.is_old(tag))
        with self.weights_in_place():
            self.backup.store(roles.old_tag(version))

    # ---- weights --------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator:
        """Yield (Hugging Face name, tensor) of the whole model, the adapter merged, quantised as --hf-checkpoint is; every
        rank must walk it when tp or pp is above 1."""
        from slime.backends.megatron_utils.lora import weights

        tensors = self._export_plain()
        if self.has_adapters and len(self.args.lora_adapters) == 1:
            adapter = weights.whole_adapter(self.model, self.args.lora_adapters[0])
            tensors = weights.merged(tensors, adapter, self.args.lora_alpha / self.args.lora_rank)
        return quantized(tensors, self._scheme)

    def export_base(self) -> Iterator:
        """The same without adapters."""
        return quantized(self._export_plain(), self._scheme)

    def _export_plain(self) -> Iterator:
        from slime.backends.megatron_utils.megatron_to_hf import export_hf_weights

        assert self.backup.live == "actor", f"the weights in place are {self.backup.live!r}"
        return export_hf_weights(self.model, self.args)

    @property
    def _scheme(self):
        return scheme_of(self.args.model_arch.get("quantization_config"), f"--hf-checkpoint {self.args.hf_checkpoint}")

    def export_adapters(self) -> dict[str, dict]:
        """Return the tensors of every adapter by PEFT name; all ranks call it."""
        from slime.backends.megatron_utils.lora import weights

        return {name: weights.whole_adapter(self.model, name) for name in self.args.lora_adapters}

    def adapter_config(self) -> dict:
        """Return PEFT's description of the adapters."""
        from slime.backends.megatron_utils.lora import weights

        return weights.config_of(self.args)

    def help_export_base(self) -> None:
        """Take part in an export of the base that another rank walks."""
        for _ in self.export_base():
            pass

    def help_export(self) -> None:
        """Take part in an export that another rank walks; nothing to do where every rank holds the whole model."""
        args = self.args
        dense = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
        if dense * args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1) > 1:
            for _ in self.export_weights():
                pass

    def export_checksums(self) -> dict[str, str]:
        """Return the checksum of every exported tensor."""
        from slime.utils.checksum import tensor_checksum

        return {name: tensor_checksum(tensor) for name, tensor in self.export_weights()}

    def save(self, directory: str) -> None:
        """Write model, optimizer, schedule and random state into an existing directory, a role's into its own folder there;
        all ranks call it.

        With `--async-save` the files are complete after `finish_save`; training may go on until then.
        """
        from slime.backends.megatron_utils import checkpoint
        from slime.backends.megatron_utils.lora import weights

        assert not self.offload.is_asleep, "saving a sleeping rank"
        with self._timers("save_model"):
            own = checkpoint.role_dir(directory, self.role.folder)
            own.mkdir(exist_ok=True)
            self._writing = checkpoint.save(self.args, str(own), self.model, self.optimizer, self.scheduler)
            if self.has_adapters:
                weights.write_folders(self.model, self.args, f"{directory}/adapters")
            if self._reference_moved:
                self.backup.switch("ref")
                checkpoint.save_weights(str(checkpoint.reference_dir(directory)), self.model)
                self.backup.switch("actor")

    def save_is_written(self) -> bool:
        """Return whether `finish_save` would not have to wait for this rank."""
        return self._writing is None or self._writing.is_written

    def finish_save(self) -> None:
        """Complete the last save; all ranks call it. Nothing to do for one that was written at once."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.finish()

    def save_hf(self, directory: str) -> None:
        """Write the model as a Hugging Face folder; all ranks call it."""
        from slime.backends.megatron_utils.megatron_to_hf.writer import save_hf

        with self.weights_in_place():
            save_hf(self.export_weights(), self.args, directory)


def _on_cpu(columns: dict[str, list]) -> dict[str, list]:
    return {name: [row.cpu() for row in rows] for name, rows in columns.items()}


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
