#!/usr/bin/env bash
# The same loop on two cores: a random tiny model learns to write printable text, a few rounds of GRPO in about a minute.
#   bash scripts/run-cpu-tiny.sh [more flags]
# HF_CHECKPOINT, PROMPT_DATA and REWARD put your own small model, data and reward function in place of the made ones.
set -euo pipefail
REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-${REPOSITORY}/.venv/bin/python}"
WORK="${WORK:-outputs/cpu-tiny-inputs}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [[ -z "${HF_CHECKPOINT:-}" ]]; then
   HF_CHECKPOINT="${WORK}/model"
   ${PYTHON} -c "from slime.utils.tiny_model import make_tiny_model; make_tiny_model('${HF_CHECKPOINT}')"
fi
if [[ -z "${PROMPT_DATA:-}" ]]; then
   PROMPT_DATA="${WORK}/sums.jsonl"
   mkdir -p "${WORK}"
   for a in {0..9}; do
      for b in {0..9}; do
         echo "{\"prompt\": \"${a}+${b}=\", \"label\": \"$((a + b))\"}"
      done
   done >"${PROMPT_DATA}"
fi
if [[ -z "${REWARD:-}" ]]; then
   REWARD="${WORK}/printable.py:printable_share"
   mkdir -p "${WORK}"
   cat >"${WORK}/printable.py" <<'PYTHON'
async def printable_share(args, sample, **kwargs):
    return sum(" " <= character <= "~" for character in sample.response) / max(1, len(sample.response))
PYTHON
fi

CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT}"
)

ROLLOUT_ARGS=(
   --prompt-data "${PROMPT_DATA}"
   --input-key prompt
   --label-key label
   --rollout-shuffle
   --custom-rm-path "${REWARD}"
   --num-rollout 5
   --rollout-batch-size 4
   --n-samples-per-prompt 4
   --rollout-max-response-len 8
   --rollout-temperature 1
   --global-batch-size 16
)

PERF_ARGS=(
   --use-dynamic-batch-size
   --max-tokens-per-gpu 2048
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.001
   --kl-loss-type low_var_kl
   --eps-clip 0.2
   --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-3
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

SGLANG_ARGS=(
   --sglang-context-length 256
)

exec ${PYTHON} "${REPOSITORY}/train.py" \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 1 \
   --rollout-num-gpus 1 \
   "${CKPT_ARGS[@]}" \
   "${ROLLOUT_ARGS[@]}" \
   "${PERF_ARGS[@]}" \
   "${GRPO_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" \
   "${SGLANG_ARGS[@]}" \
   "$@"
