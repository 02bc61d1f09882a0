"""Flags of on-policy distillation: who teaches, and how the policy learns from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from swift_r1.flags.adapters import adapter_flags
from swift_r1.flags.algorithm import AlgorithmArguments
from swift_r1.flags.fields import Scope, check_url, flag

HINT = "teacher_prompt"
"""The column whose text the teacher reads in the place of the user's last message."""
POLICY = "policy"  # `--teacher_model`: the policy as it is
MOST_FROM_SERVER = 20  # likeliest tokens in an answer of a server


def read_teachers(words: list[str]) -> dict[str, str]:
    """The address of each tag, `""` for one that teaches everything. Raises ValueError: they are no such words."""
    found: dict[str, str] = {}
    entries = [one for word in words for one in _entries(word)]
    for url, tags in entries:
        check_url(url)
        if not tags and len(entries) > 1:
            raise ValueError(f"several teachers need tags, as in {_EXAMPLE}: {url} has none")
        for tag in tags or [""]:
            if tag in found:
                raise ValueError(f"the tag {tag!r} has two teachers")
            found[tag] = url
    return found


_EXAMPLE = '\'{"url": "http://127.0.0.1:8001", "tags": ["math"]}\''


def _entries(word: str) -> list[tuple[str, list[str]]]:
    if word[:1] not in ("{", "["):
        return [(word, [])]
    try:
        content = json.loads(word)
        found = []
        for one in content if isinstance(content, list) else [content]:
            tags = one.get("tags", [])
            found.append((str(one["url"]), [tags] if isinstance(tags, str) else [str(tag) for tag in tags]))
        return found
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"must be an address, or JSON like {_EXAMPLE}, not {word!r}") from None


_TAUGHT = Scope(lambda args: args.teaches_by is not None, "without --teacher_model or --teacher_model_server", True)
_LOCAL = Scope(
    lambda args: bool(args.teacher_model or args.teacher_adapters) and args.teacher_model != POLICY,
    "without a model of its own as teacher (--teacher_model)",
    unless_off=True,
)
_RLSD = Scope(lambda args: args.advantage_reweight == "rlsd", "without --advantage_reweight rlsd")
_SDAR = Scope(lambda args: args.sdar_loss_coef > 0, "without --sdar_loss_coef")
_SERVED = Scope(lambda args: bool(args.teacher_model_server), "without --teacher_model_server")


@dataclass(frozen=True, kw_only=True)
class DistillationArguments(AlgorithmArguments):
    """Distillation."""

    teacher_model: str | None = flag(
        None,
        "folder or id of a model that teaches, of the policy's tokenizer; --model itself: it as it was loaded; "
        f"policy: the policy as it is, which reads the column {HINT}",
    )
    teacher_adapters: str | None = flag(
        None,
        "folder of adapters over --teacher_model (default of that: --model)",
        check=partial(adapter_flags, "--teacher_adapters"),
    )
    teacher_model_server: list[str] = flag(
        [],
        "address of a `swift rollout` server whose model teaches; of several, JSON with url and tags",
        instead_of=("teacher_model", "teacher_adapters"),
        objects=True,
        check=lambda word: read_teachers([word]),
    )
    teacher_tag_key: str = flag("dataset", "the column that has a row's tag, for several teachers", _SERVED)
    teacher_kl_coef: float = flag(
        1.0, "weight of the teacher in the advantages, the rewards or the loss", _TAUGHT, at_least=0
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
        choices=("rlsd",),
        instead_of=("teacher_kl_in_reward", "gkd_logits_topk", "teacher_kl_coef"),
    )
    rlsd_lambda: float = flag(0.5, "its share: 0 the plain advantage", _RLSD, at_least=0, at_most=1)
    rlsd_reweight_clip_range: float = flag(0.2, "how far a token's factor may be from 1", _RLSD, at_least=0)
    rlsd_lambda_warmup_steps: int = flag(0, "optimizer steps until --rlsd_lambda is reached", _RLSD, at_least=0)
    rlsd_lambda_decay_steps: int = flag(0, "steps from there to 0; 0: it stays", _RLSD, at_least=0)
    rlsd_negative_only: bool = flag(False, "positive advantages stay as they are", _RLSD)
    sdar_loss_coef: float = flag(
        0.0,
        "weight of a loss that draws the policy to the teacher (by default itself, reading the same column) on tokens "
        "of which the teacher is surer",
        at_least=0,
        instead_of=("teacher_kl_in_reward", "gkd_logits_topk", "teacher_kl_coef", "advantage_reweight"),
    )
    sdar_gate_beta: float = flag(5.0, "how sharply it tells these tokens from others", _SDAR, more_than=0)
    offload_teacher_model: bool = flag(
        False, "keep the teacher in host memory except while it computes (GPU only)", _LOCAL
    )

    @property
    def teaches_by(self) -> Literal["advantage", "reward", "loss", "rlsd", "sdar"] | None:
        """Where the teacher's word goes; None without a teacher."""
        if self.teacher_or_policy is None and not (self.teacher_adapters or self.teacher_model_server):
            return None
        if self.gkd_logits_topk is not None:
            return "loss"
        if self.sdar_loss_coef or self.advantage_reweight:
            return "sdar" if self.sdar_loss_coef else "rlsd"
        return "reward" if self.teacher_kl_in_reward else "advantage"

    @property
    def teacher_or_policy(self) -> str | None:
        """`--teacher_model`; by default of RLSD and SDAR the policy."""
        by_itself = (self.sdar_loss_coef or self.advantage_reweight) and not (
            self.teacher_adapters or self.teacher_model_server
        )
        return self.teacher_model or (POLICY if by_itself else None)

    @property
    def teacher_servers(self) -> dict[str, str]:
        """Address by tag, see `read_teachers`."""
        return read_teachers(self.teacher_model_server)

    def distillation_faults(self) -> Iterator[str]:
        """What a teacher needs of other flags."""
        how = self.teaches_by
        if how is None:
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
        if how in ("advantage", "rlsd") and self.loss_type == "real":
            yield "--loss_type real compares completions, and a teacher's advantages are of tokens: use another loss"
        if how in ("advantage", "rlsd"):
            masked = self.off_policy_sequence_mask_delta is not None
            for name, of_completions in (
                ("importance_sampling_level sequence", self.importance_sampling_level == "sequence"),
                ("off_policy_sequence_mask_delta", masked),
            ):
                if of_completions:
                    yield f"--{name} is of whole completions, and a teacher's advantages are of tokens: leave it out"
