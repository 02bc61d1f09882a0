"""Flags of on-policy distillation: who teaches, and how the policy learns from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from swift_r1.algorithms.method import Distillation, Field, with_settings
from swift_r1.algorithms.methods import DISTILLATIONS, LOSSES
from swift_r1.flags.adapters import adapter_flags
from swift_r1.flags.algorithm import AlgorithmArguments
from swift_r1.flags.fields import Scope, check_url, flag

HINT = "teacher_prompt"
"""The column whose text the teacher reads in the place of the user's last message."""
POLICY = "policy"  # `--teacher_model`: the policy as it is
MOST_FROM_SERVER = 20  # likeliest tokens in an answer of a server


def read_teachers(words: list[str]) -> dict[str, str]:
    """Returns the address of each tag, `""` for one that teaches everything. Raises ValueError: they are no such
    words."""
    url_of: dict[str, str] = {}
    entries = [entry for word in words for entry in _entries(word)]
    for url, tags in entries:
        check_url(url)
        if not tags and len(entries) > 1:
            raise ValueError(f"several teachers need tags, as in {_EXAMPLE}: {url} has none")
        for tag in tags or [""]:
            if tag in url_of:
                raise ValueError(f"the tag {tag!r} has two teachers")
            url_of[tag] = url
    return url_of


_EXAMPLE = '\'{"url": "http://127.0.0.1:8001", "tags": ["math"]}\''


def _entries(word: str) -> list[tuple[str, list[str]]]:
    """Returns the addresses in a word, each with its tags."""
    if word[:1] not in ("{", "["):
        return [(word, [])]
    try:
        content = json.loads(word)
        entries = []
        for teacher in content if isinstance(content, list) else [content]:
            tags = teacher.get("tags", [])
            entries.append(
                (
                    str(teacher["url"]),
                    [tags] if isinstance(tags, str) else [str(tag) for tag in tags],
                )
            )
        return entries
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"must be an address, or JSON like {_EXAMPLE}, not {word!r}") from None


_TAUGHT = Scope(
    lambda args: args.distillation is not None,
    "without --teacher_model or --teacher_model_server",
    True,
)
_LOCAL = Scope(
    lambda args: bool(args.teacher_model or args.teacher_adapters) and args.teacher_model != POLICY,
    "without a model of its own as teacher (--teacher_model)",
    allow_default=True,
)
_SERVED = Scope(lambda args: bool(args.teacher_model_server), "without --teacher_model_server")


def _own_flag(method: Any, item: Field) -> Any:
    """Returns a flag of one way to learn from a teacher: the one that asks for it, or one that is read with it."""
    scopes = [] if item.name == method.flag else [_with(method)]
    return flag(item.default, item.metadata["help"], *scopes, **item.metadata["limits"])


@cache
def _with(method: Distillation) -> Scope:
    return Scope(method.chosen, f"without {method.chosen_by}")


@dataclass(frozen=True, kw_only=True)
@with_settings(DISTILLATIONS.values(), _own_flag)
class DistillationArguments(AlgorithmArguments):
    """Distillation."""

    teacher_model: str | None = flag(
        None,
        "folder or id of the teacher model, with the policy's tokenizer; --model's own path: the model as loaded; "
        "policy: the current policy, which reads the column {HINT}",
    )
    teacher_adapters: str | None = flag(
        None,
        "folder of adapters for --teacher_model (which is then --model by default)",
        check=partial(adapter_flags, "--teacher_adapters"),
    )
    teacher_model_server: list[str] = flag(
        [],
        "address of a `swift rollout` server whose model teaches; of several, JSON with url and tags",
        instead_of=("teacher_model", "teacher_adapters"),
        objects=True,
        check=lambda word: read_teachers([word]),
    )
    teacher_tag_key: str = flag(
        "dataset", "column with the row's tag, for several teachers", _SERVED
    )
    teacher_kl_coef: float = flag(
        1.0, "weight of the teacher in advantages, rewards or loss", _TAUGHT, at_least=0
    )
    teacher_kl_in_reward: bool = flag(
        False,
        "subtract --teacher_kl_coef times a completion's KL to the teacher from its reward, in the place of that of "
        "each token from its advantage",
        _TAUGHT,
    )
    gkd_logits_topk: int | None = flag(
        None,
        "add the KL to the teacher to the loss, over so many of its likeliest tokens and the rest as one (a server: "
        f"at most {MOST_FROM_SERVER}), in the place of advantages",
        _TAUGHT,
        at_least=1,
        instead_of=("teacher_kl_in_reward",),
    )
    advantage_reweight: str | None = flag(
        None,
        "rlsd: the reward says in which direction, and the teacher (by default the policy itself, which reads the "
        f"column {HINT}) which tokens of a completion count more",
        choices=tuple(
            method.value for method in DISTILLATIONS.values() if method.flag == "advantage_reweight"
        ),
        instead_of=("teacher_kl_in_reward", "gkd_logits_topk", "teacher_kl_coef"),
    )
    offload_teacher_model: bool = flag(
        False, "keep the teacher in host memory except while it computes (GPU only)", _LOCAL
    )

    @property
    def distillation(self) -> Distillation | None:
        """How the policy learns from the teacher; None without one."""
        if self.teacher_or_policy is None and not (
            self.teacher_adapters or self.teacher_model_server
        ):
            return None
        return self._asked_for or next(
            method for method in DISTILLATIONS.values() if method.flag is None
        )

    @property
    def _asked_for(self) -> Distillation | None:
        return next((method for method in DISTILLATIONS.values() if method.chosen(self)), None)

    @property
    def teaches_tokens(self) -> bool:
        """Whether tokens learn from the teacher where all rewards are equal."""
        method = self.distillation
        return method is not None and not method.needs_rewards and method.rewards is None

    @property
    def teacher_or_policy(self) -> str | None:
        """`--teacher_model`; by default the policy, where that can teach itself."""
        by_itself = self._asked_for is not None and self._asked_for.by_itself
        named = self.teacher_model or self.teacher_adapters or self.teacher_model_server
        return POLICY if by_itself and not named else self.teacher_model

    @property
    def teacher_servers(self) -> dict[str, str]:
        """Address by tag, see `read_teachers`."""
        return read_teachers(self.teacher_model_server)

    def distillation_faults(self) -> Iterator[str]:
        """What a teacher needs of other flags."""
        method = self.distillation
        if method is None:
            return
        if self.rlhf_type == "ppo":
            yield "--rlhf_type ppo learns from its critic: a teacher needs --rlhf_type grpo"
        try:
            servers = self.teacher_servers
        except ValueError as error:
            yield f"--teacher_model_server: {error}"
            return
        if servers and (self.gkd_logits_topk or 0) > MOST_FROM_SERVER:
            yield f"--gkd_logits_topk {self.gkd_logits_topk}: a server answers with at most {MOST_FROM_SERVER} tokens"
        if method.advantages is not None:
            if LOSSES[self.loss_type].labels is not None:
                yield (
                    f"--loss_type {self.loss_type} compares completions, and a teacher's advantages are of tokens: use "
                    "another loss"
                )
            masked = self.off_policy_sequence_mask_delta is not None
            for name, of_completions in (
                (
                    "importance_sampling_level sequence",
                    self.importance_sampling_level == "sequence",
                ),
                ("off_policy_sequence_mask_delta", masked),
            ):
                if of_completions:
                    yield f"--{name} is of whole completions, and a teacher's advantages are of tokens: leave it out"
