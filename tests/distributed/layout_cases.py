"""The table of parallel layouts: each case must train what one rank trains.

A case names the data and the loss (a scenario of `train_ranks.SCENARIOS`), the number of ranks, the model, and the flags.
Its reference is the case of the same scenario and model on one rank without further flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    flags: dict = field(default_factory=dict)
    scenario: str = "grpo"
    model: str = "tied"
    batches: str = "dynamic"  # how samples are cut into micro-batches, see train_ranks.BATCHES

    @property
    def reference(self) -> str:
        return f"{self.scenario}-{self.model}"


TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
EP4 = {"expert_model_parallel_size": 4}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective"}
PLAIN_OPTIMIZER = {"use_distributed_optimizer": False}

REFERENCES = [
    Case("grpo-tied", 1),
    Case("per_token-tied", 1, scenario="per_token"),
    Case("gspo-tied", 1, scenario="gspo"),
    Case("grpo-untied", 1, model="untied"),
    Case("grpo-experts", 1, model="experts"),
    Case("per_token-experts", 1, scenario="per_token", model="experts"),
    Case("kept_and_mis-tied", 1, scenario="kept_and_mis"),
    Case("custom-tied", 1, scenario="custom"),
    Case("few-tied", 1, scenario="few"),
    Case("few_per_token-tied", 1, scenario="few_per_token"),
]

CASES = [
    Case("one by one", 1, batches="single"),
    Case("micro-batches of two", 1, batches="pairs"),
    Case("one micro-batch per step", 1, batches="whole"),
    Case("one micro-batch per step, per token", 1, batches="whole", scenario="per_token"),
    Case("full recompute", 1, FULL_RECOMPUTE),
    Case("selective recompute", 1, SELECTIVE_RECOMPUTE),
    Case("recomputed loss", 1, {"recompute_loss_function": True}),
    Case("plain optimizer", 1, PLAIN_OPTIMIZER),
    Case("one by one, kept tokens and mis", 1, batches="single", scenario="kept_and_mis"),
    Case("one micro-batch, kept tokens and mis", 1, batches="whole", scenario="kept_and_mis"),
    Case("dp2", 2),
    Case("dp2, kept tokens and mis", 2, batches="single", scenario="kept_and_mis"),
    Case("tp2 sp, kept tokens and mis", 2, SP, scenario="kept_and_mis"),
    Case("pp2, kept tokens and mis", 2, PP, scenario="kept_and_mis"),
    Case("cp2, kept tokens and mis", 2, CP, scenario="kept_and_mis"),
    Case("dp2 per token", 2, scenario="per_token"),
    Case("dp2 plain optimizer", 2, PLAIN_OPTIMIZER),
    Case("dp2 overlapped gradients", 2, {"overlap_grad_reduce": True}),
    Case("tp2", 2, TP),
    Case("tp2 sp", 2, SP),
    Case("tp2 sp full recompute, per token", 2, SP | FULL_RECOMPUTE, scenario="per_token"),
    Case("pp2", 2, PP),
    Case("pp2 untied", 2, PP, model="untied"),
    Case("pp2 per token", 2, PP, scenario="per_token"),
    Case("pp2 uneven stages", 2, PP | {"decoder_first_pipeline_num_layers": 1}),
    Case("pp2 vpp2", 2, VPP, batches="single"),
    Case("pp2 vpp2 untied", 2, VPP, model="untied"),
    Case("cp2", 2, CP),
    Case("cp2 single, per token", 2, CP, batches="single", scenario="per_token"),
    Case("cp2 sequence ratios", 2, CP, scenario="gspo"),
    Case("cp2, custom loss", 2, CP, scenario="custom"),
    Case("pp2, custom loss", 2, PP, scenario="custom"),
    Case("experts ep2", 2, EP, model="experts"),
    Case("experts cp2", 2, CP, model="experts"),
    Case("dp4", 4),
    Case("dp4, fewer samples than ranks", 4, scenario="few"),
    Case("dp4, fewer samples than ranks, per token", 4, scenario="few_per_token"),
    Case("tp2 pp2", 4, SP | PP),
    Case("tp2 cp2", 4, SP | CP, scenario="per_token"),
    Case("pp2 cp2", 4, PP | CP, scenario="gspo"),
    Case("dp2 tp2", 4, TP),
    Case("dp2 pp2 vpp2", 4, VPP, batches="single"),
    Case("dp2 cp2", 4, CP, scenario="per_token"),
    Case("experts ep4", 4, EP4, model="experts"),
    Case("experts tp2 sp ep2", 4, SP | EP, model="experts"),
    Case("experts pp2 ep2", 4, PP | EP, scenario="per_token", model="experts"),
    Case("experts cp2 ep2", 4, CP | EP, model="experts"),
]
