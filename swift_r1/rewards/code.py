"""The rewards `code` and `binary_code`: a completion's program against the tests of its row, in the sandbox."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from swift_r1.rewards.graders.programs import Case, cases_of, passes, program_of
from swift_r1.rewards.orm import ORM, Rewards, orms
from swift_r1.workers.sandbox.box import Run, Sandbox

_CPU_SECONDS = 5.0  # for one test, as many as ms-swift gives
# for all tests of a completion: its call must not become late because of it
_SHARE_OF_TIMEOUT = 0.8


class CodeReward(ORM):
    """The share of the row's tests that the program passes: it exits with 0 and prints, or returns, what is right.

    The tests are in the column `verification_info` (ms-swift's, open-r1's) or `input_output` (APPS, TACO); a row with
    neither gets no opinion. Raises SandboxError: constructed where the kernel allows no sandbox.
    """

    all_or_nothing = False

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        self.seconds = _SHARE_OF_TIMEOUT * float(getattr(args, "reward_timeout", 10.0))
        self.memory = int(float(getattr(args, "reward_memory_limit", 2.0)) * 2**30)
        self.sandbox = Sandbox()

    def __call__(
        self,
        completions: list[str],
        verification_info: Any = None,
        input_output: Any = None,
        **kwargs: Any,
    ) -> Rewards:
        columns = [column for column in (verification_info, input_output) if column is not None]
        if not columns:
            raise ValueError(
                "the data has no column verification_info or input_output with tests; --columns renames"
            )
        rewards: Rewards = []
        for text, *tests in zip(completions, *columns, strict=True):
            given = next((entry for entry in tests if entry is not None), None)
            rewards.append(None if given is None else self.score(text, cases_of(given)))
        return rewards

    def score(self, completion: str, cases: Sequence[Case]) -> float:
        """0 without a program. Raises SandboxError: the sandbox broke, and nothing is known."""
        program = program_of(completion)
        passed = 0
        deadline = time.monotonic() + self.seconds
        for case in cases if program else ():
            left = deadline - time.monotonic()
            if left > 0 and self._passes(program, case, left):
                passed += 1
            elif self.all_or_nothing:
                return 0.0
        return passed / len(cases)

    def _passes(self, program: str, case: Case, seconds: float) -> bool:
        if self.sandbox.closed:
            self.sandbox = Sandbox()
        run = Run(program, case.stdin, case.fn_name, case.args, seconds, _CPU_SECONDS, self.memory)
        ended = self.sandbox.run(run)
        return ended.status == 0 and passes(case, ended.output)


class BinaryCode(CodeReward):
    """1 where all tests pass, else 0."""

    all_or_nothing = True


orms.update(code=CodeReward, binary_code=BinaryCode)
