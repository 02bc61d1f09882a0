"""Builds the critic of PPO from the flags: another model beside the policy, under the same backend."""

from __future__ import annotations

import json
import logging
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from swift_r1.arguments import Plan, RlhfArguments
from swift_r1.errors import UsageError
from swift_r1.models.loading import has_value_head, load_critic
from swift_r1.models.weights import trained_share
from swift_r1.runtime.ranks import Ranks
from swift_r1.training import backends
from swift_r1.training.context import CriticParts
from swift_r1.training.setup import optimizer_of, schedule_of
from swift_r1.wire.identity import tokenizer_hash

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

    def load() -> PreTrainedModel:
        return load_critic(path, args.torch_dtype, args.gradient_checkpointing)

    backend = backends.open_critic(args, load, optimizer, ranks)
    if ranks.is_main:
        head = "its own value head" if has_value_head(AutoConfig.from_pretrained(path)) else "a new value head of zeros"
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
