"""Seconds of each phase of a round. Every function is a formula of docs/estimate.md; no state, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from swift_r1.lab.estimate.chips import Chip
from swift_r1.lab.estimate.model import Model
from swift_r1.lab.estimate.work import Efficiency, Round, alive


@dataclass(frozen=True, slots=True)
class ServerRoofline:
    """One replica: `tensor_parallel` devices that hold one copy of the model.

    Attributes:
        width: bytes of a weight.
        cache_width: bytes of a number in the cache.
        cache_tokens: tokens whose keys and values fit.
        most: completions at once (`--vllm_max_num_seqs`).
        per_node: devices of a machine.
    """

    tensor_parallel: int
    width: float
    cache_width: float
    cache_tokens: float
    most: int
    per_node: int = 8


def reached(model: Model, chip: Chip, use: Efficiency, share: float) -> float:
    """FLOP/s of a device at a `share` of its figure; less with experts."""
    return chip.flops * share * (use.sparse if model.is_sparse else 1.0)


def at_once(server: ServerRoofline, round_: Round) -> float:
    """Returns how many completions a replica can decode together: each takes room for its prompt and, on average over
    its life, half of its tokens; a group's prompt is kept once."""
    tokens = round_.prompt_tokens / round_.group + round_.completion_tokens / 2
    return max(1.0, min(float(server.most), server.cache_tokens / tokens))


def decode_seconds(
    model: Model,
    chip: Chip,
    server: ServerRoofline,
    use: Efficiency,
    batch: float,
    context: float,
) -> float:
    """Returns the seconds of one token of each of `batch` completions: the larger of reading weights and cache, and of
    the arithmetic; then what every step takes, what the host does for each token, and two exchanges a layer between
    tensor-parallel devices."""
    devices = server.tensor_parallel
    layers = model.shape.layers
    cache = batch * context * model.kv_numbers * server.cache_width
    read = model.read_numbers(batch) * server.width + cache
    from_memory = read / (devices * chip.bandwidth * use.memory)
    computed = model.forward_flops(batch, batch, context) / (
        devices * reached(model, chip, use, use.decode)
    )
    return (
        max(from_memory, computed)
        + layers * use.layer_seconds
        + batch * use.token_seconds
        + exchange_seconds(model, chip, server, use, batch)
    )


def exchange_seconds(
    model: Model,
    chip: Chip,
    server: ServerRoofline,
    use: Efficiency,
    tokens: float,
) -> float:
    """Returns the seconds of the two sums of a tensor-parallel layer: latency, and 2 (n - 1) / n times the hidden
    states, over the slowest link."""
    devices = server.tensor_parallel
    if devices == 1:
        return 0.0
    link = chip.intra_node if devices <= server.per_node else chip.inter_node
    sent = 2 * (devices - 1) / devices * tokens * model.shape.hidden * server.width
    return 2 * model.shape.layers * (use.link_seconds + sent / (link * use.network))


def tower_flops(model: Model, round_: Round) -> float:
    """Returns what a model's tower computes of the images of a round, of each prompt once: 2 FLOP per weight and patch.
    Its attention is left out."""
    return 2.0 * model.shape.tower * round_.prompts * round_.patches


def prefill_seconds(
    model: Model,
    chip: Chip,
    server: ServerRoofline,
    use: Efficiency,
    prompts: float,
    tokens: float,
) -> float:
    """Returns the seconds of prompts of so many tokens, each computed once for its group: arithmetic is the limit."""
    flops = model.forward_flops(prompts * tokens, prompts, tokens / 2)
    seconds = flops / (server.tensor_parallel * reached(model, chip, use, use.forward))
    return seconds + exchange_seconds(model, chip, server, use, prompts * tokens)


def generate_seconds(
    model: Model,
    chip: Chip,
    server: ServerRoofline,
    use: Efficiency,
    round_: Round,
    replicas: int,
    *,
    overlapped: bool = False,
) -> float:
    """Returns the seconds of a round on `replicas` replicas.

    While more completions wait than run at once, the batch is full; then it drains, until the longest has ended.
    `overlapped`: the next round's completions fill the places that become free (`--max_staleness` of 2 and more), so
    that nothing drains.
    """
    # of the busiest replica, where they do not divide: groups stay together
    own = round_.completions / replicas
    own = max(own, min(round_.completions, round_.group)) if round_.prompts < replicas else own
    batch = min(at_once(server, round_), own)
    context = round_.prompt_tokens + round_.completion_tokens / 2
    full = decode_seconds(model, chip, server, use, batch, context)
    waiting = own if overlapped else own - batch
    seconds = waiting * round_.completion_tokens / batch * full
    if not overlapped:
        past = 0.0
        for tokens, share in alive(round_.lengths):
            context = round_.prompt_tokens + past + tokens / 2
            # The cache of those that are left may be more than fits, but not for longer than this stretch.
            seconds += tokens * decode_seconds(
                model,
                chip,
                server,
                use,
                max(1.0, batch * share),
                context,
            )
            past += tokens
    prompts = max(1.0, round_.prompts / replicas)
    looked = tower_flops(model, round_) / replicas
    seconds += looked / (server.tensor_parallel * reached(model, chip, use, use.forward))
    return (
        seconds
        + prefill_seconds(
            model,
            chip,
            server,
            use,
            prompts,
            round_.prompt_tokens,
        )
    ) * use.generate_factor


@dataclass(frozen=True, slots=True)
class TrainerRoofline:
    """The processes that train.

    Attributes:
        stage: of ZeRO; None: a whole model each.
        micro_batches: of each rank, per optimizer step.
        width: bytes of a weight on the way.
        passes: of log-probs before the first update, the reference's included.
        recomputes: the backward pass computes the layers again (`--gradient_checkpointing`).
        trained: numbers that have a gradient.
    """

    ranks: int
    per_node: int
    stage: int | None
    micro_batches: int
    width: float
    passes: int
    recomputes: bool
    trained: int


def training_flops(model: Model, round_: Round, recomputes: bool) -> float:
    """Forward and backward of all completions, once: three times the forward pass, four with recomputation."""
    context = round_.prompt_tokens + round_.completion_tokens / 2
    forward = model.forward_flops(round_.trained_tokens, round_.generated_tokens, context)
    looked = tower_flops(model, round_) * round_.tower_passes
    return forward * (4 if recomputes else 3) + looked


KERNELS = 88
"""Launches of a training step per layer and micro-batch, forward and backward with the sums of gradients: 8,472 in 4
micro-batches of 24 layers on an H200 (results/gpu)."""
_AGAIN = 1.25  # times as many where the backward pass computes the layers again


def launches(model: Model, trainer: TrainerRoofline, round_: Round) -> float:
    """Returns the kernels that one rank starts in all optimizer steps of a round."""
    again = _AGAIN if trainer.recomputes else 1.0
    return KERNELS * again * model.shape.layers * trainer.micro_batches * round_.updates


def streamed_bytes(model: Model, trainer: TrainerRoofline, round_: Round) -> float:
    """Returns what kernels beside the products read and write in a round's training, over all ranks: per layer and
    token norms (20 times the hidden states' width), rotary positions (8), sums (24), attention (12, and of the last two
    as much of keys and values), the gated product (8 times its width), in numbers of `width` bytes, halved where they
    are counted both ways; 10 bytes for each logit in float32; and 10 for each gradient that a micro-batch adds."""
    shape = model.shape
    layer = (32 * shape.hidden + 10 * shape.kv_width + 8 * shape.feed_forward) * trainer.width
    tokens = round_.trained_tokens * layer * shape.layers
    logits = 10.0 * shape.vocabulary * round_.generated_tokens
    shards = trainer.ranks if trainer.stage == 3 else 1
    added = 10.0 * trainer.trained / shards * trainer.micro_batches * trainer.ranks
    return (tokens + logits) * round_.iterations + added * round_.updates


def least_train_seconds(
    model: Model, chip: Chip, trainer: TrainerRoofline, use: Efficiency, round_: Round
) -> dict[str, float]:
    """Returns the seconds that training cannot be faster than, by what limits it: the GPU computes products and then
    everything else, while the host starts the kernels. Empty where there are none."""
    if not use.launch_seconds:
        return {}
    flops = training_flops(model, round_, trainer.recomputes) * round_.iterations
    moved = streamed_bytes(model, trainer, round_) / trainer.ranks
    shards = trainer.ranks if trainer.stage else 1
    moved += 32.0 * trainer.trained / shards * round_.updates
    return {
        "products": flops / (trainer.ranks * reached(model, chip, use, use.products)),
        "memory": moved / (chip.bandwidth * use.streams),
        "launches": launches(model, trainer, round_) * use.launch_seconds,
    }


def bus(chip: Chip, trainer: TrainerRoofline, use: Efficiency) -> float:
    """Bytes/s per rank of a collective over all of them: between machines all devices of a machine send at once."""
    if trainer.ranks <= trainer.per_node:
        return chip.intra_node * use.network
    return min(chip.intra_node, chip.inter_node * trainer.per_node) * use.network


def exchanged_bytes(model: Model, trainer: TrainerRoofline) -> float:
    """Returns what one rank exchanges in an optimizer step. Plain, ZeRO-0 and 1: a sum of the gradients (twice their
    size); ZeRO-2: their scatter for each micro-batch, and the new weights; ZeRO-3: the weights for forward and backward
    of each micro-batch, and the gradients' scatter."""
    if trainer.ranks == 1:
        return 0.0
    share = (trainer.ranks - 1) / trainer.ranks * trainer.width
    if trainer.stage == 3:
        return share * trainer.micro_batches * (2 * model.total + trainer.trained)
    if trainer.stage == 2:
        return share * (trainer.micro_batches * trainer.trained + trainer.trained)
    return share * 2 * trainer.trained


def logprob_seconds(
    model: Model,
    chip: Chip,
    trainer: TrainerRoofline,
    use: Efficiency,
    round_: Round,
) -> float:
    """Returns the seconds of the passes without gradients before the first update."""
    context = round_.prompt_tokens + round_.completion_tokens / 2
    forward = model.forward_flops(round_.trained_tokens, round_.generated_tokens, context)
    flops = (forward + tower_flops(model, round_)) * trainer.passes
    return flops / (trainer.ranks * reached(model, chip, use, use.forward)) * use.train_factor


def train_seconds(
    model: Model,
    chip: Chip,
    trainer: TrainerRoofline,
    use: Efficiency,
    round_: Round,
) -> float:
    """Returns the seconds of all optimizer steps of a round: of the arithmetic, or of the launches where the host takes
    longer for them. Ranks exchange while they compute, so that the slower of both counts, and a share of the exchanges
    in any case. The optimizer reads and writes 32 bytes a number."""
    computed = training_flops(model, round_, trainer.recomputes) * round_.iterations
    seconds = computed / (trainer.ranks * reached(model, chip, use, use.train))
    seconds = max(seconds, launches(model, trainer, round_) * use.launch_seconds)
    exchanged = round_.updates * exchanged_bytes(model, trainer) / bus(chip, trainer, use)
    seconds = max(exchanged, seconds + use.exposed * exchanged)
    if trainer.stage == 3:
        seconds += (
            round_.updates * 3 * model.shape.layers * trainer.micro_batches * use.gather_seconds
        )
    shards = trainer.ranks if trainer.stage else 1
    updated = 32.0 * trainer.trained / shards / (chip.bandwidth * use.memory) + use.step_seconds
    return (seconds + round_.updates * updated) * use.train_factor
