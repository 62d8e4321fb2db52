"""Import path of the evaluation set record for existing code; the code lives in slime.config.eval_datasets."""

from slime.config.eval_datasets import EvalDatasetConfig, build_eval_datasets
