# Llama 3.1 8B.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
source "$(dirname "${BASH_SOURCE[0]}")/llama3.1-8B-Instruct.sh"
