"""Which function of this package answers each operation of the vector kit.

OPS maps an op name to `callable(inputs: dict) -> dict` with the keys of the vector's `expected`. To check another
implementation, write a module with its own OPS: `python -m tools.vectors --adapter its.dotted.name`.
"""

from __future__ import annotations

import math

import torch

from slime.algorithms import (
    advantages,
    distill,
    kl,
    logprobs,
    lr_schedule,
    off_policy,
    passk,
    policy_loss,
    reduce,
    scan,
    sft_loss,
    stateless_adam,
    value_loss,
    whitening,
)
from slime.algorithms import mis as mis_module
from slime.algorithms import rewards as reward_module
from slime.batching import context_parallel, schedule
from slime.utils import delta_codec, misc


def t(values, dtype=torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def rows(lists) -> list[torch.Tensor]:
    return [t(values) for values in lists]


def approx_kl(i):
    log_ratio = t(i["log_probs"]) - t(i["old_log_probs"]) if i.get("unbiased") else None
    out = {"kl": kl.approx_kl(t(i["log_probs"]), t(i["ref_log_probs"]), i["type"], log_ratio)}
    if log_ratio is not None:
        out["importance_ratio"] = kl.importance_ratio(log_ratio)
    return out


def group_reward_norm(i):
    groups = [position // i["group_size"] for position in range(len(i["rewards"]))]
    return {"rewards": reward_module.normalize_group_rewards(i["rewards"], groups, std_norm=i["std_norm"])}


def discounted_returns(i):
    values = i["rewards"] if "rewards" in i else [math.sin(0.3 * k) for k in range(300)]
    out = scan.discounted_returns(t(values)[None], i["discount"])[0]
    return (
        {"returns": out}
        if "rewards" in i
        else {"returns_at": {str(k): out[k].item() for k in (0, 1, 127, 128, 255, 256, 299)}}
    )


def _inputs(reward, n, i, **extra):
    mask = t(i.get("loss_mask", [1] * n))
    row = [t(i["kl"])] if "kl" in i else None
    return advantages.AdvantageInputs([reward], [n], [mask], kl=row, kl_coef=i.get("kl_coef", 0.0), **extra)


def reinforce_plus_plus(i):
    inputs = _inputs(i["reward"], len(i["kl"]), i, gamma=i["gamma"])
    return {"advantages": advantages.compute("reinforce_plus_plus", inputs)[0][0]}


def reinforce_plus_plus_baseline(i):
    inputs = _inputs(i["centered_reward"], len(i["kl"]), i)
    return {"advantages": advantages.compute("reinforce_plus_plus_baseline", inputs)[0][0]}


def grpo_advantage(i):
    return {"advantages": advantages.compute("grpo", _inputs(i["reward"], i["response_length"], i))[0][0]}


def ppo_gae(i):
    inputs = _inputs(i["reward"], len(i["kl"]), i, values=[t(i["values"])], gamma=i["gamma"], lambd=i["lambd"])
    adv, ret = advantages.compute("ppo", inputs)
    return {"token_rewards": advantages.ppo_token_rewards(inputs)[0], "advantages": adv[0], "returns": ret[0]}


def gae_batch(i):
    adv, ret = advantages.gae(rows(i["rewards"]), rows(i["values"]), i["gamma"], i["lambd"])
    return {"advantages": adv, "returns": ret}


def ppo_clip(i):
    loss, clipfrac = policy_loss.ppo_clip_loss(
        -t(i["ratios"]).log(), t(i["advantages"]), i["eps_clip"], i["eps_clip_high"], i["eps_clip_c"]
    )
    return {"loss": loss, "clipfrac": clipfrac}


def cispo(i):
    log_probs = t(i["log_probs"]).requires_grad_()
    ppo_kl = -t(i["ratios"]).log()
    loss, clipfrac = policy_loss.cispo_loss(ppo_kl, log_probs, t(i["advantages"]), i["eps_clip"], i["eps_clip_high"])
    loss.sum().backward()
    return {"loss": loss, "clipfrac": clipfrac, "grad_log_probs": log_probs.grad}


def gspo(i):
    new, old, mask = [t(i["log_probs"])], [t(i["old_log_probs"])], [t(i["loss_mask"])]
    adv = [torch.full_like(new[0], i["advantage"])]
    out = policy_loss.policy_loss("gspo", new, old, adv, mask, eps_clip=i["eps_clip"], eps_clip_high=i["eps_clip_high"])
    seq_kl = policy_loss.sequence_kl(new, old, mask)[0]
    return {"seq_kl": seq_kl, "ratio": (-seq_kl).exp(), "token_loss": out.loss, "clipfrac": out.clipfrac}


def opsm(i):
    mask = t(i["loss_mask"])
    seq_kl = policy_loss.sequence_kl([t(i["log_probs"])], [t(i["old_log_probs"])], [mask])
    keep, dropped = policy_loss.opsm(seq_kl, [t(i["advantages"])], i["delta"])
    return {"seq_kl": seq_kl[0], "keep_mask": keep, "clipfrac": (dropped * mask).sum() / mask.sum().clamp(min=1)}


def whiten(i):
    values, masks = rows(i["shards"]), rows(i["masks"])
    mean, var, _ = whitening.masked_moments(values, masks)
    out = whitening.whiten(values, masks, shift_mean=i["shift_mean"], eps=i["eps"])
    return {"mean": mean, "var": var, "whitened": out}


def value(i):
    loss, clipfrac = value_loss.value_loss(t(i["values"]), t(i["old_values"]), t(i["returns"]), i["value_clip"])
    return {"loss": loss, "clipfrac": clipfrac}


def logprob_entropy(i):
    logits = t(i["logits"])[None]
    keep = None
    if i["keep_ids"] is not None:
        ids = torch.tensor(i["keep_ids"])
        keep = logprobs.KeptTokens.join([ids], [torch.tensor([0, len(ids)])])
    log_probs, entropy = logprobs.log_probs_and_entropy(
        logits, torch.tensor([i["target"]]), i["temperature"], with_entropy=True, keep=keep
    )
    return {"log_prob": log_probs[0], "entropy": entropy[0]}


def logprob_entropy_grad(i):
    def gradient(pick):
        logits = t(i["logits"])[None].requires_grad_()
        logprobs.log_probs_and_entropy(logits, torch.tensor([i["target"]]), with_entropy=True, entropy_grad=True)[
            pick
        ].sum().backward()
        return logits.grad[0]

    return {"dlogp_dz": gradient(0), "dH_dz": gradient(1)}


def value_head(i):
    return {"values": value_loss.response_values(t(i["outputs"]), i["total_length"], i["response_length"])}


def tis(i):
    weights, metrics = off_policy.tis_weights(
        t(i["train_log_probs"]), t(i["rollout_log_probs"]), i["tis_clip_low"], i["tis_clip"]
    )
    return {"weights": weights, **metrics}


def icepop(i):
    weights, metrics = off_policy.icepop_weights(
        t(i["train_log_probs"]), t(i["rollout_log_probs"]), i["tis_clip_low"], i["tis_clip"]
    )
    return {"weights": weights, "tis_clipfrac": metrics["tis_clipfrac"]}


def mis(i):
    config = mis_module.MisConfig(
        tis_level=i["level"], tis_mode=i["mode"], tis_lower_bound=i["lo"], tis_upper_bound=i["hi"],
        use_rs=i.get("rs", False), rs_lower_bound=i.get("rslo"), rs_upper_bound=i.get("rshi"),
        rs_veto_threshold=i.get("veto"), tis_batch_normalize=i.get("bn", False),
    )  # fmt: skip
    out = mis_module.compute_mis(
        rows(i["train_log_probs"]), rows(i["rollout_log_probs"]), rows(i["loss_masks"]), config
    )
    return {"weights": out.weights, "response_masks": out.response_masks}


def mismatch_metrics(i):
    mask = t(i["loss_mask"])
    out = mis_module.mismatch_metrics(t(i["train_log_probs"]), t(i["rollout_log_probs"]), mask)
    means = {name: (value * mask).sum() / mask.sum() for name, value in out.items()}
    return {**means, "kl_mean": means["kl"], "k3_kl_mean": means["k3_kl"]}


def loss_reduction(i):
    masks, x = rows(i["loss_masks"]), torch.cat(rows(i["x"]))
    sums = reduce.rollout_mask_sums([int(mask.sum()) for mask in masks], i["rollout_ids"])
    per_rollout = reduce.make_reducer(masks, sums)(x)
    tokens, count = reduce.make_reducer(masks, per_token=True)(x), reduce.num_tokens(masks)
    return {
        "rollout_mask_sums": sums,
        "sum_of_rollout_means": per_rollout,
        "reported_rollout_mean": per_rollout / i["global_batch_size"],
        "legacy_sum_of_sample_means": reduce.make_reducer(masks)(x),
        "sum_of_tokens": tokens,
        "num_tokens_clamped": count,
        "reported_per_token": tokens / count,
    }


def cp_zigzag(i):
    shares = [
        context_parallel.zigzag_share(i["total_length"], i["response_length"], i["cp_size"], rank)
        for rank in range(i["cp_size"])
    ]
    ranks = [
        {"rank": rank, "chunks": share.chunks, "logits": share.logits, "tokens": share.tokens}
        for rank, share in enumerate(shares)
    ]
    return {"chunk_size": shares[0].chunk_size, "ranks": ranks}


def grad_invariance(i):
    """Gradient of one fixed batch under every layout; they must agree, so one number is returned."""
    results = []
    for layout in i["layouts"]:
        dp, cp, num_micro_batches = (
            int(part) for part in layout.replace("dp", "").replace("cp", " ").replace("mb", " ").split()
        )
        results.append(_layout_gradient(i["samples"], dp, cp, num_micro_batches))
    assert max(results) - min(results) < 1e-6, dict(zip(i["layouts"], results, strict=True))
    return {"dL_dw": results[0]}


def _layout_gradient(samples, dp, cp, num_micro_batches):
    total = 0.0
    for dp_rank in range(dp):
        owned = samples[dp_rank::dp]
        for micro_batch in range(num_micro_batches):
            for cp_rank in range(cp):
                part = owned[micro_batch::num_micro_batches]
                if not part:
                    continue
                local = [
                    context_parallel.slice_response(t(s["x"]), s["total_length"], s["response_length"], cp, cp_rank)
                    for s in part
                ]
                reducer = reduce.make_reducer(
                    [torch.ones_like(row) for row in local], [s["response_length"] for s in part]
                )
                w = torch.ones((), dtype=torch.float64, requires_grad=True)
                reducer(w * torch.cat(local)).backward()
                total += w.grad.item() / len(samples)
    return total


def policy_objective(i):
    new, old, mask = t(i["log_probs"]), t(i["old_log_probs"]), t(i["loss_mask"])
    out = policy_loss.policy_loss(
        "grpo", [new], [old], [t(i["advantages"])], [mask], eps_clip=i["eps_clip"], eps_clip_high=i["eps_clip_high"]
    )
    reducer = reduce.make_reducer([mask])
    pg, entropy = reducer(out.loss), reducer(t(i["entropy"]))
    kl_loss = reducer(kl.approx_kl(new, t(i["ref_log_probs"]), i["kl_loss_type"]))
    return {
        "pg_loss": pg,
        "pg_clipfrac": reducer(out.clipfrac),
        "ppo_kl": reducer(out.ppo_kl),
        "entropy_loss": entropy,
        "kl_loss": kl_loss,
        "loss": pg - i["entropy_coef"] * entropy + i["kl_loss_coef"] * kl_loss,
    }


def sft(i):
    masks = rows(i["loss_masks"])
    return {"loss_sum": sft_loss.sft_loss(torch.cat(rows(i["log_probs"])), reduce.make_reducer(masks))}


def opd(i):
    adv, reverse_kl = distill.apply_opd(
        [t(i["advantages"])], [t(i["student_log_probs"])], [t(i["teacher_log_probs"])], i["opd_kl_coef"]
    )
    return {"reverse_kl": reverse_kl[0], "advantages": adv[0]}


def stateless(i):
    param = t([i["param"]])
    stateless_adam.stateless_adam_update(
        param, t([i["grad"]]), lr=i["lr"], weight_decay=i["weight_decay"], eps=i["eps"], betas=tuple(i["betas"]),
        adamw=i["adamw"], bias_correction=i["bias_correction"],
    )  # fmt: skip
    return {"param": param[0]}


def pass_at_k(i):
    n = i["group_size"]
    return passk.pass_at_k([i["rewards"][k : k + n] for k in range(0, len(i["rewards"]), n)])


def first_fit(i):
    return {"bins": schedule.first_fit(i["lengths"], i["cap"])}


def dp_schedule(i):
    plan = schedule.build_dp_schedule(
        i["lengths"], i["rollout_ids"], global_batch_size=i["global_batch_size"], dp_size=i["dp_size"],
        cp_size=i["cp_size"], use_dynamic_batch_size=i["dynamic"], max_tokens_per_gpu=i["max_tokens_per_gpu"],
    )  # fmt: skip
    owned = [
        [[part[k] for k in mb] for mb in mbs]
        for part, mbs in zip(plan.partitions, plan.micro_batch_indices, strict=True)
    ]
    steps, start = [], 0
    for count in plan.num_microbatches:
        steps.append(sorted(s for rank in owned for mb in rank[start : start + count] for s in mb))
        start += count
    return {
        "micro_batches_after_align": [mbs[0] for mbs in owned],
        "num_microbatches": plan.num_microbatches,
        "rank_partitions": plan.partitions,
        "steps_cover_samples": steps,
        "global_batch_sizes": plan.global_batch_sizes,
    }


def lr_scheduler(i):
    sizes = lr_schedule.schedule_sizes(**i)
    return {
        "train_iters": sizes.train_iters,
        "lr_decay_steps": sizes.decay_samples,
        "increment_per_step": sizes.increment,
    }


def periodic(i):
    def true_at(num_rollout):
        return [
            rollout_id
            for rollout_id in range(i["num_rollout"])
            if misc.should_run_periodic_action(rollout_id, i["interval"], i["num_rollout_per_epoch"], num_rollout)
        ]

    return {"save_true_at": true_at(i["num_rollout"]), "eval_true_at": true_at(None)}


def cp_last_token_owner(i):
    share = context_parallel.zigzag_share(i["total_length"], i["response_length"], i["cp_size"], 0)
    owner = context_parallel.last_token_owner(i["total_length"], i["response_length"], i["cp_size"])
    return {"owner_rank": owner, "tokens_owned_by_rank0": share.num_tokens}


def delta_encode(i):
    old, new = bytes.fromhex(i["old_hex"]), bytes.fromhex(i["new_hex"])
    payloads = {encoding: delta_codec.encode(old, new, encoding) for encoding in delta_codec.ENCODINGS}
    assert all(delta_codec.decode(old, payload, encoding) == new for encoding, payload in payloads.items())
    return {
        **{f"{encoding}_hex": payload.hex() for encoding, payload in payloads.items()},
        "changed_bytes": delta_codec.changed_bytes(old, new),
        "adler32_new": delta_codec.adler32(new),
    }


OPS = {
    "approx_kl": approx_kl,
    "group_reward_norm": group_reward_norm,
    "discounted_returns": discounted_returns,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "grpo_advantage": grpo_advantage,
    "ppo_gae": ppo_gae,
    "gae_batch": gae_batch,
    "policy_loss": ppo_clip,
    "cispo_loss": cispo,
    "gspo": gspo,
    "opsm": opsm,
    "whiten": whiten,
    "value_loss": value,
    "logprob_entropy": logprob_entropy,
    "logprob_entropy_grad": logprob_entropy_grad,
    "value_head": value_head,
    "tis": tis,
    "icepop": icepop,
    "mis": mis,
    "mismatch_metrics": mismatch_metrics,
    "loss_reduction": loss_reduction,
    "cp_zigzag": cp_zigzag,
    "grad_invariance": grad_invariance,
    "policy_objective": policy_objective,
    "sft_loss": sft,
    "opd": opd,
    "stateless_adam": stateless,
    "pass_at_k": pass_at_k,
    "first_fit": first_fit,
    "dp_schedule": dp_schedule,
    "lr_scheduler": lr_scheduler,
    "periodic": periodic,
    "cp_last_token_owner": cp_last_token_owner,
    "delta_encode": delta_encode,
}
