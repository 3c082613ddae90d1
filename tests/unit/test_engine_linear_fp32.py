"""The law: a packed fp32 weight gives the product of the plain one for every number of rows, with and without bias."""

import pytest
import torch

from engine_proc.models import linear


@pytest.mark.parametrize(("outputs", "inputs"), [(7, 5), (96, 64), (320, 192), (513, 1000)])
@pytest.mark.parametrize("biased", [False, True])
@torch.inference_mode()
def test_packed_equals_plain(outputs: int, inputs: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None
    packed = linear.Linear(weight.clone(), bias)
    packed.pack()
    assert (packed.weight is None) == linear.packs_fp32()
    for rows in (1, 2, 3, 7, 16, 17, 64, 511, 512, 513, 2048):
        x = torch.randn(rows, 2 * inputs, generator=generator)[:, ::2]  # not contiguous
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(packed(x).double(), exact, rtol=1e-5, atol=2e-4)
        torch.testing.assert_close(packed.wide(x).double(), exact, rtol=1e-5, atol=2e-4)


@torch.inference_mode()
def test_a_shared_weight_stays() -> None:
    weight = torch.randn(96, 64)
    shared = linear.Linear(weight, None)
    shared.pack(share=True)
    assert shared.weight is weight
