"""What a rollout server was told of several turns becomes flags of the trainer."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from swift_r1.errors import UsageError
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.launch.servers import with_turn_flags
from swift_r1.wire.protocol import TurnFlags

WORDS = shlex.split(
    "--rlhf_type grpo --model m --dataset d --reward_funcs a --use_vllm true --vllm_server_host h"
)
HERE, THERE = "http://127.0.0.1:8000", "http://10.0.0.1:8000"


def trainer_of(turns: TurnFlags, *words: str, url: str = HERE) -> tuple[RlhfArguments, str]:
    args = parse_arguments(RlhfArguments, [*WORDS, *words], {})
    return with_turn_flags([*WORDS, *words], args, turns, url)


def test_the_trainer_takes_what_it_does_not_name(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.touch()
    turns = TurnFlags(multi_turn_scheduler="tips", max_turns=3, external_plugins=(str(plugin),))
    args, news = trainer_of(turns)
    assert (args.multi_turn_scheduler, args.max_turns, args.external_plugins) == (
        "tips",
        3,
        [str(plugin)],
    )
    assert news == f"--multi_turn_scheduler tips --max_turns 3 --external_plugins {plugin}"
    assert trainer_of(TurnFlags())[1] == ""
    with pytest.raises(
        UsageError, match="--max_turns 2 here and --max_turns 3 at the rollout server"
    ):
        trainer_of(turns, "--max_turns", "2", "--multi_turn_scheduler", "tips")


def test_arguments_of_the_template() -> None:
    turns = TurnFlags(enable_thinking=False, chat_template_kwargs={"effort": "low"})
    args, news = trainer_of(turns)
    assert (args.enable_thinking, args.chat_template_kwargs) == (False, {"effort": "low"})
    assert news == '--enable_thinking false --chat_template_kwargs {"effort": "low"}'
    with pytest.raises(
        UsageError,
        match=r'--chat_template_kwargs {"effort": 2} here and --chat_template_kwargs {"eff',
    ):
        trainer_of(turns, "--chat_template_kwargs", '{"effort": 2}')


def test_a_server_on_another_machine_does_not_say_which_code_runs_here(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.touch()
    turns = TurnFlags(multi_turn_scheduler="tips", external_plugins=(str(plugin),))
    with pytest.raises(
        UsageError,
        match="is not a file of this machine's: give --external_plugins to the trainer too",
    ):
        trainer_of(turns, url=THERE)
    args, _ = trainer_of(turns, "--external_plugins", "own.py", url=THERE)
    assert args.external_plugins == ["own.py"] and args.multi_turn_scheduler == "tips"
