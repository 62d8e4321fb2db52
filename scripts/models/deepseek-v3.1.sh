# DeepSeek V3.1: the shape of V3.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
source "$(dirname "${BASH_SOURCE[0]}")/deepseek-v3.sh"
