# Qwen3.5 35B-A3B with vision: the language part.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
source "$(dirname "${BASH_SOURCE[0]}")/qwen3.5-35B-A3B.sh"
