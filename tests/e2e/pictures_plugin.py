"""Pictures of several sizes, one or two to a question, some questions without; the reward is that of the digits."""

import io

import numpy
from PIL import Image
from swift.dataset import DatasetMeta, RowPreprocessor, register_dataset

SIZES = ((28, 28), (40, 16), (28, 48))


def picture(number):
    width, height = SIZES[number % 3]
    colours = numpy.random.default_rng(number).integers(0, 256, (height, width, 3), dtype="uint8")
    file = io.BytesIO()
    Image.fromarray(colours).save(file, "PNG")
    return {"bytes": file.getvalue()}


class Preprocess(RowPreprocessor):
    def preprocess(self, row):
        number = row["number"]
        pictures = [picture(2 * number + one) for one in range(number % 4 and number % 2 + 1)]
        question = {"role": "user", "content": f"what is in {number}"}
        return {"messages": [question]} | ({"images": pictures} if pictures else {})


def load(split, **kwargs):
    first = {"train": 0, "eval": 500}[split]
    return [{"number": number} for number in range(first, first + 40)]


register_dataset(DatasetMeta(dataset_name="pictures", preprocess_func=Preprocess(), loader=load))
