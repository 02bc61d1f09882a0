"""Metrics of what was asked and written: completions, turns, tools, agents."""

from swift_r1.record.glossary.metric import Metric as M

COMPLETIONS = (
    M(
        "completions/mean_length",
        "length of a completion, all turns together, mean",
        "tokens",
        "may rise with the reward; twice as long without more reward is padding",
    ),
    M("completions/max_length", "the longest completion since the last line", "tokens", "below the limit"),
    M(
        "completions/clipped_ratio",
        "completions that reached `--max_completion_length`",
        "share",
        "below 0.3 and not rising; near 1 from the start: the prompt's template is wrong",
    ),
    M(
        "completions/repetition",
        "8-token n-grams that were in their completion before",
        "share",
        "below 0.2; above 0.5 completions loop",
    ),
    M(
        "completions/foreign_letters",
        "letters of scripts that the prompt does not use",
        "share",
        "near 0; 0.2 and rising: the language drifts",
    ),
    M(
        "prompts/repeated",
        "prompts that came before in the same round",
        "share",
        "0, except with more prompts per round than rows",
    ),
)

TURNS = (
    M("multi_turn/mean_turns", "turns of a conversation, mean", "turns", "", "several turns"),
    M("multi_turn/max_turns", "turns of the longest", "turns", "below `--max_turns`", "several turns"),
    M(
        "multi_turn/trained_tokens",
        "tokens of a conversation after its prompt that are trained",
        "share",
        "",
        "several turns",
    ),
    M("tools/<tool>/calls", "calls of a tool", "calls", "", "tools"),
    M("tools/<tool>/errors", "those that gave an error", "calls", "falls", "tools"),
    M("tools/<tool>/timeouts", "those that ran out of time", "calls", "0; else `--tool_timeout`", "tools"),
    M("tools/<tool>/cut", "answers that were cut", "calls", "0; else `--max_tool_response_length`", "tools"),
    M("tools/<tool>/seconds", "time in the tool, all calls together", "s", "", "tools"),
    M("tools/unknown_calls", "calls with names of no known tool", "calls", "falls to 0", "tools"),
    M(
        "tools/unread_calls",
        "turns with a call that could not be read",
        "turns",
        "falls to 0; if it stays, another `--tool_call_parser`",
        "tools",
    ),
)

AGENTS = (
    M("agent/failed", "episodes without a valid reward", "episodes", "0", "an agent or environment"),
    M("agent/exception", "episodes whose class raised", "episodes", "0", "an agent or environment"),
    M(
        "agent/exit",
        "episodes whose program ended with another code than 0",
        "episodes",
        "0",
        "an agent or environment",
    ),
    M("agent/timeout", "episodes that reached `--agent_timeout`", "episodes", "0", "an agent or environment"),
    M("agent/died", "episodes whose process was killed", "episodes", "0", "an agent or environment"),
    M("agent/memory", "episodes that needed too much memory", "episodes", "0", "an agent or environment"),
    M(
        "agent/silent",
        "episodes in which no call of the model was answered",
        "episodes",
        "0; else the agent does not use the address that it was given",
        "an agent or environment",
    ),
    M("agent/result", "episodes whose result could not be used", "episodes", "0", "an agent or environment"),
    M(
        "agent/limited",
        "episodes that were cut off at a limit of tokens or turns; their reward is 0",
        "episodes",
        "few",
        "an agent or environment",
    ),
    M(
        "agent/sequences",
        "sequences of an episode, mean",
        "",
        "1 where each call extends the one before; more: the agent edits or forgets its history",
        "an agent or environment",
    ),
    M(
        "agent/seconds",
        "an episode's own time, without the model's, mean",
        "s",
        "",
        "an agent or environment",
    ),
    M(
        "agent/overruled",
        "calls that asked for other sampling than the run's, and did not get it",
        "calls",
        "0 where the agent leaves sampling alone",
        "an agent or environment",
    ),
    M(
        "agent/constrained",
        "calls whose answer was forced into a form; they are not trained",
        "calls",
        "0",
        "an agent or environment",
    ),
    M(
        "agent/calls/<kind>",
        "calls that extend no earlier one: `new`, `branch`, `edited`, `compacted`, `system`, `tools` or `template`",
        "calls",
        "one `new` an episode",
        "there were any",
    ),
    M(
        "agent/returned/<name>",
        "a number that agents returned beside the reward, mean",
        "",
        "",
        "the agent returns it",
    ),
)
