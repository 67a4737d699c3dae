"""A router's GEMMs of bf16 on a GPU, whose tensor cores add up in fp32."""

import pytest

from tests.ops.moe.test_logits import check_bf16
from tests.ops.moe.test_logits import test_the_gradient_that_comes_in as _gradient_that_comes_in

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("experts", "hidden"), [(8, 4096), (128, 2048), (128, 2880), (24, 48)])
def test_gemms_have_the_error_of_fp32(experts, hidden):
    check_bf16(experts, lead=(4, 512), hidden=hidden)


@pytest.mark.parametrize("experts", [8, 128])
def test_a_small_difference_of_gradients_is_kept(experts):
    _gradient_that_comes_in(experts)
