#!/usr/bin/env bash
# GRPO on SmolLM2-135M-Instruct with reasoning-gym tasks, on CPU: the ordinary command line.
#   bash examples/smollm2/run.sh [more flags]
set -euo pipefail
REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PYTHON="${PYTHON:-${REPOSITORY}/.venv/bin/python}"
WORK="${WORK:-outputs/smollm2}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

${PYTHON} "${REPOSITORY}/examples/smollm2/prepare.py" --output "${WORK}"

ROLLOUT_ARGS=(
   --prompt-data "${WORK}/train.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --custom-rm-path "${REPOSITORY}/examples/smollm2/reward.py"
   --num-rollout "${NUM_ROLLOUT:-4}"
   --rollout-batch-size 8
   --n-samples-per-prompt 4
   --global-batch-size 32
   --rollout-max-response-len 24
   --rollout-temperature 0.7
)

EVAL_ARGS=(
   --eval-prompt-data held_out "${WORK}/held_out.jsonl"
   --eval-interval "${NUM_ROLLOUT:-4}"
   --n-samples-per-eval-prompt 1
   --eval-temperature 0
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-5
   --lr-decay-style constant
   --weight-decay 0
   --adam-beta1 0.9
   --adam-beta2 0.98
)

PERF_ARGS=(
   --use-dynamic-batch-size
   --max-tokens-per-gpu 1024
   --sglang-context-length 256
)

exec ${PYTHON} "${REPOSITORY}/train.py" \
   --hf-checkpoint "${WORK}/model" \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 1 \
   --rollout-num-gpus 1 \
   "${ROLLOUT_ARGS[@]}" \
   "${EVAL_ARGS[@]}" \
   "${GRPO_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" \
   "${PERF_ARGS[@]}" \
   "$@"
