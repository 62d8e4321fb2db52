# Qwen3.6 27B: the shape of Qwen3.5 27B.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
source "$(dirname "${BASH_SOURCE[0]}")/qwen3.5-27B.sh"
