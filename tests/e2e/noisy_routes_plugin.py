"""Gives the routers of the embedded engine noise, so that it chooses other experts than the trainer would."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from swift_r1.serving.engines.transformers import TransformersEngine

SPREAD = 1.5
"""Size of what is added to a router's logits when it chooses; gates' weights are of the others."""


class NoisyChoice(TorchFunctionMode):
    """Of each `topk` among the experts of a token: the noise follows from the logits, so that a token that is read again
    goes to the same experts."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2:
            return func(*args, **(kwargs or {}))
        scores, k = args[:2]
        logits = scores.log()
        chosen = (logits + SPREAD * (20 * logits).sin()).topk(k, dim=-1).indices
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


plain = TransformersEngine.generate


def generate(self, requests, weight_version, *args, **kwargs):
    if not weight_version:  # the check of the engine before the run
        return plain(self, requests, weight_version, *args, **kwargs)
    with NoisyChoice():
        return plain(self, requests, weight_version, *args, **kwargs)


TransformersEngine.generate = generate
