"""Weight checksums: equal for equal bits, different for anything else."""

import pytest
import torch

from slime.utils.checksum import tensor_checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_checksum_ignores_strides_and_storage(dtype):
    base = torch.arange(24).to(dtype).view(4, 6)
    assert tensor_checksum(base.t()) == tensor_checksum(base.t().contiguous())
    assert tensor_checksum(base[1:3]) == tensor_checksum(base[1:3].clone())


def test_checksum_sees_one_flipped_bit_shape_and_dtype():
    base = torch.zeros(8)
    flipped = base.clone()
    flipped[5] = torch.tensor(1e-45)
    assert tensor_checksum(base) != tensor_checksum(flipped)
    assert tensor_checksum(base) != tensor_checksum(base.view(2, 4))
    assert tensor_checksum(base) != tensor_checksum(base.to(torch.int32))


def test_checksum_accepts_scalar_and_empty_tensors():
    assert tensor_checksum(torch.tensor(1.0)) != tensor_checksum(torch.tensor(2.0))
    assert len(tensor_checksum(torch.empty(0))) == 8
