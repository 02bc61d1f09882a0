"""Runs inside vLLM's worker processes: takes in a new version of the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from swift_r1.models.expected import parts_of
from swift_r1.models.multimodal import NEVER
from swift_r1.sync import transport
from swift_r1.wire.protocol import DeviceMemory

logger = logging.getLogger("swift_r1.serving.worker")
# vLLM says so at every update of layers that have no weights of their own: tied output heads, rotary tables. Whether a
# parameter got no value `_Update.finish` finds out.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: "Failed to load weights" not in str(record.msg)
)


class SwiftWorker:
    """Mixed into vLLM's worker class (`worker_extension_cls`); its methods are called on every worker."""

    model_runner: Any
    # vLLM's own, of its worker class.
    reload_weights: Callable[..., None]
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    shutdown_weight_transfer_engine: Callable[[], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    weight_transfer_engine: Any
    vllm_config: Any

    def swift_load_weights(self, files: Sequence[str]) -> int:
        """Replaces every weight by the safetensors files' tensors (checkpoint names); returns how many came.

        Linear weights are repacked for the device at load time, so values cannot be copied in: vLLM's layerwise
        reload repeats the loading of a checkpoint into the tensors that compiled graphs already point to.

        Raises:
            RuntimeError: if a parameter of the engine's model got no value.
            Exception: whatever reading or loading raised; the model then is a mixture, but can be loaded again.
        """
        self._end_open_update()
        count = 0

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal count
            for name, tensor in _read(files):
                count += 1
                yield name, tensor

        update = _Update(self.model_runner)
        with update.loading(), _keeping_features(self.model_runner):
            self.reload_weights(weights_iterator=tensors())
        update.finish()
        return count

    def swift_join_nccl(self, unique_id: str, world_size: int) -> None:
        """Joins the trainer's NCCL group (vLLM's own transfer engine, one tensor per broadcast)."""
        self._end_open_update()
        self.shutdown_weight_transfer_engine()
        self.init_weight_transfer_engine(
            {
                "nccl_unique_id_b64": unique_id,
                "rank_offset": 1,
                "world_size": world_size,
                "packed": False,
            }
        )

    def swift_receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        first: bool,
        memory: dict[str, Any] | None = None,
    ) -> None:
        """Receives these tensors from the trainer over NCCL, or out of `memory` (of `DeviceMemory`), and loads them;
        see `swift_finish_receiving`."""
        if first:
            self._end_open_update()
            self._swift_update = _Update(self.model_runner)
            self.start_weight_update()
        with self._swift_update.loading():
            if memory is None:
                self.update_weights(
                    {"names": list(names), "dtype_names": list(dtypes), "shapes": list(shapes)}
                )
            else:
                self._load_from(DeviceMemory(**memory), names, dtypes, shapes)

    def _load_from(
        self,
        memory: DeviceMemory,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
    ) -> None:
        from vllm.config import set_current_vllm_config

        kinds = (
            (getattr(torch, dtype), shape) for dtype, shape in zip(dtypes, shapes, strict=True)
        )
        # Copies: vLLM keeps what it is given until it has all of a layer, and the memory is the trainer's.
        tensors = [
            tensor.clone() for tensor in transport.tensors_in(transport.opened(memory), kinds)
        ]
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(zip(names, tensors, strict=True))
        if tensors[0].is_cuda:
            torch.cuda.current_stream(tensors[0].device).synchronize()

    def swift_finish_receiving(self) -> None:
        """Ends the update. Raises RuntimeError if a parameter of the engine's model got no value."""
        try:
            self.finish_weight_update()
        except BaseException:
            self._end_open_update()
            raise
        self._swift_update.finish()

    def _end_open_update(self) -> None:
        """Leaves an update that broke off between two buckets: vLLM would refuse the next one, and keep its half."""
        if getattr(self, "_weight_update_active", False):
            _leave_reload(self.model_runner.get_model(), self.model_runner)
            self._weight_update_active = False
            self.weight_transfer_engine.reset_weight_update_target()

    def swift_shape_logits(self, scale: float, never: Sequence[int]) -> None:
        """Multiplies all logits by `scale` from now on, and makes the tokens `never` impossible; 1.0 and none restore
        the model's own."""
        model = self.model_runner.get_model()
        # A name in the instance hides the class's method; deleting it brings the method back.
        vars(model).pop("compute_logits", None)
        if scale == 1.0 and not never:
            return
        original = model.compute_logits

        def shaped(*args: Any, **kwargs: Any) -> Tensor | None:
            logits: Tensor | None = original(*args, **kwargs)
            if logits is None:
                return None
            logits = logits.float() * scale
            for token in never:
                logits[:, token] = NEVER
            return logits

        model.compute_logits = shaped


class _Update:
    """Loading one version into the model, with a check of what vLLM only logs: that every parameter gets a value."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._model = runner.get_model()
        self._wanted = _parameter_names(self._model)
        self._loaded: set[str] = set()
        repack_experts(self._model)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around each load: notes what it loads, and leaves the update where it fails."""
        original = self._model.load_weights

        def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            # By now vLLM has put a checkpoint's parameters in the place of those that it derives from them.
            self._wanted &= _parameter_names(self._model)
            self._loaded.update(original(weights))
            return self._loaded

        self._model.load_weights = load_and_note
        try:
            try:
                yield
            finally:
                del self._model.load_weights
        except BaseException:
            _leave_reload(self._model, self._runner)
            raise

    def finish(self) -> None:
        """Raises RuntimeError if a parameter got no value."""
        parts = parts_of(self._loaded)  # others stay as they are
        wanted = {name for name in self._wanted if parts_of([name]) <= parts}
        missing = sorted(wanted - self._loaded)
        if missing:
            raise RuntimeError(
                f"{len(missing)} engine parameters got no value: {', '.join(missing[:5])}"
            )
        repack_embeddings(self._model)


@contextmanager
def _keeping_features(runner: Any) -> Iterator[None]:
    """Has a reload leave the features of images that are there: the scheduler counts on those of running requests, and
    asks for those of others under new names after the load."""
    runner.reset_encoder_cache = lambda: None
    try:
        yield
    finally:
        del runner.reset_encoder_cache


def _parameter_names(model: nn.Module) -> set[str]:
    """Maps what vLLM wraps for adapters to its plain name; adapters themselves are no part of a version."""
    return {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}


def _read(files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as bucket:
            for name in bucket.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                yield name, bucket.get_tensor(name)


@torch.no_grad()
def repack_embeddings(model: nn.Module) -> None:
    """Repeats the packing of embeddings after a reload; a no-op except on CPU, where an output head multiplies with a
    packed copy. One that is tied to the embedding would silently stay at the old version: the reload writes the shared
    tensor after the head was packed, or never visits the head at all."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, VocabParallelEmbedding) and isinstance(
            method, UnquantizedEmbeddingMethod
        ):
            method.process_weights_after_loading(module)


def repack_experts(model: nn.Module) -> None:
    """Has the coming reload pack the experts of a layer on CPU as the first load did. vLLM packs them when it makes the
    kernel of their matrix product, and only then: a reload would silently write plain weights where packed ones are
    read."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if (
            getattr(method, "moe_kernel", None) is not None
            and next(module.parameters()).device.type == "cpu"
        ):
            method.moe_kernel = None


def _leave_reload(model: nn.Module, runner: Any) -> None:
    """Takes the model out of a half-done layerwise reload; otherwise the next one would keep its first half."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

    with set_current_vllm_config(runner.vllm_config):
        finalize_layerwise_reload(model, runner.vllm_config.model_config)  # type: ignore[no-untyped-call] # vLLM's
    logger.warning("a weight update broke off: the model holds a mixture until the next full one")
