"""The experts that a mixture's routers choose: noted as they are chosen, or given in the place of the choice.

In transformers a router scores its experts, takes the `k` best by `topk`, and makes the gates' weights of what it finds
there: by a softmax or a sigmoid, before or after, of all experts or of the best groups. That one `topk` is the seam that
all families share. Whoever replays a choice has it return the scores at the given places; the rest is the model's own
code on its own logits, so that weights and gradients are those of a router that had chosen so (arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from swift_r1.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "swift_r1_routing"


class RouteShape(NamedTuple):
    """The routes of a token: `chosen` of `experts` in each of `layers`, those without a mixture included, whose entries
    are 0 and are not read."""

    layers: int
    chosen: int
    experts: int

    @property
    def dtype(self) -> torch.dtype:
        """Returns what holds the number of an expert, and `unknown`."""
        return torch.uint8 if self.experts < 256 else torch.int16

    @property
    def unknown(self) -> int:
        """Returns the entry of a token whose experts nobody has noted: the router chooses them."""
        return torch.iinfo(self.dtype).max


class _Choice(TorchFunctionMode):
    """Stands at the `topk` of a router's call. With `replayed` `[T, k]` int64 these experts are chosen, of whatever
    group; `experts` notes each choice."""

    def __init__(self, router: Any, replayed: Tensor | None = None) -> None:
        super().__init__()
        self.sizes = router.num_experts, router.top_k
        self.replayed = replayed
        self.experts: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **given)
        scores = args[0]
        k = args[1] if len(args) > 1 else given["k"]
        chooses = scores.dim() == 2 and (scores.shape[-1], k) == self.sizes
        if self.replayed is None:
            found = func(*args, **given)
        elif chooses:
            found = torch.return_types.topk((scores.gather(-1, self.replayed), self.replayed))
        else:  # of groups: all of them, since the choice was made
            found = torch.sort(scores, dim=-1, descending=True)
        if chooses:
            self.experts.append(found[1])
        return found


class Routing:
    """The routers of a model. They choose by themselves until told otherwise.

    Attributes:
        shape: of the routes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UsageError where the model is no mixture, or routes in another way."""
        found = {
            name: module
            for name, module in model.named_modules()
            if type(module).__name__.endswith("Router")
        }
        kind = model.config.model_type
        if not found:
            raise UsageError(f"{kind} has no routers that are known: it is no mixture of experts")
        sizes: set[tuple[Any, Any]] = {
            (getattr(one, "num_experts", None), getattr(one, "top_k", None))
            for one in found.values()
        }
        experts, chosen = next(iter(sizes))
        if len(sizes) > 1 or not isinstance(experts, int) or not isinstance(chosen, int):
            raise UsageError(f"the routers of {kind} choose in a way that is not known here")
        self.shape = RouteShape(model.config.get_text_config().num_hidden_layers, chosen, experts)
        self._kind = kind
        self._routes: Tensor | None = None  # `[T, layers, k]`
        self._noted: dict[int, Tensor] | None = None  # by layer, `[T, k]` each
        self._differing: list[Tensor] = []
        for name, router in found.items():
            layer = next(int(word) for word in name.split(".") if word.isdigit())
            router.routing = self, layer
            # a method, which a copy of the model binds to its own router
            router.forward = MethodType(_forward, router)

    def replay(self, routes: Tensor) -> None:
        """Has the routers choose by `routes` `[T, layers, k]` until they are given others, or `end_replay`: gradient
        checkpointing asks them again in the backward pass."""
        self._routes = routes

    def end_replay(self) -> None:
        """Has the routers choose by themselves."""
        self._routes = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what the routers choose."""
        self._noted = {}
        try:
            yield
        finally:
            self._noted = None

    def noted(self) -> Tensor:
        """Returns the experts of the `T` tokens of the model's last call, `[T, layers, k]`."""
        assert self._noted
        first = next(iter(self._noted.values()))
        routes = first.new_zeros(
            len(first), self.shape.layers, self.shape.chosen, dtype=self.shape.dtype
        )
        for layer, experts in self._noted.items():
            routes[:, layer] = experts.to(routes.dtype)
        self._noted = {}
        return routes

    def take_counts(self) -> Tensor:
        """Returns how many choices were replayed since the last call, and how many of these were of other experts than
        the router's own, float64 `[2]` on the CPU."""
        counts = torch.zeros(2, dtype=torch.float64)
        if self._differing:
            counts = torch.stack(self._differing).sum(0).double().cpu()
        self._differing = []
        return counts

    def choose(self, router: nn.Module, layer: int, forward: Callable[[], Any]) -> Any:
        """Returns what a router gives by its own `forward`, with the experts that are replayed, if any are."""
        if self._routes is None and self._noted is None:
            return forward()
        if self._routes is None:
            with _Choice(router) as choice:
                found = forward()
            experts = self._only(choice)
        else:
            with torch.no_grad(), _Choice(router) as choice:
                forward()
            experts = self._given(self._routes[:, layer], self._only(choice))
            with _Choice(router, experts):
                found = forward()
        if self._noted is not None:
            self._noted[layer] = experts
        return found

    def _only(self, choice: _Choice) -> Tensor:
        """Returns the experts of a call. Raises UsageError where it was not one choice."""
        if len(choice.experts) != 1:
            raise UsageError(
                f"the routers of {self._kind} choose in a way that is not known here: router replay needs one topk of "
                f"{choice.sizes[1]} among {choice.sizes[0]} experts, and a call has {len(choice.experts)}"
            )
        return choice.experts[0]

    def _given(self, routes: Tensor, own: Tensor) -> Tensor:
        """Returns the experts that are given `[T, k]`, int64, and the router's `own` for tokens without."""
        known = routes[:, :1] != self.shape.unknown
        given = torch.where(known, routes.long(), own)
        other = (given.sort(-1)[0] != own.sort(-1)[0]).any(-1)
        self._differing.append(torch.stack([known.sum(), other.sum()]))
        return given


def _forward(router: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a router whose choice is noted or replayed."""
    routing, layer = router.routing
    return routing.choose(router, layer, lambda: type(router).forward(router, *args, **kwargs))


def routing_of(model: PreTrainedModel) -> Routing:
    """Returns the model's routing, from its first use on always the same. Raises as `Routing`."""
    found: Routing | None = model.__dict__.get(_NAME)
    if found is None:
        found = model.__dict__[_NAME] = Routing(model)
    return found


@contextmanager
def replayed(model: PreTrainedModel, routes: Tensor | None) -> Iterator[None]:
    """Has the model's routers choose by `routes` `[T, layers, k]` in this call, or by themselves; where it has a gradient
    also until the next one, or `Routing.end_replay`."""
    routing: Routing | None = model.__dict__.get(_NAME)
    if routes is not None:
        routing = routing_of(model)
        routing.replay(routes)
    elif routing is not None:
        routing.end_replay()
    yield
    if routing is not None and not torch.is_grad_enabled():
        routing.end_replay()
