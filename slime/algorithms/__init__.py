"""Pure tensor mathematics of reinforcement learning: no `args`, no process groups, no I/O.

Conventions
    Per-sample data travels as a list with one 1-D tensor per sample (length = its response length L_i);
    "flat" tensors are the same lists concatenated, N = sum of L_i. Masks hold 0 or 1, any dtype.
    Collectives arrive as callables: `reduce_sum(tensor) -> tensor` returns the sum over the ranks that share the
    data (identity when None), `reduce_max` likewise. Where a gradient has to pass it, the docstring says so.
    Values are computed in at least float32; float64 input stays float64.

Modules, in the order in which the trainer meets them
    rewards        group normalisation, on the rollout side
    logprobs       log_probs_and_entropy(logits [T, V], targets [T], ...)
    kl             approx_kl(log_probs, base_log_probs, kind, ...)
    advantages     compute(estimator, AdvantageInputs(...)) -> (advantages, returns)
    distill        on-policy distillation penalty on advantages
    whitening      masked moments over all ranks
    policy_loss    policy_loss(...): clip, dual clip, gspo, cispo; opsm
    off_policy     TIS, IcePop; mis: the configurable variant with metrics; off_policy_hooks: user-hook shaped forms
    value_loss, sft_loss
    reduce         make_reducer(...): per-rollout mean or token sum
    stateless_adam, lr_schedule, passk: small helpers; numeric: bounds shared by the losses; scan: discounted sums

This file imports nothing, so that each module can be imported alone.
"""
