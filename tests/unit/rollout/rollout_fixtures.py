"""Fixtures of the rollout tests; `conftest.py` of each folder that needs them imports all."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from tiny_tokenizer import build


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> str:
    return build(tmp_path_factory.mktemp("chatml"))


@pytest.fixture
def engine():
    fake = FakeEngine()
    yield fake
    fake.stop()


@pytest.fixture
def write_rows(tmp_path):
    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def make_args(tokenizer_dir, write_rows):
    """Arguments that the rollout reads; the default data has 10 prompts "p0".."p9"."""

    def make(engine=None, **overrides) -> SimpleNamespace:
        values = dict(
            hf_checkpoint=tokenizer_dir,
            model_arch={"max_position_embeddings": 512},
            sglang_router_ip="127.0.0.1",
            sglang_router_port=engine.port if engine else 1,
            sglang_model_routers=None,
            sglang_server_concurrency=64,
            sglang_dp_size=1,
            sglang_context_length=None,
            sglang_speculative_algorithm=None,
            sglang_enable_deterministic_inference=False,
            sglang_router_request_timeout_secs=120,
            router_policy="round_robin",
            rollout_engine="embedded",
            lora_sync="merged",
            lora_adapters=["actor"],
            rollout_num_engines=1,
            rollout_seed=42,
            group_requests="never",
            rollout_shuffle=False,
            rollout_batch_size=2,
            rounds_ahead=0,
            update_weights_interval=1,
            over_sampling_batch_size=None,
            n_samples_per_prompt=2,
            rollout_global_dataset=True,
            prompt_data=None,
            save=None,
            save_debug_rollout_data=None,
            input_key="input",
            label_key=None,
            metadata_key="metadata",
            tool_key="tools",
            multimodal_keys=None,
            apply_chat_template=False,
            apply_chat_template_kwargs={},
            rollout_max_prompt_len=None,
            rollout_max_response_len=16,
            rollout_max_context_len=None,
            rollout_temperature=1.0,
            rollout_top_p=1.0,
            rollout_top_k=-1,
            rollout_stop=None,
            rollout_stop_token_ids=None,
            rollout_skip_special_tokens=False,
            use_rollout_routing_replay=False,
            partial_rollout=False,
            mask_offpolicy_in_partial_rollout=False,
            partial_rollout_max_age=None,
            round_policy_path="slime.rollout.round_policy.RoundPolicy",
            custom_generate_function_path=None,
            rollout_sample_hook_path=[],
            custom_rm_path="stub_rm.one",
            custom_reward_post_process_path=None,
            custom_convert_samples_to_train_data_path=None,
            rm_type=None,
            rm_timeout=60.0,
            rm_url=None,
            rm_model_path=None,
            group_rm=False,
            reward_key=None,
            eval_reward_key=None,
            eval_max_prompt_len=None,
            eval_max_context_len=None,
            eval_datasets=[],
            dynamic_sampling_filter_path=None,
            buffer_filter_path=None,
            rollout_sample_filter_path=None,
            rollout_all_samples_process_path=None,
            data_source_path="slime.rollout.data_source.RolloutDataSourceWithBuffer",
            num_data_workers=0,
            streaming_data=False,
            strict_args=False,
            dump_details=None,
            load=None,
            max_turns=None,
            num_layers=2,
            moe_router_topk=2,
            trust_remote_code=False,
        )
        values.update(overrides)
        if values["prompt_data"] is None:
            values["prompt_data"] = write_rows([{"input": f"p{i}", "label": str(i)} for i in range(10)])
        return SimpleNamespace(**values)

    return make
