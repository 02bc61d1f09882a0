"""Memory that one rank will need, by part, from the flags and the model's shape: `swift rlhf --estimate true`.

Bytes of tensors are counted; what a phase holds for a moment is taken at its largest. docs/backends.md says how far
off measured peaks were.
"""

from __future__ import annotations

import math
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from swift_r1.flags.run import RunFlags
from swift_r1.flags.training import EIGHT_BIT
from swift_r1.flags.world import World
from swift_r1.models.shape import KEPT_CHUNKS, LOGITS_BYTES, ModelShape, gpu_logits_bytes, shape_of
from swift_r1.runtime.hardware import GpuMemory
from swift_r1.training.backends.deepspeed_config import ON_GPU, offloads, read_config
from swift_r1.training.micro_batches import LEAST_SAVING

if TYPE_CHECKING:
    import torch

GIB = 2**30
_MIB = 2**20
DEFAULT_PROMPT_TOKENS = 512  # taken for the longest prompt where `--max_length` does not bound it

ANY_CARD = 80.0 * GIB  # memory of a GPU that does not tell
WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0}
"""Bytes of a number, by its dtype."""
_FOUR_BIT = {True: 0.516, False: 0.5625}
"""Bytes per 4-bit number with the scales of its blocks, by whether these are stored in 8 bits."""
_SLACK = 0.2  # share of memory that comes and goes that an allocator holds in addition
# most that the embedded engine's keys and values take (serving/engines/transformers.py)
EMBEDDED_CACHE_BYTES = 2 * GIB
_BUCKET_NUMBERS = 50_000_000  # `reduce_bucket_size` of our DeepSpeed presets


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank."""

    parts: Mapping[str, float]  # held from the first optimizer step on, by name
    # what each phase of a step holds in addition, by name and then by part; they follow one another
    phases: Mapping[str, Mapping[str, float]]
    # parts that stay in the host's memory although training is on a GPU
    on_host: Mapping[str, float]
    prompt_tokens: int  # the longest prompt that this is for
    tokens: int  # of one forward pass

    @property
    def highest_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def counted(self) -> Mapping[str, float]:
        """The parts of the peak."""
        return {**self.parts, **self.phases[self.highest_phase]}

    @property
    def peak(self) -> float:
        return sum(self.counted.values())

    @property
    def largest(self) -> str:
        """The name of the largest part that flags can change."""
        return max(
            (name for name in self.counted if name != "libraries"), key=self.counted.__getitem__
        )


def estimate(
    args: RunFlags,
    shape: ModelShape,
    world_size: int,
    libraries: float,
    *,
    card: float | None = None,
    critic: ModelShape | None = None,
) -> MemoryEstimate:
    """Estimates the memory of a rank from resolved arguments.

    Args:
        libraries: bytes that the process holds before it loads a model.
        card: bytes of the GPU that trains; None on a CPU.
        critic: of PPO, all of whose weights are trained.
    """
    stage, (offloads_optimizer, offloads_weights) = zero_of(args)
    fsdp = args.fsdp is not None
    width = WIDTHS[args.torch_dtype or shape.dtype]
    ranks = world_size if stage is not None else 1
    sharded = ranks if stage == 3 else 1
    bucket = _BUCKET_NUMBERS if card is None else ON_GPU["reduce_bucket_size"]
    trained, adapters = trained_numbers(args, shape)
    embedding_trained = args.train_type == "full" and not args.freezes

    if args.train_type == "qlora":
        plain = shape.total - shape.quantized
        four_bit = shape.quantized * _FOUR_BIT[args.bnb_4bit_use_double_quant]
        # under FSDP2 every rank has all of these
        base = plain * width + four_bit * (sharded if fsdp else 1)
    else:
        base = shape.total * width
    weights = (base + adapters * width) / sharded
    parts = {
        "weights": weights,
        "gradients": _gradients(trained, width, ranks, stage, bucket, shape if fsdp else None),
        "optimizer": _optimizer(args, trained, width, ranks, stage),
    }
    if args.wants_reference and (args.train_type == "full" or args.ref_model):
        reference = shape if args.ref_model is None else shape_of(args.ref_model)
        parts["reference"] = reference.total * width / sharded
    if args.teacher_path is not None and (
        args.teacher_path != args.model or args.train_type == "full"
    ):
        parts["teacher"] = shape_of(args.teacher_path).total * width / sharded
    if critic is not None:
        numbers = critic.without_head
        bytes_each = WIDTHS[args.torch_dtype or critic.dtype]
        parts["critic's weights"] = numbers * bytes_each / sharded
        parts["critic's gradients"] = _gradients(
            numbers, bytes_each, ranks, stage, bucket, critic if fsdp else None
        )
        parts["critic's optimizer"] = _optimizer(args, numbers, bytes_each, ranks, stage)
    if stage == 3:
        if args.zero_hpz_partition_size is not None and args.zero_hpz_partition_size > 1:
            own = sum(
                size
                for name, size in parts.items()
                if name.endswith(("weights", "reference", "teacher"))
            )
            parts["second copy of weights"] = own * sharded / args.zero_hpz_partition_size
        parts["gathered weights"] = max(
            _gathered(model, args) for model in (shape, critic) if model is not None
        )
        if not args.use_vllm:
            parts["generation copy"] = shape.total * width
    on_host = {}
    if card is not None:
        moved = {
            "optimizer": offloads_optimizer,
            "weights": offloads_weights,
            "reference": args.offload_ref_model or offloads_weights,
            "teacher": args.offload_teacher_model or offloads_weights,
        }
        moved |= {f"critic's {name}": away for name, away in moved.items()}
        on_host = {name: parts.pop(name) for name, away in moved.items() if away and name in parts}

    prompt = args.max_length or DEFAULT_PROMPT_TOKENS
    tokens, predicted = _tokens(args, world_size, prompt)
    if card is None:
        logits = _logits(shape, predicted, width, embedding_trained)
    else:
        logits = _gpu_logits(shape, predicted, width, embedding_trained, gpu_logits_bytes(card))
    phases = {
        "training": {"activations": _activations(args, shape, tokens, width), "logits": logits}
    }
    if critic is not None:
        phases["training of the critic"] = {
            "activations": _activations(args, critic, tokens, width, adapters=False)
        }
    if not args.use_vllm:
        phases["generation"] = {
            "keys, values and logits": _generation(args, shape, world_size, prompt, width)
        }
        if card is None:
            phases["generation"]["packed weights"] = shape.total * width
    for phase in phases.values():
        phase["allocator's slack"] = _SLACK * sum(phase.values())
    return MemoryEstimate({**parts, "libraries": libraries}, phases, on_host, prompt, tokens)


def _tokens(args: RunFlags, world_size: int, prompt: int) -> tuple[int, int]:
    """Tokens that a rank computes of the largest micro-batch, and how many of them are predicted."""
    size = args.per_device_train_batch_size
    group = args.num_generations
    row = prompt + args.max_completion_length
    budget = args.max_tokens_per_micro_batch or size * row
    spread = args.sequence_parallel_size
    step = math.ceil(args.completions_per_step * spread / world_size)
    apart = step * row
    shared = step * args.max_completion_length + math.ceil(step / group) * prompt
    shares = args.share_prompt == "true" or (
        args.share_prompt == "auto" and shared <= (1 - LEAST_SAVING) * apart
    )
    whole = shared if shares else apart
    tokens = math.ceil(min(budget, whole) / spread)
    return tokens, round(tokens * step * args.max_completion_length / whole)


def trained_numbers(args: RunFlags, shape: ModelShape) -> tuple[int, int]:
    """Returns how many numbers get a gradient, and how many of them are in adapters."""
    if args.train_type != "full":
        adapters = shape.adapters(args)
        return adapters, adapters
    if not args.freezes and not shape.tower:
        return shape.total, 0
    from swift_r1.models.weights import frozen_names

    frozen = frozen_names(shape.weights, args)
    return sum(size for name, size in shape.weights if name not in frozen), 0


def changes(args: RunFlags, on_gpu: bool = False) -> Iterator[tuple[str, RunFlags]]:
    """Flags that could save memory, each with the arguments that it makes; those that change least come first."""
    if not args.gradient_checkpointing:
        yield "--gradient_checkpointing true", replace(args, gradient_checkpointing=True)
    row = (args.max_length or DEFAULT_PROMPT_TOKENS) + args.max_completion_length
    budget = args.max_tokens_per_micro_batch or args.per_device_train_batch_size * row
    if budget > row:
        tokens = max(row, budget // 4)
        yield (
            f"--max_tokens_per_micro_batch {tokens}",
            replace(args, max_tokens_per_micro_batch=tokens),
        )
    if on_gpu and args.colocates:
        if not args.sleep_level:
            yield "--sleep_level 2", replace(args, sleep_level=2)
        if not args.offload_optimizer:
            yield "--offload_optimizer true", replace(args, offload_optimizer=True)
    if args.train_type == "full":
        yield "--train_type lora", replace(args, train_type="lora", beta=args.beta)
    elif args.train_type == "lora":
        yield "--train_type qlora", replace(args, train_type="qlora", quant_bits=4)
    if args.wants_reference and args.train_type == "full" and not args.offload_ref_model:
        yield "--offload_ref_model true", replace(args, offload_ref_model=True)
    if args.optim not in (*EIGHT_BIT, "sgd"):
        yield "--optim adamw_8bit", replace(args, optim="adamw_8bit")
    if args.torch_dtype == "float32":
        yield "--torch_dtype bfloat16", replace(args, torch_dtype="bfloat16")
    if args.fsdp is None and args.deepspeed in (None, "zero0", "zero1", "zero2"):
        yield "--deepspeed zero3", replace(args, deepspeed="zero3")
    if on_gpu and args.fsdp is None and not str(args.deepspeed).endswith("offload"):
        yield "--deepspeed zero3_offload", replace(args, deepspeed="zero3_offload")
    if not args.use_vllm:
        yield "--use_vllm true (a `swift rollout` server)", replace(args, use_vllm=True)


def flags_that_fit(
    args: RunFlags, fits: Callable[[RunFlags], bool], on_gpu: bool
) -> tuple[str, ...]:
    """Returns the fewest flags, at most two, with which `fits` holds; none where no two will do. Of several
    ways it is the one that changes least."""
    ways = [((flag,), other) for flag, other in changes(args, on_gpu)]
    pairs = [((*flags, flag), both) for flags, one in ways for flag, both in changes(one, on_gpu)]
    return next((flags for flags, other in (*ways, *pairs) if fits(other)), ())


def _gradients(
    trained: int,
    width: float,
    ranks: int,
    stage: int | None,
    bucket: int,
    fsdp: ModelShape | None,
) -> float:
    """Float32 sums, and what of the weights' own dtype is on its way into them: under FSDP2 (of the model `fsdp`) the
    largest group's, which is the output head with the embeddings, or a layer, and its float32 copy; under ZeRO what a
    `bucket` of so many numbers holds."""
    if stage is None:
        return 4.0 * trained
    if fsdp is not None:
        layer = (fsdp.total - fsdp.head) // fsdp.layers
        return 4.0 * trained / ranks + (4 + width) * min(trained, max(fsdp.head, layer))
    held = min(trained, bucket) * width
    return 4.0 * trained + held if stage in (0, 1) else 4.0 * trained / ranks + 2 * held


def _optimizer(args: RunFlags, trained: int, width: float, ranks: int, stage: int | None) -> float:
    """Float32 masters and moments."""
    masters = 4 * trained / ranks if stage is not None or width == 2 else 0.0
    return masters + {"sgd": 0, **dict.fromkeys(EIGHT_BIT, 2)}.get(args.optim, 8) * trained / ranks


def _gathered(shape: ModelShape, args: RunFlags) -> float:
    """Returns what ZeRO-3 has gathered at a time of a model: the layer at work, the next one, and the output head.
    Policy, critic and reference work one after another."""
    live = shape.head + 2 * (shape.total - shape.head) / shape.layers
    return min(shape.total, live) * WIDTHS[args.torch_dtype or shape.dtype]


def _activations(
    args: RunFlags, shape: ModelShape, tokens: float, width: float, adapters: bool = True
) -> float:
    """Kept for the backward pass: of every layer, or with checkpointing its input and one whole layer."""
    hidden = shape.hidden
    wide = shape.feed_forward
    kv = shape.kv_width
    # The inputs of the norms and of each group of matrix products, gate and up; queries, keys and values; and in
    # float32 a number per norm and head. As autograd saves them for a Llama here.
    layer = ((6 * hidden + 2 * kv + 3 * wide) * width + 4 * (2 + hidden // 64)) * tokens
    if args.train_type != "full" and adapters:
        layer += 7 * args.lora_rank * width * tokens  # between the two matrices of each adapter
    if args.gradient_checkpointing:
        return shape.layers * hidden * width * tokens + 1.5 * layer
    # What the layer at work computes on its way through is not saved.
    return shape.layers * layer + layer / 2


def _logits(shape: ModelShape, predicted: float, width: float, head_trained: bool) -> float:
    """A chunk of float32 logits with its exponentials and their low-precision copy, the first chunks' exponentials, and
    the head's gradient."""
    whole = 4.0 * predicted * shape.vocabulary
    chunk = min(float(LOGITS_BYTES), whole)
    kept = min(float(KEPT_CHUNKS * LOGITS_BYTES), whole)
    gradient = shape.head * (4 + 2 * width) if head_trained else 0.0
    return chunk * (2 + width / 4) + kept + gradient


def _gpu_logits(
    shape: ModelShape, predicted: float, width: float, head_trained: bool, most: int
) -> float:
    """The same with the kernels of a GPU: equal chunks of at most `most` bytes of float32 logits, of which the first are
    kept and one more is at work, their gradients in low precision, this chunk's and the one's before it, and the sum of
    the head's gradient."""
    chunks = max(1, math.ceil(predicted / max(1, most // (4 * shape.vocabulary))))
    chunk = 4.0 * shape.vocabulary * math.ceil(predicted / chunks)
    whole = min(chunks, KEPT_CHUNKS + 1)
    low = min(chunks, 2) * width / 4
    return chunk * (whole + low) + (4.0 * shape.head if head_trained else 0.0)


def _generation(
    args: RunFlags, shape: ModelShape, world_size: int, prompt: int, width: float
) -> float:
    """Keys and values of the completions that are decoded together, the old copy while they grow, and their logits."""
    rows = (
        int(args.generation_batch_size or args.per_device_train_batch_size * world_size)
        / world_size
    )
    positions = prompt + args.max_completion_length
    cache = min(EMBEDDED_CACHE_BYTES, rows * positions * 2 * shape.layers * shape.kv_width * width)
    return 1.25 * cache + rows * shape.vocabulary * (4 * 3 + width)


_LIBRARIES = {"trainer": 0.10 * GIB, "adapters": 0.05 * GIB, "deepspeed": 0.06 * GIB}
"""What a trainer has imported beside this process's torch and transformers; measured."""
_LEAST_SHOWN = 0.01 * GIB
CONTEXT_BYTES = 0.6 * GIB  # what a CUDA context and its libraries take of a GPU
ENGINE_BYTES = 1.5 * GIB
"""What vLLM holds on a GPU beside weights, keys and values: activations of a prefill, CUDA graphs. A sleeping engine
freed 26.5 GiB, of which 24 were keys and values and 0.9 weights (results/gpu)."""


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held: of the GPU, or of the host where there is none.

    From the kernel's high-water mark of this program's own memory; getrusage's is inherited from the program before it.
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_reserved(device)
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    marks = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * next(marks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def out_of_memory(error: BaseException) -> str | None:
    """Says what did not fit, in words, where `error` says that memory is full; None for other errors."""
    import torch

    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, torch.OutOfMemoryError):
        tried = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
        return f"{tried[1]} more did not fit on the GPU" if tried else "the GPU is full"
    if isinstance(error, MemoryError):
        return text or "Python got no more memory"
    # torch has no class of its own for this on a CPU.
    if type(error) is RuntimeError and "DefaultCPUAllocator" in text:
        tried = re.search(r"allocate (\d+) bytes", text)
        return f"{int(tried[1]) / GIB:.2f} GiB more could not be allocated" if tried else text
    return None


def estimated(
    args: RunFlags, shape: ModelShape, world: World, card: float | None
) -> MemoryEstimate:
    """Estimates the memory of these flags on this machine, on GPUs of `card` bytes, or with None on its CPUs. What this
    process holds counts as libraries then, so it must be asked early."""
    more = {
        "trainer": True,
        "adapters": args.train_type != "full",
        "deepspeed": args.deepspeed is not None,
    }
    own = psutil.Process().memory_info().rss + sum(
        _LIBRARIES[name] for name, on in more.items() if on
    )
    libraries = own if card is None else CONTEXT_BYTES
    critic = shape_of(args.critic_model) if args.critic_model else None
    return estimate(args, shape, world.size, libraries, card=card, critic=critic)


def card_of(gpu: bool, memory: GpuMemory | None) -> float | None:
    """Returns the bytes of a GPU for an estimate, as is usual where it does not tell; None on a CPU."""
    if not gpu:
        return None
    return ANY_CARD if memory is None else memory.total


def zero_of(args: RunFlags) -> tuple[int | None, tuple[bool, bool]]:
    """ZeRO's stage, that of FSDP2 being 3, None for plain torch, and whether it offloads the optimizer and the
    parameters."""
    if args.deepspeed is None:
        return 3 if args.fsdp else None, (False, False)
    config = read_config(args.deepspeed, args.zero_hpz_partition_size)
    return config.get("zero_optimization", {}).get("stage", 0), offloads(config)


def advice(
    args: RunFlags,
    shape: ModelShape,
    world: World,
    card: float | None,
    found: MemoryEstimate | None = None,
) -> str:
    """The largest part, and the two flags that would save most, of those that save a twentieth or more of what is not
    libraries, and enough to be shown."""
    found = found or estimated(args, shape, world, card)
    savings = {
        flag: found.peak - estimated(other, shape, world, card).peak
        for flag, other in changes(args)
    }
    worth = max((found.peak - found.parts["libraries"]) / 20, _LEAST_SHOWN)
    best = [
        flag
        for flag in sorted(savings, key=savings.__getitem__, reverse=True)
        if savings[flag] > worth
    ]
    largest = f"the largest part is {found.largest} ({found.counted[found.largest] / GIB:.2f} GiB)"
    if not best:
        return f"{largest}; no flag would save much"
    tips = " and ".join(f"{flag} (saves {savings[flag] / GIB:.2f} GiB)" for flag in best[:2])
    return f"{largest}; what would help most: {tips}"


def advice_for(args_json: Mapping[str, Any], world: World, card: float | None) -> str:
    """`advice` for the content of an args.json."""
    # another class of all flags, which takes a while
    from swift_r1.flags.forecast import arguments_of

    args = arguments_of(args_json)
    return advice(args, shape_of(args.model), world, card)


def size_text(value: float) -> str:
    """Returns a number of bytes in words."""
    if value >= GIB:
        return f"{value / GIB:,.2f} GiB"
    return f"{value / _MIB:.1f} MiB" if value >= _MIB else f"{value / 1024:.1f} KiB"
