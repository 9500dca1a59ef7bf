"""Our AdamW against torch's, over many steps, and gradient clipping."""

from __future__ import annotations

import pytest
import torch

from engine.train import adamw


def test_steps_equal_those_of_torch_optim() -> None:
    torch.manual_seed(0)
    ours = [torch.randn(5, 3), torch.randn(4)]
    theirs = [p.clone().requires_grad_() for p in ours]
    peer = torch.optim.AdamW(
        theirs, lr=3e-3, betas=(adamw.BETA1, adamw.BETA2), eps=adamw.EPS, weight_decay=0.1, foreach=False
    )
    state = adamw.new_adam_state(ours)
    for _ in range(25):
        gradients = [torch.randn_like(p) for p in ours]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        peer.step()
        adamw.adamw_step(ours, gradients, state, learning_rate=3e-3, weight_decay=0.1)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-5, atol=1e-6)


def test_clipping_scales_all_gradients_together_to_the_norm() -> None:
    gradients = [torch.full((4,), 3.0), torch.full((3,), 4.0)]
    assert adamw.clip_by_norm(gradients, 1.0) == pytest.approx((4 * 9 + 3 * 16) ** 0.5)
    assert float(torch.cat(gradients).norm()) == pytest.approx(1.0)
    assert float(gradients[0][0] / gradients[1][0]) == pytest.approx(0.75)


def test_clipping_leaves_small_gradients_and_hides_no_nan() -> None:
    small = [torch.tensor([0.1])]
    adamw.clip_by_norm(small, 1.0)
    assert small[0].item() == pytest.approx(0.1)
    assert adamw.clip_by_norm([torch.tensor([float("nan")])], 1.0) != adamw.clip_by_norm([torch.zeros(1)], 1.0)
