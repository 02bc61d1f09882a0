"""The table of ms-swift's import names: for each of its modules, where each name lives here.

A value is `module of ours` that holds the name, or a stand-in that says at its use what is missing. v3 has
`swift.plugin` and `swift.llm`, v4 `swift.rewards`, `swift.dataset`, `swift.rollout`, `swift.template` and
`swift.infer_engine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_TEMPLATE = (
    "prompts are rendered by the tokenizer's own chat template; change that, or use --system, or build the prompt "
    "in the dataset's preprocessor"
)
_ENGINE = "a reward that asks a model calls one over HTTP (`swift rollout` speaks the OpenAI protocol)"
_REWARD_MODEL = "reward models are not done here; write a reward class and register it in orms"


@dataclass(frozen=True, slots=True)
class Missing:
    """A name whose meaning only ms-swift has. `instead` says what to do here."""

    instead: str


Entry = str | Missing


def _of(home: str, *names: str) -> dict[str, Entry]:
    return dict.fromkeys(names, home)


def _missing(instead: str, *names: str) -> dict[str, Entry]:
    return dict.fromkeys(names, Missing(instead))


_ORM = _of("swift_r1.rewards", "ORM", "AsyncORM", "orms")
_BUILTIN = _of("swift_r1.rewards.builtin", "Format", "ReActFormat", "CosineReward", "RepetitionPenalty", "SoftOverlong")
_PRM = _of("swift_r1.plugins.protocol", "PRM", "prms")
_RM = _of("swift_r1.plugins.protocol", "rm_plugins") | _missing(_REWARD_MODEL, "DefaultRMPlugin", "GenRMPlugin")
_RM_PACKAGE = _of("swift_r1.plugins.protocol", "rm_plugins")
_TURNS = _of("swift_r1.plugins.rollouts", "RolloutScheduler", "MultiTurnScheduler", "multi_turns")
_OWN_SCHEDULERS = _of("swift_r1.plugins.rollouts", "GYMScheduler") | _missing(
    "derive from MultiTurnScheduler instead", "MathTipsScheduler", "ThinkingModelTipsScheduler", "OpenEnvScheduler"
)
_ENV = _of("swift_r1.plugins.rollouts", "Env", "envs")
_CONTEXT = _of("swift_r1.plugins.rollouts", "ContextManager", "context_managers")
_DATASETS = _of(
    "swift_r1.data",
    *("AlpacaPreprocessor", "AutoPreprocessor", "DatasetMeta", "MessagesPreprocessor", "ResponsePreprocessor"),
    *("RowPreprocessor", "SubsetDataset", "load_dataset", "register_dataset"),
) | {"DATASET_MAPPING": "swift_r1.data.registry", "register_dataset_info": "swift_r1.data.registry"}
_REQUESTS = _of("swift_r1.plugins.protocol", "InferRequest", "RequestConfig")
_PROTOCOL = _REQUESTS | _of(
    "swift_r1.plugins.protocol",
    *("RolloutInferRequest", "RolloutOutput", "ChatCompletionResponse", "ChatCompletionResponseChoice", "ChatMessage"),
    *("ChatCompletionMessageToolCall", "Function", "UsageInfo", "Messages", "Tool"),
)
_TEMPLATES = _missing(
    _TEMPLATE,
    *("Template", "TemplateMeta", "TemplateInputs", "TemplateType", "TEMPLATE_MAPPING", "register_template"),
    *("get_template", "get_template_meta"),
) | _of("swift_r1.plugins.protocol", "Messages", "Tool")
_ENGINES_V3 = _missing(_ENGINE, "InferEngine", "PtEngine", "VllmEngine", "InferClient")
_ENGINES_V4 = _missing(
    _ENGINE, "InferEngine", "TransformersEngine", "VllmEngine", "GRPOVllmEngine", "SglangEngine", "InferClient"
)
_UTILS = _of("swift_r1.plugins.protocol", "get_logger", "remove_response", "to_device")

# Module of ms-swift -> name in it -> where it is here.
IMPORT_NAMES: Mapping[str, Mapping[str, Entry]] = {
    "swift": {},
    "swift.utils": _UTILS,
    # version 4
    "swift.rewards": _ORM | _PRM | _RM_PACKAGE,
    "swift.rewards.orm": _ORM | _BUILTIN,
    "swift.rewards.prm": _PRM,
    "swift.rewards.rm_plugin": _RM,
    "swift.dataset": _DATASETS,
    "swift.rollout": _TURNS | _ENV | _CONTEXT,
    "swift.rollout.multi_turn": _TURNS | _OWN_SCHEDULERS,
    "swift.rollout.gym_env": _ENV | _CONTEXT,
    "swift.template": _TEMPLATES,
    "swift.infer_engine": _REQUESTS
    | _ENGINES_V4
    | _of("swift_r1.plugins.protocol", "Function", "ChatCompletionResponse"),
    "swift.infer_engine.protocol": _PROTOCOL,
    # version 3
    "swift.plugin": _ORM | _PRM | _RM_PACKAGE | _TURNS | _ENV | _CONTEXT,
    "swift.plugin.orm": _ORM | _BUILTIN,
    "swift.plugin.prm": _PRM,
    "swift.plugin.rm_plugin": _RM,
    "swift.plugin.multi_turn": _TURNS | _OWN_SCHEDULERS,
    "swift.plugin.env": _ENV,
    "swift.plugin.context_manager": _CONTEXT,
    "swift.llm": _DATASETS | _REQUESTS | _TEMPLATES | _ENGINES_V3 | _of("swift_r1.plugins.protocol", "to_device"),
    "swift.llm.dataset": _DATASETS,
    "swift.llm.template": _TEMPLATES | _of("swift_r1.plugins.protocol", "InferRequest"),
    "swift.llm.infer": _REQUESTS | _ENGINES_V3,
    "swift.llm.infer.protocol": _PROTOCOL,
    "swift.llm.utils": _of("swift_r1.plugins.protocol", "to_device") | _of("swift_r1.plugins.protocol", "Messages"),
}
