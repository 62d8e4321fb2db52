# Llama 3.2 3B on AMD GPUs: the same shape.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
source "$(dirname "${BASH_SOURCE[0]}")/llama3.2-3B-Instruct.sh"
