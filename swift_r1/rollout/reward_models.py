"""Reward models (`--reward_model`): loaded once, by the first process and on its device, and called as reward functions
are, in that process."""

from __future__ import annotations

import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swift_r1.errors import UsageError, describe
from swift_r1.record.spans import Spans
from swift_r1.rewards.batch import RewardAnswer, RewardCall, RewardCaller, Submitted
from swift_r1.rewards.orm import orms
from swift_r1.rewards.pool import InlineRewards, rewards_for
from swift_r1.rollout.rm_plugins import RewardTemplate, TransformersEngine, known_plugins

if TYPE_CHECKING:
    import torch

    from swift_r1.flags.reward import RewardModel
    from swift_r1.flags.run import RunFlags

_logger = logging.getLogger("swift_r1.rewards")


class ModelReward:
    """A reward function that is a model behind a plugin of `rm_plugins`.

    Args:
        about: what the flags say of it.
        dtype: of its weights; None: as its config says.
        device: where it computes.
        leaves: it is in host memory between batches.

    Raises UsageError: it cannot be loaded, or the plugin cannot be built.
    """

    # `rewards.worker` asks for it, and calls `rest` of those that have it
    takes_groups_together = True

    def __init__(
        self, about: RewardModel, dtype: str | None, device: torch.device, leaves: bool
    ) -> None:
        from swift_r1.models.loading import load_judging_model, load_tokenizer

        self._device = device
        self._leaves = leaves
        self.model: Any = load_judging_model(about.path, dtype, about.adapters)
        tokenizer = load_tokenizer(about.path, "--reward_model")
        ids = (
            getattr(self.model.config, "pad_token_id", None),
            tokenizer.pad_token_id,
            tokenizer.eos_token_id,
            0,
        )
        pad = next(one for one in ids if one is not None)
        # A classification head finds the end of a padded row by it.
        self.model.config.pad_token_id = pad
        if about.template is None and not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                f"--reward_model {about.path}: its tokenizer has no chat template: give --reward_template"
            )
        template = RewardTemplate(tokenizer, pad, about.template)
        made_by = known_plugins()[about.plugin]
        _ask_here(made_by)
        try:
            self.plugin = made_by(model=self.model, template=template)
        except (Exception, SystemExit) as error:
            cause = describe(error)
            raise UsageError(
                f"--reward_model_plugin {about.plugin} cannot be constructed: {cause}"
            ) from error
        kind = f"{type(self.model).__name__} of {sum(one.numel() for one in self.model.parameters()):,} weights"
        _logger.info("reward model %s: a %s through %s", about.name, kind, about.plugin)

    def __call__(self, completions: list[str], **columns: Any) -> Any:
        self.model.to(self._device)
        lists = {name: values for name, values in columns.items() if isinstance(values, list)}
        inputs = [
            {name: values[i] for name, values in lists.items()} for i in range(len(completions))
        ]
        return self.plugin(inputs=inputs, **columns)

    def rest(self) -> None:
        """A batch is scored."""
        if self._leaves and self._device.type != "cpu":
            self.model.to("cpu")


def _ask_here(plugin: Any) -> None:
    """Beside an installed ms-swift the modules of a plugin's classes have its engine, which takes only its own
    templates: they get ours."""
    for cls in inspect.getmro(plugin) if inspect.isclass(plugin) else ():
        names = vars(sys.modules[cls.__module__])
        names.update(
            (name, TransformersEngine)
            for name in ("TransformersEngine", "PtEngine")
            if name in names
        )


class FunctionsAndModels(RewardCaller):
    """Some rewards through one caller, others through another."""

    def __init__(self, functions: RewardCaller, models: RewardCaller) -> None:
        self.names = (*functions.names, *models.names)
        self._functions = functions
        self._models = models
        self.timeout = functions.timeout
        self.calls_at_once = functions.calls_at_once
        self.at_the_end = frozenset(models.names)

    def start(self) -> None:
        self._functions.start()
        try:
            self._models.start()
        except BaseException:
            self._functions.close()
            raise

    def close(self) -> None:
        self._functions.close()
        self._models.close()

    def wait_ready(self) -> None:
        self._functions.wait_ready()
        self._models.wait_ready()

    def submit(self, calls: Sequence[RewardCall], state: Mapping[str, int]) -> list[Submitted]:
        return self._functions.submit(calls, state)

    def run(
        self,
        calls: Sequence[RewardCall],
        state: Mapping[str, int],
        deadline: float,
        submitted: Sequence[Submitted] = (),
    ) -> Iterator[RewardAnswer]:
        """The functions' workers are busy while the models compute here; `deadline` is without the models' time."""
        own = [call for call in calls if call.name in self.at_the_end]
        others = [call for call in calls if call.name not in self.at_the_end]
        begun = self._functions.submit(others, state)
        started = time.monotonic()
        yield from self._models.run(own, state, deadline)
        deadline += time.monotonic() - started
        yield from self._functions.run(others[len(begun) :], state, deadline, [*submitted, *begun])


def rewards_and_models(
    args: RunFlags,
    names: Sequence[str],
    load: Callable[[], object],
    spans: Spans | None,
    device: torch.device,
) -> RewardCaller:
    """`rewards_for`, with the models of `--reward_model` among the `names`."""
    if not args.reward_models:
        return rewards_for(args, names, load, spans)

    def load_models() -> None:
        load()
        for one in args.reward_models:
            orms[one.name] = ModelReward(one, args.torch_dtype, device, args.offload_model)

    models = [one.name for one in args.reward_models]
    functions = [name for name in names if name not in models]
    if args.reward_isolation == "inline" or not functions:
        return InlineRewards(args, names, load_models, spans)
    return FunctionsAndModels(
        rewards_for(args, functions, load, spans), InlineRewards(args, models, load_models, spans)
    )
