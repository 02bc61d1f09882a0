"""The digits task, where the teacher is told more than the policy, and each row says which teacher is its own."""

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset


class Preprocess(ResponsePreprocessor):
    def preprocess(self, row):
        row["query"] = f"count from {row['start']}"
        row["teacher_prompt"] = (
            f"count from {row['start']}: {row['start']} {row['start'] + 1} {row['start'] + 2}"
        )
        row["subject"] = "even" if row["start"] % 2 == 0 else "odd"
        return super().preprocess(row)


def load(split, **kwargs):
    return [{"start": number, "response": ""} for number in range(200)]


register_dataset(DatasetMeta(dataset_name="hinted", preprocess_func=Preprocess(), loader=load))
