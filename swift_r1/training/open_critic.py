"""Builds the critic of PPO from the flags: another model beside the policy, under the same backend."""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from swift_r1.arguments import Plan, RlhfArguments
from swift_r1.errors import UsageError
from swift_r1.models.critic import has_value_head, load_critic
from swift_r1.models.lora import trained_share
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import CriticBackend
from swift_r1.training.backends.deepspeed_config import read_config
from swift_r1.training.backends.local import LocalCritic
from swift_r1.training.context import CriticParts
from swift_r1.training.setup import optimizer_of, schedule_of
from swift_r1.wire.protocol import tokenizer_hash

logger = logging.getLogger("swift_r1.training")


def open_critic(args: RlhfArguments, plan: Plan, ranks: Ranks, tokenizer: Any) -> CriticParts:
    """The critic of `--critic_model` with its optimizer and the course of its learning rate. Collective.

    All of its weights are trained, also where the policy has adapters.

    Raises:
        UsageError: the model cannot be loaded as a critic, or reads other tokens than the policy.
    """
    path, rate = str(args.critic_model), float(args.critic_learning_rate or 0.0)
    check_tokens(path, tokenizer)
    optimizer = optimizer_of(args, rate)

    def load() -> Any:
        return load_critic(path, args.torch_dtype, args.gradient_checkpointing)

    config = AutoConfig.from_pretrained(path)
    if args.deepspeed is None:
        backend: CriticBackend = LocalCritic(load().to(ranks.device), optimizer)
    else:
        from swift_r1.training.backends.deepspeed import DeepSpeedCritic

        dtype = getattr(torch, args.torch_dtype) if args.torch_dtype else config.dtype or torch.float32
        backend = DeepSpeedCritic(load, dtype, optimizer, read_config(args.deepspeed), ranks)
    if ranks.is_main:
        head = "its own value head" if has_value_head(config) else "a new value head of zeros"
        logger.info("critic: %s with %s; %s", path, head, trained_share(backend.model))
        logger.info("critic's backend: %s", json.dumps({"backend": backend.describe()["backend"]}))
    return CriticParts(backend, schedule_of(args, plan, rate))


def check_tokens(path: str, tokenizer: Any) -> None:
    """Refuses a critic that reads other tokens than the policy writes.

    Raises:
        UsageError: then, or where it has no tokenizer.
    """
    try:
        own = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot load the tokenizer of --critic_model {path}: {str(error).splitlines()[0]}") from error
    if tokenizer_hash(own) != tokenizer_hash(tokenizer):
        raise UsageError(f"--critic_model {path} has another tokenizer than --model: it would read other words")
