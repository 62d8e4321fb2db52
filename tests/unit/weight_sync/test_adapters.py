"""Folders of adapters for engines that do not share the trainer's memory."""

from __future__ import annotations

import threading

import torch

from slime.backends.weight_sync.adapters import AdapterSender
from slime.utils import peft_format

CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


class Engine:
    """A client of an engine on another node that reads what it is told to load."""

    def __init__(self, number: int):
        self.base_url, self.seen = f"http://10.0.0.{number}:1", []

    def unload_lora_adapter(self, name: str) -> None:
        pass

    def load_lora_adapter(self, name: str, path: str) -> None:
        self.seen.append(peft_format.read_adapter(path)[1])

    def update_weight_version(self, version: str) -> None:
        pass


def test_all_engines_read_whole_folders_and_never_those_of_an_earlier_run(tmp_path):
    tensors = {"actor": {NAME: torch.ones(1, 4096)}}
    for value in (1.0, 2.0):  # the second run starts at the same version
        sender = AdapterSender(CONFIG, "10.0.1.1", 1, str(tmp_path))
        tensors["actor"][NAME] = torch.full((1, 4096), value)
        engines = [Engine(i) for i in range(4)]
        threads = [threading.Thread(target=sender.send, args=(engine, tensors, "6")) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert [float(engine.seen[0][NAME].mean()) for engine in engines] == [value] * 4
