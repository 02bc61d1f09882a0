"""Prices that the model asks for: an agent, which talks with the model in turns, and a reward for its last answer."""

import re

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms

from swift_r1 import Agent, agents

PROMPT = """{question}
You do not know the prices yet. Write `PRICE: ` and the name of one thing, and you are told its price.
When you know them all, write `TOTAL: ` and the number."""
PRICES = {"lamp": 35, "chair": 48, "table": 120, "rug": 64, "mirror": 27, "shelf": 75}
MOST_TURNS = 6


class Orders(ResponsePreprocessor):
    def preprocess(self, row):
        """From a line of data.jsonl to what the model is asked; other columns go to the agent and the rewards."""
        row["query"] = PROMPT.format(question=row.pop("query"))
        return super().preprocess(row)


class Buyer(Agent):
    """Each completion is a conversation that this leads; what the model says in it is trained."""

    async def run(self, client, row):
        """`client` is OpenAI's, for this conversation alone. Returns the share of the prices that were asked for."""
        messages, asked = list(row["messages"]), set()
        for _ in range(MOST_TURNS):
            answer = await client.chat.completions.create(model="any", messages=messages)
            said = answer.choices[0].message
            found = re.search(r"PRICE: *(\w+)", said.content or "")
            if found is None:
                break
            thing = found[1].lower()
            asked.add(thing)
            price = (
                f"A {thing} costs {PRICES[thing]} euros."
                if thing in PRICES
                else f"There is no {thing} here."
            )
            messages += [said, {"role": "user", "content": price}]
        return len(asked & set(row["things"])) / len(row["things"])


class RightTotal(ORM):
    """1 if the last answer has the right total, else 0."""

    def __call__(self, completions, solution, **kwargs):
        totals = [re.findall(r"TOTAL: *(\d+)", text)[-1:] for text in completions]
        return [float(found == [wanted]) for found, wanted in zip(totals, solution)]


def gold(row):
    """A right completion: `swift check` sees by it whether rewards tell right from wrong."""
    return f"TOTAL: {row['solution']}"


register_dataset(
    DatasetMeta(dataset_name="orders", dataset_path="data.jsonl", preprocess_func=Orders())
)
agents["buyer"] = Buyer
orms["right_total"] = RightTotal
