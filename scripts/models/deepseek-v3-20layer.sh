# DeepSeek V3 cut to 20 layers, for tests.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS_NUM_LAYERS="${MODEL_ARGS_NUM_LAYERS:-20}" source "$(dirname "${BASH_SOURCE[0]}")/deepseek-v3.sh"
