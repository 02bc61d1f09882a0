"""The wire of `swift rollout`, for server and client: JSON for rollouts, safetensors bytes for weights, no pickle.

Weight updates are a small transaction under a lease::

    POST   /v1/weights/lease    LeaseRequest   -> Lease            one writer at a time (409 otherwise)
    POST   /v1/weights/begin    UpdateBegin    -> UpdateStatus     opens version N+1
    PUT    /v1/weights/bucket   safetensors bytes, headers below   -> UpdateStatus
                                (with a base: only what changed in that version's bucket, see sync/buckets.py)
    POST   /v1/weights/file     BucketFile     -> UpdateStatus     the same through a file in shared memory
    POST   /v1/weights/channel  ChannelRequest -> UpdateStatus     joins an NCCL group
    POST   /v1/weights/stream   StreamedBucket -> UpdateStatus     a bucket through it, or in the GPU's memory,
                                                                   loaded at once
    POST   /v1/weights/relay    RelayRequest   -> RelayStatus      passes what arrives here on to another server
    GET    /v1/weights/update                  -> UpdateStatus     how many buckets are here
    POST   /v1/weights/commit   UpdateCommit   -> UpdateStatus     loads all buckets, serves N+1
    POST   /v1/weights/abort    UpdateAbort    -> UpdateStatus     forgets staged buckets, N stays
    DELETE /v1/weights/lease                                       -> UpdateStatus; gives the lease back
    POST   /v1/sleep            SleepRequest   -> SleepStatus      the engine gives its memory back
    POST   /v1/wake                            -> SleepStatus      and takes it again

Every call under the lease renews it. Rollouts and scores may show it too: an update does not stop those of its holder.
A commit or a sleep that has waited too long for them gets 503 and can be repeated. Errors are `{"error": "sentence"}`.

Rollouts name the images of their prompts by a hash. Those that the server does not have it names in its refusal (424)::

    PUT    /v1/images/{sha256}  the file's bytes -> StoredImage    then the same rollout is asked for again
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from swift_r1.errors import RunFailed

LEASE_HEADER = "X-Swift-Lease"
VERSION_HEADER = "X-Swift-Weight-Version"
BUCKET_HEADER = "X-Swift-Bucket"
DIGEST_HEADER = "X-Swift-Bucket-XXH3"
BASE_HEADER = "X-Swift-Base-XXH3"
FULL_HEADER = "X-Swift-Full"  # only in a 503 for lack of room: seconds after which to ask again
RELAY_ANSWER_S = 20.0  # after which a relay says how it stands
RELAY_URL = r"^https?://[^\s@?#]{1,1990}$"  # no password in it is shown to another server
NOT_NOW = 503  # the same request may be taken later
LACKS_IMAGES = 424  # the same request will be taken once its images are here
FinishReason = Literal["stop", "length", "abort"]
Limit = Literal["calls", "tokens", "seconds", "length"]
"""Of an episode: of its calls of the model, their tokens and its time; and the model's length."""
UpdatePolicy = Literal["wait", "keep"]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
T = TypeVar("T")
Several = Annotated[tuple[T, ...], Field(fail_fast=True)]
"""A list of a request. Of faulty items the first alone is kept: there may be millions, of a kilobyte each."""
Version = Annotated[int, Field(ge=1, lt=2**53)]  # what every JSON reader and a float hold exactly
# The limit makes pydantic check the text: JSON can hold half a surrogate pair, which cannot be encoded.
Text = Annotated[str, Field(max_length=64 << 20)]
VersionSpans = tuple[tuple[int, int], ...]
"""`(first token, weight version)` of each stretch of tokens that the same weights wrote, in order."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
ImageDigest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""SHA-256 of an image file's bytes, by which requests name it."""
TOP_K_LIMIT = 2**31
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Wire(BaseModel):
    """Base of all messages: frozen, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SamplingParams(Wire):
    """How completions are sampled. Log-probs are those of the distribution actually sampled from: after the penalty and
    temperature, and after `min_p`, `top_p`, `top_k` and the pattern where these cut it. Temperature 0 is greedy; its
    log-probs are those at temperature 1. The model's end tokens (generation config included) end a completion unless
    `ignore_eos`."""

    max_tokens: int = Field(gt=0)  # a stop token included
    temperature: float = Field(default=1.0, ge=0.0, le=1000.0)  # 0: greedy
    # from the likeliest tokens that have this probability together
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1, lt=TOP_K_LIMIT)  # from so many likeliest tokens; -1: all
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)  # of the likeliest token's probability
    # of tokens that the prompt or the completion has
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    # completions match it as a whole; not in every engine
    structured_outputs_regex: Text | None = None
    # xgrammar's (JSON), which completions follow; not in every engine
    structural_tag: Text | None = None
    stop: Several[Text] = ()  # texts that end a completion
    stop_token_ids: Several[TokenId] = ()  # tokens that do
    ignore_eos: bool = False  # go on after the model's end tokens


class RoutesAsked(Wire):
    """Asks for the experts that a mixture's routers choose: `chosen` of `experts` in each of `layers`, those without a
    mixture included. Routes are returned from the prompt's token `first` on."""

    layers: int = Field(ge=1, le=65_536)
    chosen: int = Field(ge=1, le=4096)
    experts: int = Field(ge=1, le=32_766)
    first: int = Field(default=0, ge=0)


class Routes(Wire):
    """The experts of tokens `[tokens, layers, chosen]`, as base64 of `uint8`, with 256 experts or more of little-endian
    `int16`. Tokens are those of the prompt, from the asked one on, and of the completion without its last, which the
    model has not read; layers without a mixture have zeros."""

    shape: tuple[int, int, int]
    data: Annotated[str, Field(max_length=1 << 32)]


class RolloutRequest(Wire):
    """`n` completions of one prompt. `request_id` makes the request idempotent."""

    request_id: str = Field(min_length=1, max_length=200)  # the same id with another body gets 409
    prompt_token_ids: Several[TokenId] = Field(min_length=1)
    n: int = Field(default=1, ge=1)  # completions
    seeds: Several[Seed] | None = None  # one per completion
    sampling: SamplingParams  # of all of them
    images: Several[ImageDigest] = ()  # those of the prompt, in order
    # with images: the prompt with one placeholder for each, of which the engine must make `prompt_token_ids`
    unexpanded_token_ids: Several[TokenId] = ()
    routes: RoutesAsked | None = None  # only of a server with `routes` in its info


class StoredImage(Wire):
    """Answer of `PUT /v1/images/{sha256}`: the image is here until those that came later need its room."""

    width: int  # pixels
    height: int


class LackingImages(Wire):
    """Answer of a rollout (424) whose images the server does not have."""

    error: str
    missing: tuple[ImageDigest, ...] = Field(min_length=1)


class RolloutBatch(Wire):
    """Body of `POST /v1/rollouts`."""

    requests: Several[RolloutRequest] = Field(min_length=1)


class Completion(Wire):
    """One completion: `T` tokens (a stop token included), `T` log-probs (natural log, after temperature), and the
    weight version that wrote them.

    Where an update came meanwhile (`--update_policy keep`) `weight_versions` says which version wrote which tokens. A new
    one may be reported one token late.
    """

    token_ids: tuple[int, ...]  # a stop token included
    logprobs: tuple[float, ...]  # of the tokens
    finish_reason: FinishReason
    weight_version: int  # the oldest that wrote a token
    weight_versions: VersionSpans | None = (
        None  # (first token, version) in order, where there are several
    )
    routes: Routes | None = None  # where they were asked for

    @property
    def version_spans(self) -> VersionSpans:
        """Returns which weights wrote which tokens."""
        return self.weight_versions or ((0, self.weight_version),)


def versions_of_tokens(spans: Sequence[tuple[int, int]], length: int) -> list[int]:
    """Returns the version of the weights that wrote each of `length` tokens."""
    versions: list[int] = []
    for start, version in reversed(spans):
        versions = [version] * (length - len(versions) - start) + versions
    return versions


class RolloutOutput(Wire):
    request_id: str
    completions: tuple[Completion, ...]


class RolloutResponse(Wire):
    outputs: tuple[RolloutOutput, ...]


class TurnFlags(Wire):
    """What `swift rollout` was told of several turns, under its flags' names. The trainer runs them."""

    multi_turn_scheduler: str | None = None
    max_turns: int | None = None
    use_gym_env: bool | None = None
    gym_env: str | None = None
    context_manager: str | None = None
    external_plugins: tuple[str, ...] = ()  # absolute paths
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}
    max_length: int | None = None


class ServerInfo(Wire):
    """Answer of `GET /info`: enough for a trainer to know that this is the right server."""

    instance: str  # another one after each start
    model: str  # as its --model names it
    engine: str
    engine_version: str
    vocab_size: int
    tokenizer_hash: str  # SHA-256 of the vocabulary
    weight_version: int  # while broken a lower bound for the next one
    broken: str | None  # why it holds no whole version, until a full push
    max_model_len: int  # tokens of prompt and completion
    max_n: int  # completions of a request
    max_images: int = 0  # of a prompt
    routes: bool = False  # requests may ask for the experts of tokens
    dtype: str  # of the weights
    max_lora_rank: int | None  # None where adapters alone are not accepted
    own_base: bool  # False once whole weights were pushed: an adapter would be applied to those
    nccl_workers: (
        int  # processes that take weights over NCCL, 0 without a GPU and for several copies
    )
    copies: int = 1  # of the model (`--vllm_data_parallel_size`)
    gpu: str | None = None  # of an engine with one; it takes weights in its memory
    can_sleep: bool = False
    # its numbers for a token do not depend on what it computes beside it
    batch_invariant: bool = False
    asleep: int = 0  # sleep level of the engine
    turns: TurnFlags = TurnFlags()


class LeaseRequest(Wire):
    """Takes the lease, or renews it with the `token` in force. A request that names its token, a random one of the
    client's own, may be repeated; without one the server makes it."""

    owner: str = Field(min_length=1, max_length=200)  # shown to who asks for it meanwhile
    # it ends after so long without a call
    ttl_seconds: float = Field(default=600.0, gt=0, le=86_400)
    token: str | None = Field(default=None, min_length=32, max_length=64, pattern="^[0-9a-f]+$")


class Lease(Wire):
    token: str  # for the header X-Swift-Lease
    ttl_seconds: float


class AdapterConfig(Wire):
    """A LoRA adapter: `W + alpha / rank * B A` for the weight `W` of each module that ends in a target module; with
    `rslora` the square root of the rank divides."""

    rank: int = Field(ge=1, le=4096)
    alpha: float = Field(gt=0)
    target_modules: Several[Text] = Field(min_length=1, max_length=4096)
    rslora: bool = False


class UpdateBegin(Wire):
    """Opens an update to `version`, any after the served one. With an `adapter` the buckets hold that alone, under
    peft's names, and the base weights stay. It is to go on to `relays` other servers, each by a `RelayRequest`."""

    version: Version
    adapter: AdapterConfig | None = None
    relays: int = Field(default=0, ge=0, le=1000)


class RelayRequest(Wire):
    """Passes the open update to `version` on to the server at `url`, where it is open too, under `lease`, the token of
    the lease there. `base` is what that server holds: what has changed goes on as that."""

    version: Version
    url: str = Field(pattern=RELAY_URL)
    lease: str = Field(min_length=32, max_length=64, pattern="^[0-9a-f]+$")
    base: Digest | None = None


class RelayStatus(Wire):
    """`whole`: the other server has all buckets; else the request is repeated."""

    whole: bool


class BucketFile(Wire):
    """Bucket `index` lies as `incoming-<index>` in the folder that `begin` named; `digest` is its XXH3."""

    version: Version
    index: int = Field(ge=0, lt=1_000_000)
    digest: Digest


class ChannelRequest(Wire):
    """Makes the engine's workers ranks 1, 2, ... of the NCCL group of this id (base64); the client is rank 0."""

    unique_id: str = Field(pattern="^[A-Za-z0-9+/]{171}=$")
    world_size: int = Field(ge=2, le=100_000)


class StreamedTensor(Wire):
    name: Text
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: Several[Annotated[int, Field(ge=1)]]


class DeviceMemory(Wire):
    """A block of the client's GPU memory (CUDA IPC), as torch names it: see `sync/transport.py`."""

    gpu: str = Field(pattern="^[0-9a-f-]{36}$")
    handle: str = Field(pattern="^[A-Za-z0-9+/]+=*$", max_length=65536)
    size: int = Field(ge=1)  # bytes
    offset: int = Field(ge=0)
    counter: str = Field(pattern="^/torch_[0-9_]+$", max_length=200)
    counter_offset: int = Field(ge=0)
    event: str = Field(pattern="^[A-Za-z0-9+/]*=*$", max_length=1024)
    waits: bool


class StreamedBucket(Wire):
    """Bucket `index` comes while the server answers: its tensors over NCCL, one broadcast from rank 0 each, or in
    `memory` of a GPU that the engine sees."""

    version: Version
    index: int = Field(ge=0, lt=1_000_000)
    tensors: Several[StreamedTensor] = Field(min_length=1)
    memory: DeviceMemory | None = None


class UpdateCommit(Wire):
    """Closes an update. `content_hash` is the XXH3 over the buckets' digests in order, each of the bucket's bytes, or
    for NCCL of its tensors' names, dtypes and shapes. `policy` is for running rollouts, None for the server's own."""

    version: Version
    buckets: int = Field(ge=1)
    content_hash: Digest
    policy: UpdatePolicy | None = None


class UpdateAbort(Wire):
    version: Version


class UpdateStatus(Wire):
    weight_version: int  # that is served
    pending_version: int | None  # of the open update
    buckets: int  # that have arrived
    seconds: float = 0.0  # that the load took
    # in shared memory, for buckets as files; only in the answer to `begin`
    folder: str | None = None
    # content hash of the version that buckets may come as changes to; there too
    base: Digest | None = None


class SleepRequest(Wire):
    """Level 1 keeps the weights in host memory; 2 discards them: only a full push makes the engine usable then."""

    level: Literal[1, 2] = 1


class SleepStatus(Wire):
    """`asleep` is the level, 0 for awake; `weight_version` and `broken` as of `ServerInfo`."""

    asleep: int
    weight_version: int
    broken: str | None


class ScoreRequest(Wire):
    """Body of `POST /v1/score`: log-probs of given tokens under the served weights (the weight probe, a teacher)."""

    sequences: Several[Several[TokenId]] = Field(min_length=1, max_length=256)  # token ids
    temperature: float = Field(default=1.0, ge=1e-3, le=1000.0)
    top: int = Field(default=0, ge=0, le=20)  # so many of the likeliest tokens in each place too
    every_copy: bool = True  # of a server with several copies of the model: ask each, or any


class ScoreResponse(Wire):
    """Holds for each sequence of length `L` the `L - 1` log-probs of tokens 1..L-1 given what precedes them; `copies`
    has those of the server's further copies of the model, where it has several. `top_ids` and `top_logprobs` have, for
    each of these tokens, the `top` likeliest in its place, likeliest first; what is left to 1 is the mass of all
    others."""

    logprobs: tuple[tuple[float, ...], ...]
    weight_version: int
    copies: tuple[tuple[tuple[float, ...], ...], ...] = ()
    top_ids: tuple[tuple[tuple[int, ...], ...], ...] = ()
    top_logprobs: tuple[tuple[tuple[float, ...], ...], ...] = ()


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 (hex) over the sorted vocabulary, added tokens included: trainer and server mean the same tokens."""
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True).encode()).hexdigest()


def completion_seed(run_seed: int, *where: object) -> int:
    """A completion's own seed, 63 bits, from the run's seed and its place in the run."""
    text = "/".join(map(str, (run_seed, *where)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class HTTPError(Exception):
    """Answers the request with `status` (4xx where the client is at fault, 503 for "not now") and one plain sentence;
    asking again makes sense after `retry_after` seconds."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after


class Overloaded(HTTPError):
    """The server is healthy but has no room for the request now."""


class ImagesMissing(HTTPError):
    """These images are to be sent first."""

    def __init__(self, missing: Sequence[str]) -> None:
        super().__init__(
            LACKS_IMAGES,
            f"{len(missing)} images are not here: PUT each to /v1/images/ and its hash",
        )
        self.missing = tuple(missing)


class LimitReached(HTTPError):
    """There is no more to be had, however often a client asks: `limit` is one of a session, or the model's length."""

    def __init__(self, status: int, message: str, limit: Limit) -> None:
        super().__init__(status, message)
        self.limit = limit


class EngineDead(Exception):
    """The engine's process has ended; only a restart of the server helps."""


class ServerRefused(RunFailed):
    """The server answered with another `status` than 200; the message has its sentence."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
