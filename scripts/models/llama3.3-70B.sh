# Llama 3.3 70B: the shape of Llama 3.1 70B.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
source "$(dirname "${BASH_SOURCE[0]}")/llama3.1-70B.sh"
