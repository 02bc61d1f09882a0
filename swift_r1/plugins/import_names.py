"""The table of ms-swift's import names: for each of its modules, where each name lives here.

A value is `module of ours` that holds the name, or a stand-in that says at its use what is missing. v3 has
`swift.plugin` and `swift.llm`, v4 `swift.rewards`, `swift.dataset`, `swift.rollout`, `swift.template` and
`swift.infer_engine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Missing:
    """A name whose meaning only ms-swift has. `instead` says what to do here."""

    instead: str


Entry = str | Missing

_ORM = "ORM AsyncORM orms "
_BUILTIN = "MathAccuracy Format ReActFormat CosineReward RepetitionPenalty SoftOverlong "
_PRM = "PRM prms "
_RM = "rm_plugins DefaultRMPlugin GenRMPlugin "
_TURNS = "RolloutScheduler MultiTurnScheduler multi_turns "
_SCHEDULERS = "GYMScheduler MathTipsScheduler ThinkingModelTipsScheduler OpenEnvScheduler "
_ENV = "Env envs "
_CONTEXT = "ContextManager context_managers "
_DATASETS = (
    "AlpacaPreprocessor AutoPreprocessor DatasetMeta MessagesPreprocessor ResponsePreprocessor RowPreprocessor "
    "SubsetDataset load_dataset register_dataset DATASET_MAPPING register_dataset_info "
)
_REQUESTS = "InferRequest RequestConfig "
_PROTOCOL = _REQUESTS + (
    "RolloutInferRequest RolloutOutput ChatCompletionResponse ChatCompletionResponseChoice ChatMessage "
    "ChatCompletionMessageToolCall Function UsageInfo Messages Tool "
)
_TEMPLATE = (
    "Template TemplateMeta TemplateInputs TemplateType TEMPLATE_MAPPING register_template get_template "
    "get_template_meta "
)
_NO_ENGINES = "InferEngine VllmEngine GRPOVllmEngine SglangEngine InferClient "
_ENGINES_V3 = "InferEngine PtEngine VllmEngine SglangEngine InferClient "
_ENGINES_V4 = _NO_ENGINES + "TransformersEngine "

_HOMES = {
    "swift_r1.rewards": _ORM,
    "swift_r1.rewards.builtin": _BUILTIN,
    "swift_r1.data": _DATASETS,
    "swift_r1.data.registry": "DATASET_MAPPING register_dataset_info",
    "swift_r1.plugins.protocol": _PRM
    + _PROTOCOL
    + "rm_plugins get_logger remove_response to_device",
    "swift_r1.plugins.rollouts": _TURNS + _ENV + _CONTEXT + "GYMScheduler",
    "swift_r1.plugins.schedulers": "MathTipsScheduler ThinkingModelTipsScheduler",
    "swift_r1.rollout.rm_plugins": "DefaultRMPlugin GenRMPlugin TransformersEngine PtEngine",
}
_INSTEAD = {
    "prompts are rendered by the tokenizer's own chat template; change that, or use --system, or build the prompt "
    "in the dataset's preprocessor": _TEMPLATE,
    "a reward that asks a model calls one over HTTP (`swift rollout` speaks the OpenAI protocol)": _NO_ENGINES,
    "write an Env that calls OpenEnv's client, and give --use_gym_env true": "OpenEnvScheduler",
}
_ENTRIES: dict[str, Entry] = {
    name: home for home, names in _HOMES.items() for name in names.split()
}
_ENTRIES |= {
    name: Missing(instead) for instead, names in _INSTEAD.items() for name in names.split()
}

_MODULES = {
    "swift": "get_logger load_dataset get_template " + _REQUESTS + _ENGINES_V4,
    "swift.utils": "get_logger remove_response to_device",
    # version 4
    # The schedulers are not there in ms-swift, but its treepo plugin imports them from it.
    "swift.rewards": _ORM + _PRM + _TURNS + "rm_plugins",
    "swift.rewards.orm": _ORM + _BUILTIN,
    "swift.rewards.prm": _PRM,
    "swift.rewards.rm_plugin": _RM,
    "swift.dataset": _DATASETS,
    "swift.rollout": _TURNS + _ENV + _CONTEXT,
    "swift.rollout.multi_turn": _TURNS + _SCHEDULERS,
    "swift.rollout.gym_env": _ENV + _CONTEXT,
    "swift.template": _TEMPLATE + "Messages Tool",
    "swift.infer_engine": _REQUESTS + _ENGINES_V4 + "Function ChatCompletionResponse",
    "swift.infer_engine.protocol": _PROTOCOL,
    # version 3
    "swift.plugin": _ORM + _PRM + _TURNS + _ENV + _CONTEXT + "rm_plugins",
    "swift.plugin.orm": _ORM + _BUILTIN,
    "swift.plugin.prm": _PRM,
    "swift.plugin.rm_plugin": _RM,
    "swift.plugin.multi_turn": _TURNS + _SCHEDULERS,
    "swift.plugin.env": _ENV,
    "swift.plugin.context_manager": _CONTEXT,
    "swift.llm": _DATASETS
    + _REQUESTS
    + _TEMPLATE
    + _ENGINES_V3
    + "RolloutInferRequest Messages Tool to_device",
    "swift.llm.dataset": _DATASETS,
    "swift.llm.template": _TEMPLATE + "Messages Tool InferRequest RolloutInferRequest",
    "swift.llm.infer": _REQUESTS + _ENGINES_V3 + "Function",
    "swift.llm.infer.protocol": _PROTOCOL,
    "swift.llm.utils": "Messages Tool get_logger to_device",
}
IMPORT_NAMES: Mapping[str, Mapping[str, Entry]] = {
    module: {name: _ENTRIES[name] for name in names.split()} for module, names in _MODULES.items()
}
"""Module of ms-swift -> name in it -> where it is here."""
