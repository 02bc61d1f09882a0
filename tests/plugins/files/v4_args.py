"""v4: a class that takes the run's arguments and looks at everything a call gets."""

from __future__ import annotations

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.infer_engine import RequestConfig, TransformersEngine
from swift.infer_engine.protocol import ChatCompletionResponse, ChatCompletionResponseChoice
from swift.rewards import ORM, AsyncORM, orms, rm_plugins
from swift.rewards.rm_plugin import DefaultRMPlugin, GenRMPlugin
from swift.template import Template, TemplateMeta, register_template
from swift.utils import get_logger, to_device


class Everything(ORM):
    """The share of a call's promises that were kept."""

    def __init__(self, args=None, **kwargs):
        super().__init__(args, **kwargs)
        self.temperature = args.temperature

    def __call__(
        self,
        completions,
        solution,
        messages,
        prompt_id,
        request_id,
        finish_reason,
        is_truncated,
        response_token_ids,
        trainer_state,
        dataset,
        **kwargs,
    ):
        columns = (
            solution,
            messages,
            prompt_id,
            request_id,
            finish_reason,
            is_truncated,
            response_token_ids,
            dataset,
        )
        kept = [len(column) == len(completions) for column in columns]
        kept.append(all(turns[-1]["content"] == text for turns, text in zip(messages, completions)))
        kept.append(trainer_state.global_step <= trainer_state.max_steps)
        return [self.temperature * sum(kept) / len(kept)] * len(completions)


class GenerativeJudge(DefaultRMPlugin):
    def __init__(self, model, template: Template):
        super().__init__(model, template)
        self.engine = TransformersEngine(self.model, template=self.template, max_batch_size=0)
        self.request_config = RequestConfig()


orms["v4_everything"] = Everything
rm_plugins["v4_judge"] = GenerativeJudge
