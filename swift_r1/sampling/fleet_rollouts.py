"""Completions from several `swift rollout` servers, or one that is sent changes only: see `sampling/pool/pool.py`.

The fleet brings lost servers back by itself, from the weights that it keeps, so that nothing here is restored together
with the other ranks: those are only told how each attempt of the main rank ended.
"""

from __future__ import annotations

import logging

import torch

from swift_r1.models.weights import adapter_weights, policy_weights
from swift_r1.sampling.pool.pool import Fleet
from swift_r1.sampling.pool.session import ServerLink
from swift_r1.sampling.remote import ServerRollouts

logger = logging.getLogger("swift_r1.sampling.base")


class FleetRollouts(ServerRollouts):
    """The `Rollouts` of a fleet; `link` is a `Fleet` on the main rank."""

    def _push(self) -> int:
        self.served.pushing(self.weight_version)
        model = self.backend.model
        weights = policy_weights(model) if self._adapter is None else adapter_weights(model)
        buckets = self.backend.weight_buckets(weights)

        def send(fleet: ServerLink | Fleet) -> None:
            assert isinstance(fleet, Fleet)
            fleet.push(self.weight_version, buckets, self._adapter)

        if self.link is None:
            for _bucket in buckets:
                pass
        code = self._attempt(send)
        back = [torch.tensor([int(self.link.take_returned())])] if isinstance(self.link, Fleet) else None
        if self.ranks.broadcast(back)[0].item():
            # A server that came back is a new engine: this update of it is checked as the first one was.
            self._updates = 0
        return code

    def _restore(self) -> None:
        """Waits until a server is there; the fleet has brought it to the weights of this moment."""

        def wait(fleet: ServerLink | Fleet) -> None:
            assert isinstance(fleet, Fleet)
            fleet.wait_for_any(lambda: None)

        self._attempt(wait)

    def take_metrics(self) -> dict[str, float]:
        taken = super().take_metrics()
        if isinstance(self.link, Fleet) and (total := self.link.kept.total):
            taken["rollout/changed_weights"] = self.link.kept.changed / total
        return taken
