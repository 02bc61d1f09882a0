"""A reward that is 1 where a completion begins as the model's turn does, in the text and in the messages."""

from swift.rewards import ORM, orms


class Begins(ORM):
    def __call__(self, completions, messages, **kwargs):
        return [
            float(text.startswith("<think>") and talk[-1] == {"role": "assistant", "content": text})
            for text, talk in zip(completions, messages, strict=True)
        ]


orms["begins"] = Begins
