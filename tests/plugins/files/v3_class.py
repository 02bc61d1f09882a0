"""v3: imports everything, uses two names; a reward class without arguments."""

import re
from typing import List

from swift.llm import (
    AlpacaPreprocessor,
    AutoPreprocessor,
    DatasetMeta,
    InferRequest,
    MessagesPreprocessor,
    RequestConfig,
    ResponsePreprocessor,
    RowPreprocessor,
    SubsetDataset,
    Template,
    load_dataset,
    register_dataset,
    to_device,
)
from swift.plugin import ORM, PRM, AsyncORM, orms, prms, rm_plugins
from swift.plugin.rm_plugin import DefaultRMPlugin
from swift.utils import get_logger

logger = get_logger()


class BoxedNumber(ORM):
    """1 where the last boxed number is the solution."""

    def __init__(self):
        self.pattern = re.compile(r"\\boxed\{(\d+)\}")

    def __call__(self, completions: List[str], solution: List[str], **kwargs) -> List[float]:
        found = [self.pattern.findall(text)[-1:] for text in completions]
        return [float(one == [str(wanted)]) for one, wanted in zip(found, solution)]


class Judge(DefaultRMPlugin):
    def __init__(self, model, template: Template):
        super().__init__(model, template)


class Steps(PRM):
    def __call__(self, infer_requests, ground_truths, **kwargs):
        return [0.0 for _ in infer_requests]


orms["v3_boxed"] = BoxedNumber
rm_plugins["v3_judge"] = Judge
prms["v3_steps"] = Steps
logger.info("registered")
