"""An agent: what a mixture has beside the digits task."""

from swift_r1 import Agent, agents


class AsksTwice(Agent):
    """Asks the row's question, and then for more."""

    async def run(self, client, row):
        messages = list(row["messages"])
        for _ in range(2):
            answer = await client.chat.completions.create(model="any", messages=messages)
            said = answer.choices[0].message
            messages += [said, {"role": "user", "content": "more"}]
        text = said.content or ""
        return {"reward": sum(c.isdigit() for c in text) / max(1, len(text))}


agents["asks_twice"] = AsksTwice
