"""An environment for verifiers: text to reverse, in one turn or in several, with or without tools."""

import verifiers as vf
from datasets import Dataset

WORDS = ["stone", "river", "cloud"]


def turned(text: str) -> str:
    """Turns a text round.

    Args:
        text: the text
    """
    return text[::-1]


class Twice(vf.MultiTurnEnv):
    """Asks again until the answer is right."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "No. Again."}]

    @vf.stop
    async def right(self, state) -> bool:
        said = state["trajectory"][-1]["completion"][-1]["content"] if state["trajectory"] else ""
        return state["answer"] in (said or "")


def load_environment(
    how: str = "single", count: int = 3, reward: str = "exact", held_out: int = 1
) -> vf.Environment:
    rows = [
        {"question": f"Reverse {word}.", "answer": word[::-1], "info": {"at": n}}
        for n, word in enumerate(WORDS)
    ]
    parser = vf.XMLParser(["think", "answer"])

    def exact(completion, answer, **kwargs) -> float:
        return float(parser.parse_answer(completion) == answer)

    def length(completion, info, **kwargs) -> float:
        return float(len(completion)) + info["at"]

    def broken(completion, **kwargs) -> float:
        raise KeyError("no such column")

    def best(completions, **kwargs) -> list[float]:
        return [0.0] * len(completions)

    functions = {"exact": exact, "broken": broken, "best": best}
    rubric = vf.Rubric(funcs=[functions[reward], length], weights=[1.0, 0.25], parser=parser)
    own = {
        "dataset": Dataset.from_list(rows[:count]),
        "eval_dataset": Dataset.from_list(rows[-held_out:]) if held_out else None,
        "system_prompt": "You reverse.",
        "parser": parser,
        "rubric": rubric,
    }
    if how == "tools":
        return vf.ToolEnv(tools=[turned], max_turns=4, **own)
    return Twice(max_turns=3, **own) if how == "several" else vf.SingleTurnEnv(**own)
