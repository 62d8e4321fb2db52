"""Write a Megatron checkpoint (torch_dist) of a Hugging Face folder's weights.

source scripts/models/qwen3-4B.sh
python tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint MODEL --save OUT
torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py ... --pipeline-model-parallel-size 8   # a model too large for one
"""

from slime.convert import hf_to_torch_dist, run_tool

if __name__ == "__main__":
    run_tool(hf_to_torch_dist)
