"""The learning rate's course by transformers' names, and optimizers by the flag's."""

import math

import pytest
import torch
from torch import nn

from swift_r1.flags.fields import flag_specs
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.training.optimizer import (
    GROW_AFTER,
    LearningRate,
    LossScale,
    OptimizerConfig,
    build_optimizer,
    parameter_groups,
    set_learning_rate,
)

PEAK, WARMUP, TOTAL = 1.0, 2, 10
AFTER_WARMUP = {
    "linear": ({}, lambda part: 1 - part),
    "cosine": ({}, lambda part: 0.5 * (1 + math.cos(math.pi * part))),
    "cosine_with_min_lr": (
        {"min_lr": 0.1},
        lambda part: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * part)),
    ),
    "cosine_with_restarts": (
        {"num_cycles": 2},
        lambda part: 0.5 * (1 + math.cos(math.pi * (2 * part % 1))),
    ),
    "polynomial": ({"power": 2, "lr_end": 0.1}, lambda part: 0.1 + 0.9 * (1 - part) ** 2),
    "inverse_sqrt": ({"timescale": 2}, lambda part: 1 / math.sqrt((8 * part + 2) / 2)),
    "constant": ({}, lambda part: 1.0),
    "constant_with_warmup": ({}, lambda part: 1.0),
}


@pytest.mark.parametrize("name", AFTER_WARMUP)
def test_the_course(name):
    """By the schedules' own formulas."""
    kwargs, formula = AFTER_WARMUP[name]
    rate = LearningRate(name, PEAK, WARMUP, TOTAL, kwargs)
    values = []
    for _ in range(TOTAL):
        values.append(rate.value)
        rate.advance()
    if name != "constant":
        assert values[:2] == pytest.approx([0.0, 0.5])
    wanted = [formula(step / (TOTAL - WARMUP)) for step in range(TOTAL - WARMUP)]
    assert values[WARMUP:] == pytest.approx(wanted)
    again = LearningRate(name, PEAK, WARMUP, TOTAL, kwargs)
    again.go_to(5)
    assert again.value == values[5]


def test_lora_plus_has_a_rate_of_its_own_for_b():
    a, b = (nn.Parameter(torch.ones(80, 80)) for _ in range(2))
    config = OptimizerConfig(0.1, 0.0, 0.9, 0.95, 1e-8, 1.0, lorap_lr_ratio=16)
    optimizer = build_optimizer(
        parameter_groups([("q.lora_A.x", a), ("q.lora_B.x", b)], config), config
    )
    set_learning_rate(optimizer, 0.01)
    a.grad = b.grad = torch.full_like(a, 0.5)
    optimizer.step()
    torch.testing.assert_close(1 - a.detach(), torch.full((80, 80), 0.01), rtol=1e-3, atol=0)
    torch.testing.assert_close(1 - b.detach(), torch.full((80, 80), 0.16), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", flag_specs(RlhfArguments)["optim"].info.choices)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_every_optimizer_takes_a_step_down(name):
    parameter = nn.Parameter(torch.ones(80, 80))
    config = OptimizerConfig(0.1, 0.0, 0.9, 0.95, 1e-8, 1.0, name)
    optimizer = build_optimizer(parameter_groups([("layers.0.x", parameter)], config), config)
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    # Adam's first step is the learning rate, whatever the gradient's size; Muon's of a matrix of rank 1 as large as
    # Adam's would be of one of full rank, but for the rounding of its iteration.
    moved = {"sgd": 0.05, "muon": 0.1 * 0.2 * 80**0.5 / 80}.get(name, 0.1)
    tolerance = 0.5 * moved if name == "muon" else 1e-3
    torch.testing.assert_close(
        parameter.detach(), torch.full((80, 80), 1 - moved), rtol=0, atol=tolerance
    )


def test_the_loss_scale_falls_and_grows():
    scale = LossScale()
    scale.update(overflow=True)
    assert scale.scale == 2.0**15
    for _ in range(GROW_AFTER):
        scale.update(overflow=False)
    assert scale.scale == 2.0**15
    scale.update(overflow=False)
    assert scale.scale == 2.0**16
    for _ in range(30):
        scale.update(overflow=True)
    assert scale.scale == 1.0


def test_muon_moves_matrices_of_layers_and_adamw_the_rest(monkeypatch):
    """Both as torch's own, whose iteration is made to be in float32, with a rate that changes."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    torch.manual_seed(0)
    shapes = {
        "embed.weight": (7, 4),
        "layers.0.up.weight": (6, 4),
        "layers.1.up.weight": (4, 6),
        "layers.0.norm.weight": (4,),
    }
    own, torchs = (
        {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()} for _ in range(2)
    )
    config = OptimizerConfig(0.1, 0.3, 0.9, 0.95, 1e-8, 1.0, optim="muon")
    optimizer = build_optimizer(parameter_groups(own.items(), config), config)
    embedding, tall, wide, norm = torchs.values()
    muon = torch.optim.Muon(
        [tall, wide], weight_decay=0.3, eps=1e-8, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": [embedding], "weight_decay": 0.3}, {"params": [norm], "weight_decay": 0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for rate in (0.1, 0.02, 0.1):
        for one, other in zip(own.values(), torchs.values(), strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        set_learning_rate(optimizer, rate)
        for expected in (muon, adamw):
            for group in expected.param_groups:
                group["lr"] = rate
            expected.step()
        optimizer.step()
        for name, one in zip(own, torchs.values(), strict=True):
            torch.testing.assert_close(own[name], one, rtol=0, atol=1e-6)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
