import os

import pytest
import torch

from slime.utils.weight_file import open_safetensors, write_safetensors


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_mode_of_the_umask(tmp_path, umask):
    previous = os.umask(umask)
    try:
        write_safetensors({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    finally:
        os.umask(previous)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    with open_safetensors(tmp_path / "a.safetensors") as file:
        assert file.get_tensor("a").tolist() == [1, 1]


@pytest.mark.parametrize("spoil", ["cut", "text", "absent"])
def test_a_broken_file_is_named(tmp_path, spoil):
    path = tmp_path / "model.safetensors"
    if spoil == "cut":
        write_safetensors({"a": torch.ones(200)}, path)
        path.write_bytes(path.read_bytes()[:300])
    elif spoil == "text":
        path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="model.safetensors is not a complete safetensors file"):
        open_safetensors(path)
