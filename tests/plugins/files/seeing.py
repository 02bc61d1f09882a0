"""A dataset of pictures and two rewards: one compares answers in tags, one looks at the picture, in ms-swift's form."""

import io
import re
from typing import Any, Dict, List

from PIL import Image
from swift.dataset import DatasetMeta, ResponsePreprocessor, SubsetDataset, register_dataset
from swift.rewards import ORM, orms


class Counting(ResponsePreprocessor):
    def preprocess(self, row: Dict[str, Any]) -> Dict[str, Any]:
        assert row["images"], "a column image is images here"
        row.update({"query": f"{row.get('query', '')} Answer in <answer> </answer>."})
        return super().preprocess(row)


def load():
    for number, colour in enumerate(("red", "blue")):
        file = io.BytesIO()
        Image.new("RGB", (10 + number, 10), colour).save(file, "PNG")
        yield {
            "image": {"bytes": file.getvalue(), "path": None},
            "problem": "How many?",
            "solution": f"<answer> {number} </answer>",
        }


register_dataset(
    DatasetMeta(
        ms_dataset_id="nobody/counting",
        dataset_name="counting",
        subsets=[SubsetDataset(name="default", subset="default", split=["train"])],
        preprocess_func=Counting(),
        loader=load,
        tags=["qa", "vision"],
    )
)


def answer(text: str) -> str:
    found = re.search(r"<answer>(.*?)</answer>", text)
    return (found.group(1) if found else text).strip()


class Accuracy(ORM):
    def __call__(self, completions, solution, **kwargs) -> List[float]:
        return [float(answer(text) == answer(right)) for text, right in zip(completions, solution)]


class Width(ORM):
    def __call__(self, completions, images, **kwargs) -> List[float]:
        values = []
        for text, (image,) in zip(completions, images):
            given = io.BytesIO(image["bytes"]) if image["bytes"] else image["path"]
            values.append(float(text == str(Image.open(given).width)))
        return values


orms["counted"] = Accuracy
orms["measured"] = Width
