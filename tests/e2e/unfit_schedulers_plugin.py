"""Schedulers that only ms-swift can run."""

from swift.rollout.multi_turn import MultiTurnScheduler, OpenEnvScheduler, multi_turns


class Board(OpenEnvScheduler):
    async def on_trajectory_start(self, requests):
        self._envs = {}


class Tree(MultiTurnScheduler):
    async def async_infer(self, infer_requests, request_config, **kwargs):
        return await super().async_infer(infer_requests, request_config)


multi_turns.update(board=Board, tree=Tree)
