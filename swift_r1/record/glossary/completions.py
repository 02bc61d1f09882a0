"""Metrics of what was asked and written: completions, turns, tools, agents."""

from swift_r1.record.glossary.metric import Metric as M

COMPLETIONS = (
    M(
        "completions/mean_length",
        "mean completion length over all turns",
        "tokens",
        "may rise with the reward; twice as long without more reward is padding",
    ),
    M(
        "completions/max_length",
        "longest completion since the previous line",
        "tokens",
        "below the limit",
    ),
    M(
        "completions/clipped_ratio",
        "completions that reached `--max_completion_length`",
        "share",
        "below 0.3 and not rising; near 1 from the start: the prompt's template is wrong",
    ),
    M(
        "completions/repetition",
        "8-token n-grams of the policy's own tokens that repeat within their completion",
        "share",
        "below 0.2; above 0.5 completions loop",
    ),
    M(
        "completions/foreign_letters",
        "letters of scripts that do not occur in the prompt",
        "share",
        "near 0; 0.2 and rising: the language drifts",
    ),
    M(
        "completions/repeated",
        "completions that equal an earlier one of their prompt",
        "share",
        "below 0.5: equal completions teach nothing about each other",
    ),
    M(
        "prompts/repeated",
        "prompts that occur more than once in the round",
        "share",
        "0, except with more prompts per round than rows",
    ),
)

TURNS = (
    M(
        "multi_turn/mean_turns",
        "mean number of turns per conversation",
        "turns",
        "",
        "several turns",
    ),
    M(
        "multi_turn/max_turns",
        "turns of the longest conversation",
        "turns",
        "below `--max_turns`",
        "several turns",
    ),
    M(
        "multi_turn/trained_tokens",
        "trained tokens of a conversation, of those after its prompt",
        "share",
        "",
        "several turns",
    ),
    M(
        "limits/<limit>",
        "episodes that ran into a limit: `calls` (`--max_turns`), `tokens` (`--max_completion_length` in all), "
        "`seconds` (`--max_episode_seconds`), `cost` (`--max_episode_cost`) or `length` (the model's)",
        "episodes",
        "few; else a higher limit, or the policy wanders",
        "several turns",
    ),
    M(
        "multi_turn/mean_cost",
        "mean cost of an episode's calls of tools",
        "as `--tool_prices`",
        "",
        "tools with prices",
    ),
    M("tools/<tool>/calls", "calls of a tool", "calls", "", "tools"),
    M("tools/<tool>/errors", "calls that gave an error", "calls", "falls", "tools"),
    M(
        "tools/<tool>/timeouts",
        "calls that ran out of time",
        "calls",
        "0; else `--tool_timeout`",
        "tools",
    ),
    M(
        "tools/<tool>/cut",
        "truncated answers",
        "calls",
        "0; else `--max_tool_response_length`",
        "tools",
    ),
    M("tools/<tool>/seconds", "total time in the tool", "s", "", "tools"),
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
    M(
        "agent/failed",
        "episodes without a valid reward",
        "episodes",
        "0",
        "an agent or environment",
    ),
    M("agent/exception", "episodes whose class raised", "episodes", "0", "an agent or environment"),
    M(
        "agent/exit",
        "episodes whose program ended with another code than 0",
        "episodes",
        "0",
        "an agent or environment",
    ),
    M(
        "agent/timeout",
        "episodes that reached `--agent_timeout`",
        "episodes",
        "0",
        "an agent or environment",
    ),
    M(
        "agent/died",
        "episodes whose process was killed",
        "episodes",
        "0",
        "an agent or environment",
    ),
    M(
        "agent/memory",
        "episodes that needed too much memory",
        "episodes",
        "0",
        "an agent or environment",
    ),
    M(
        "agent/silent",
        "episodes in which no call of the model was answered",
        "episodes",
        "0; else the agent does not use the address that it was given",
        "an agent or environment",
    ),
    M(
        "agent/result",
        "episodes whose result could not be used",
        "episodes",
        "0",
        "an agent or environment",
    ),
    M(
        "agent/limited",
        "episodes that ran into a limit; `limits/<limit>` has which",
        "episodes",
        "few",
        "an agent or environment",
    ),
    M(
        "agent/sequences",
        "mean number of sequences per episode",
        "",
        "1 where each call extends the one before; more: the agent edits or forgets its history",
        "an agent or environment",
    ),
    M(
        "agent/seconds",
        "mean time of an episode outside the model",
        "s",
        "",
        "an agent or environment",
    ),
    M(
        "agent/overruled",
        "calls whose sampling parameters the run's overruled",
        "calls",
        "0 where the agent leaves sampling alone",
        "an agent or environment",
    ),
    M(
        "agent/constrained",
        "calls with a constrained answer; they are not trained on",
        "calls",
        "0",
        "an agent or environment",
    ),
    M(
        "agent/calls/<kind>",
        "calls that extend no earlier one: `new`, `branch`, `edited`, `compacted`, `system`, `tools` or `template`",
        "calls",
        "one `new` per episode",
        "there were any",
    ),
    M(
        "agent/returned/<name>",
        "mean of a number that agents return beside the reward",
        "",
        "",
        "the agent returns it",
    ),
)
