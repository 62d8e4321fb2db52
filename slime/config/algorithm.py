"""Flags of estimators, losses and off-policy correction (declarations only)."""

# A table: one flag per line.
# fmt: off
from slime.config.spec import Flag, section

F = Flag

#: Estimators that compare the responses of one prompt with each other.
GROUP_RELATIVE = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "rloo", "dr_grpo")
ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "rloo", "dr_grpo")

ALGORITHM = section(
    "algorithm",
    "slime/backends/megatron_utils",
    [
        F("--advantage-estimator", f"how rewards become advantages: {', '.join(ESTIMATORS)}, or a callable of yours by path", default="grpo", src="S"),
        F("--loss-type", "what is minimised", default="policy_loss", choices=("policy_loss", "sft_loss", "custom_loss"), src="U"),
        F("--custom-loss-function-path", "callable used with --loss-type custom_loss", "hook", src="U"),
        F("--disable-compute-advantages-and-returns", "no advantages: SFT and custom losses", dest="compute_advantages_and_returns", action="false", default=True, src="U"),
        F("--custom-advantage-function-path", "callable (args, rollout_data) that sets advantages and returns in place", "hook", src="U"),
        F("--eps-clip", "lower clip of the ratio", "float", 0.2, src="U"),
        F("--eps-clip-high", "upper clip of the ratio; --eps-clip when not given", "float", src="U"),
        F("--eps-clip-c", "dual-clip bound, above 1", "float", src="U"),
        F("--value-clip", "clip of the value loss", "float", 0.2, src="U"),
        F("--kl-coef", "KL subtracted from the reward before advantages", "float", 0.0, src="U"),
        F("--use-kl-loss", "KL term in the loss; loads the reference model", action="true", default=False, src="S"),
        F("--kl-loss-coef", "weight of the KL term", "float", 0.0, src="S"),
        F("--kl-loss-type", "KL estimator; low_var_kl is k3 clamped to +-10", default="k1", choices=("k1", "k2", "k3", "low_var_kl"), src="U"),
        F("--use-unbiased-kl", "multiply the KL by the importance ratio", action="true", default=False, src="U"),
        F("--ref-update-interval", "copy the actor into the reference every N rounds", "int", src="U"),
        F("--entropy-coef", "entropy bonus", "float", 0.0, src="U"),
        F("--gamma", "discount", "float", 1.0, src="U"),
        F("--lambd", "GAE lambda", "float", 1.0, src="U"),
        F("--normalize-advantages", "whiten advantages over the data-parallel group", action="true", default=False, src="U"),
        F("--disable-grpo-std-normalization", "only centre the rewards of a group", dest="grpo_std_normalization", action="false", default=True, src="U", owner="slime"),
        F("--disable-rewards-normalization", "leave rewards raw", dest="rewards_normalization", action="false", default=True, src="U", owner="slime"),
        F("--use-rollout-entropy", "entropy in log-prob passes too", action="true", default=False, src="U"),
        F("--calculate-per-token-loss", "mean over tokens instead of mean over rollouts", action="true", default=False, src="U"),
        F("--custom-pg-loss-reducer-function-path", "reducer callable of the policy loss", "hook", src="U"),
        F("--num-critic-only-steps", "leading rounds that train only the critic", "int", 0, src="U", owner="slime/ray/trainer.py"),
        F("--critic-slots", "where the critic runs: in turns on the actor's slots, or on as many of its own", default="shared", choices=("shared", "own"), src="O", owner="slime"),
        F("--megatron-config-path", "YAML with per-role overrides", "path", src="U", owner="slime/config/roles.py"),
        F("--use-opd", "on-policy distillation term", action="true", default=False, src="s"),
        F("--opd-type", "where teacher log-probs come from", choices=("sglang", "megatron"), src="U"),
        F("--opd-kl-coef", "weight of the distillation penalty on advantages", "float", 1.0, src="U"),
        F("--opd-teacher-load", "teacher checkpoint of the trainer", "path", src="U"),
        F("--opd-teacher-ckpt-step", "its step", "int", src="U"),
    ],
)

OFF_POLICY = section(
    "off-policy correction",
    "slime/backends/megatron_utils",
    [
        F("--use-rollout-logprobs", "engine log-probs are the old policy; the trainer does not recompute them", action="true", default=False, src="U"),
        F("--use-tis", "truncated importance weights, trainer over engine", action="true", default=False, src="U"),
        F("--tis-clip", "upper clamp of the weight", "float", 2.0, src="U"),
        F("--tis-clip-low", "lower clamp of the weight", "float", 0.0, src="U"),
        F("--custom-tis-function-path", "callable -> (pg_loss, masks, metrics)", "hook", src="U"),
        F("--get-mismatch-metrics", "report how far trainer and engine log-probs differ", action="true", default=False, src="U"),
        F("--mismatch-alarm", "warn when the mean log-prob difference of trainer and engine exceeds this; 0 never warns; not given: 0.001 where both compute in fp32 with the same weights, else 0.1", "float", src="O"),
        F("--use-opsm", "drop sequences with negative advantage whose KL exceeds --opsm-delta", action="true", default=False, src="U"),
        F("--opsm-delta", "bound of --use-opsm", "float", 1e-4, src="U"),
        F("--keep-old-actor", "the trainer keeps the rollout policy as the old policy", action="true", default=False, src="U"),
        F("--use-routing-replay", "reuse recorded expert routing in later passes", action="true", default=False, src="U"),
        F("--use-rollout-routing-replay", "reuse the engine's expert routing", action="true", default=False, src="U"),
        F("--async-buffer-size", "rounds generated ahead in train_async.py", "int", 1, src="X", owner="train_async.py"),
        F("--max-staleness", "largest age in weight versions that a trained sample may have; refused when the loop cannot keep it", "int", src="O", owner="slime/config/validate.py"),
    ],
)

FLAGS = ALGORITHM + OFF_POLICY
