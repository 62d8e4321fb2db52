"""Buckets keep order, respect their bound and lose nothing."""

import pytest
import torch

from slime.backends.weight_sync.bucket import buckets


def names(result):
    return [[name for name, _ in bucket] for bucket in result]


@pytest.mark.parametrize(
    ("sizes", "max_bytes", "expected"),
    [
        ([], 16, []),
        ([2, 2, 2], 16, [["0", "1"], ["2"]]),
        ([1, 9, 1], 16, [["0"], ["1"], ["2"]]),
        ([9], 16, [["0"]]),
        ([4, 4], 16, [["0"], ["1"]]),
    ],
)
def test_buckets_are_cut_at_the_bound_and_a_larger_tensor_travels_alone(sizes, max_bytes, expected):
    tensors = [(str(index), torch.zeros(size)) for index, size in enumerate(sizes)]  # 4 bytes an element
    assert names(buckets(tensors, max_bytes)) == expected


def test_buckets_consume_the_stream_lazily():
    seen = []

    def stream():
        for index in range(3):
            seen.append(index)
            yield str(index), torch.zeros(4)

    first = next(buckets(stream(), 16))
    assert [name for name, _ in first] == ["0"]
    assert seen == [0, 1]
