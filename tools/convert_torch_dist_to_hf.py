"""Write a Hugging Face folder of a Megatron checkpoint's weights.

python tools/convert_torch_dist_to_hf.py --input-dir SAVE/iter_0000100 --output-dir FOLDER --origin-hf-dir MODEL
"""

from slime.convert import run_tool, torch_dist_to_hf

if __name__ == "__main__":
    run_tool(torch_dist_to_hf)
