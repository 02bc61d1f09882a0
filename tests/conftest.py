"""Fixtures for everybody: tiny models, and real rollout servers that all tests of a session share."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forks

REPO = Path(__file__).resolve().parent.parent
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def save_tiny_tokenizer(folder: Path) -> int:
    """A chat tokenizer with a token for each printable ASCII character and each tag; returns its size."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    symbols = [*special, *TAGS, "\n", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(
        models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<|endoftext|>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens(list(TAGS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)
    return len(fast)


def save_tiny_model(
    folder: Path,
    kind: str = "llama",
    tied: bool = True,
    seed: int = 0,
    dtype: str = "float32",
    **sizes: Any,
) -> Path:
    """A random 2-layer model (hidden 64, heads of 32, float32) with the tiny tokenizer, spread enough to have
    opinions: its next-token distributions are far from uniform. `sizes` are fields of the config that are otherwise."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    size = save_tiny_tokenizer(folder)
    fields = {
        "vocab_size": size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
    } | sizes
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](
        **fields,
        head_dim=fields["hidden_size"] // fields["num_attention_heads"],
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Gives every registry back as it was: a plugin that one test loads is not there in the next."""
    from swift_r1.data import registry
    from swift_r1.data.sampler import samplers
    from swift_r1.data.tool_registry import tools
    from swift_r1.plugins import loader, protocol, rollouts
    from swift_r1.plugins.agents import agents
    from swift_r1.plugins.tools import mcp_servers
    from swift_r1.rewards import orms

    everything = (
        *(
            orms,
            registry.datasets,
            registry._origins,
            loader._LOADED,
            mcp_servers._REGISTERED,
            protocol.prms,
            protocol.rm_plugins,
        ),
        *(rollouts.multi_turns, rollouts.envs, rollouts.context_managers, agents, samplers, tools),
    )
    before = [dict(one) for one in everything]
    yield
    for one, content in zip(everything, before, strict=True):
        one.clear()
        one.update(content)


class ProcessState:
    """What a test must leave as it was, since the tests after it would see it: levels of our loggers,
    `logging.disable`, the current folder, handlers of signals, and whether setuptools has its own distutils."""

    OF_A_PROGRAM = (("level of swift_r1", logging.INFO), ("level of swift_r1.data", logging.INFO))
    """What `swift_r1.cli.main.main` sets for the process that it takes itself for; it is put back without a word."""
    SIGNALS = (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGCHLD,
        signal.SIGUSR1,
        signal.SIGPIPE,
    )

    def __init__(self) -> None:
        self._known = -1
        self._loggers: dict[str, logging.Logger] = {}

    def look(self) -> dict[str, Any]:
        """Takes some 20 microseconds: all loggers are searched only where there are new ones."""
        loggers = logging.root.manager.loggerDict
        if len(loggers) != self._known:
            self._known = len(loggers)
            ours = {name: one for name, one in list(loggers.items()) if name.startswith("swift_r1")}
            self._loggers = {
                name: one for name, one in ours.items() if isinstance(one, logging.Logger)
            }
        levels = {f"level of {name}": one.level for name, one in self._loggers.items() if one.level}
        handlers = {
            f"handler of {number.name}": signal.getsignal(number) for number in self.SIGNALS
        }
        # A search for the module `pip` takes it away for ever; then nothing can import setuptools.
        hack = getattr(sys.modules.get("_distutils_hack"), "DISTUTILS_FINDER", None)
        others = {
            "logging.disable": logging.root.manager.disable,
            "current folder": os.getcwd(),
            "distutils of setuptools": hack is None or "spec_for_distutils" not in vars(hack),
        }
        return levels | handlers | others

    def changes(self, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        """Returns what is otherwise, in words."""
        names = [
            name
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)
        ]
        return [
            f"{name}, {before.get(name)}, became {after.get(name)}"
            for name in names
            if (name, after.get(name)) not in self.OF_A_PROGRAM
            and getattr(after.get(name), "__module__", "") != "swift_r1.cli.main"
        ]

    def put_back(self, before: dict[str, Any]) -> None:
        for name, one in self._loggers.items():
            one.setLevel(before.get(f"level of {name}", logging.NOTSET))
        for number in self.SIGNALS:
            signal.signal(number, before[f"handler of {number.name}"])
        logging.disable(before["logging.disable"])
        os.chdir(before["current folder"])
        hack = getattr(sys.modules.get("_distutils_hack"), "DISTUTILS_FINDER", None)
        if before["distutils of setuptools"] and hack is not None:
            vars(hack).pop("spec_for_distutils", None)


_state = ProcessState()


@pytest.fixture(autouse=True)
def nothing_left_changed() -> Iterator[None]:
    """Fails a test that leaves the process otherwise than it was (`ProcessState`)."""
    before = _state.look()
    yield
    after = _state.look()
    if after != before:
        _state.put_back(before)
        changes = _state.changes(before, after)
        if changes:
            pytest.fail(f"the test left changed: {'; '.join(changes)}")


@pytest.fixture(scope="session", autouse=True)
def own_data_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prepared rows of the tests, and of the processes that they start, are kept apart from the user's."""
    os.environ["SWIFT_R1_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def save_model() -> Callable[..., Path]:
    """`save_tiny_model`."""
    return save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama with tied embeddings (the case in which an output head can go stale)."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama-tied")


@pytest.fixture(scope="session")
def tiny_model_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen2 (biases) with an output head of its own."""
    return save_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny-qwen2", kind="qwen2", tied=False
    )


@pytest.fixture(scope="session")
def thinking_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama whose end token is not its template's, which opens the model's turn with `<think>`."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    folder = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-thinking-base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
    tokenizer.save_pretrained(folder)
    for kind in (AutoConfig, GenerationConfig):
        config = kind.from_pretrained(folder)
        config.eos_token_id = tokenizer.eos_token_id
        config.save_pretrained(folder)
    return folder


@dataclass
class ServerProcess:
    """A running `swift rollout`; `process` is the server itself."""

    url: str
    port: int
    process: subprocess.Popen[bytes] | forks.ForkedProcess
    log: Path

    def below(self) -> list[psutil.Process]:
        """What it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def kill(self) -> None:
        """SIGKILL to the server alone: what it has started ends with it."""
        below = self.below()
        self.process.kill()
        self.process.wait(10)
        wait_until_gone(below)

    def stop(self) -> None:
        """SIGTERM to the server alone, and SIGKILL after 20 s; nothing that it has started may be left then."""
        below = self.below()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        wait_until_gone(below)


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that run; nobody may have collected what has ended."""

    def lives(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    return [one for one in processes if lives(one)]


def wait_until_gone(processes: Iterable[psutil.Process], within_s: float = 5.0) -> None:
    """Fails, and kills them, where some still run after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while left := living(processes):
        if time.monotonic() > deadline:
            for one in left:
                one.kill()
            pytest.fail(f"still there after {within_s:g} s: {left}")
        time.sleep(0.05)


def until(what: Callable[[], Any], within_s: float = 60.0) -> Any:
    """The first true answer of `what`."""
    end = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)
    return found


def free_port() -> int:
    """A port below the range that the system hands out itself, so that none is taken before the server binds it.

    Where several processes run the tests, none gets another one's.
    """
    processes, own = (
        int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
        os.environ.get("PYTEST_XDIST_WORKER", "gw0"),
    )
    while True:
        port = random.SystemRandom().randrange(
            20_000 + int(own.removeprefix("gw")) % processes, 32_000, processes
        )
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start_server(folder: Path, model: Path, **args: Any) -> ServerProcess:
    """Starts `swift rollout` without waiting for it; `args` are its flags. The log goes to `folder`."""
    port = args.pop("port", None) or free_port()
    cache = {"kv_cache_memory_bytes": 64 << 20}
    flags = {"model": model, "port": port, "update_timeout": 60, "vllm_engine_kwargs": cache} | args
    words = [
        word
        for name, value in flags.items()
        for word in (f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "swift_r1", "rollout", *words],
            cwd=REPO,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return ServerProcess(f"http://127.0.0.1:{port}", port, process, log)


def start_tiny_server(
    folder: Path, model: Path, port: int | None = None, **config: Any
) -> ServerProcess:
    """Starts `tests/tiny_server.py`, without waiting for it: HTTP and updates of the real server, up in seconds.

    `config` are fields of its RolloutArguments.
    """
    port = port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    with log.open("ab") as out:
        process = forks.start(
            [str(REPO / "tests" / "tiny_server.py"), str(model), str(port), json.dumps(config)],
            stdout=out,
            stderr=forks.STDOUT,
        )
    return ServerProcess(f"http://127.0.0.1:{port}", port, process, log)


def wait_until_serving(
    server: ServerProcess, api_key: str | None = None, deadline_s: float = 240.0
) -> None:
    """Fails with the end of the server's log if it dies or is not ready in time."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    end = time.monotonic() + deadline_s
    plain: Any = {"trust_env": False, "verify": False}  # certificates take 40 ms to read
    with httpx.Client(headers=headers, timeout=5, **plain) as http:
        while time.monotonic() < end:
            code = server.process.poll()
            if code is not None:
                pytest.fail(f"the server ended with {code}:\n{server.log.read_text()[-4000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if http.get(f"{server.url}/ready").status_code == 200:
                    return
            time.sleep(0.2)
    pytest.fail(
        f"the server was not ready within {deadline_s} s:\n{server.log.read_text()[-4000:]}"
    )


@pytest.fixture(scope="session")
def launch_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., ServerProcess]]:
    """`launch_server(model, **flags) -> ServerProcess` that serves; a new one at each call, stopped at the end."""
    running: list[ServerProcess] = []

    def launch(model: Path, **args: Any) -> ServerProcess:
        server = start_server(tmp_path_factory.mktemp("rollout-server"), model, **args)
        running.append(server)
        wait_until_serving(server, args.get("api_key"))
        return server

    yield launch
    for server in running:
        server.stop()


@pytest.fixture
def start_tiny(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """`start_tiny(model, **config) -> ServerProcess`, one of the test's own."""
    running: list[ServerProcess] = []

    def start(model: Path, **config: Any) -> ServerProcess:
        running.append(start_tiny_server(tmp_path / f"tiny-{len(running)}", model, **config))
        return running[-1]

    yield start
    for server in running:
        server.stop()


class KillableServer:
    """A server at one address that can be killed and started anew.

    Args:
        start: `start(model, port)` starts one without waiting; port None takes a free one.
    """

    def __init__(self, start: Callable[[Path, int | None], ServerProcess], model: Path) -> None:
        self._start, self.model = start, model
        self.server = start(model, None)
        self.url = self.server.url

    @property
    def pid(self) -> int:
        return self.server.process.pid

    def kill(self) -> None:
        self.server.kill()

    def start(self, model: Path | None = None) -> None:
        """Only after `kill`; does not wait."""
        self.server = self._start(model or self.model, self.server.port)

    def wait(self) -> None:
        wait_until_serving(self.server)


@pytest.fixture(scope="session")
def _tiny_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KillableServer]:
    folder = tmp_path_factory.mktemp("tiny-server")
    server = KillableServer(lambda model, port: start_tiny_server(folder, model, port), tiny_model)
    yield server
    server.server.stop()


@pytest.fixture
def tiny_server(_tiny_server: KillableServer) -> KillableServer:
    """One for all tests, started anew where a test has left it dead; its weights are whatever was pushed last."""
    if _tiny_server.server.process.poll() is not None:
        _tiny_server.start()
    _tiny_server.wait()
    return _tiny_server


@pytest.fixture(scope="session")
def _second_tiny_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KillableServer]:
    folder = tmp_path_factory.mktemp("second-tiny-server")
    server = KillableServer(lambda model, port: start_tiny_server(folder, model, port), tiny_model)
    yield server
    server.server.stop()


@pytest.fixture
def second_tiny_server(_second_tiny_server: KillableServer) -> KillableServer:
    """As `tiny_server`, beside it."""
    if _second_tiny_server.server.process.poll() is not None:
        _second_tiny_server.start()
    _second_tiny_server.wait()
    return _second_tiny_server


@pytest.fixture
def killable_vllm(tiny_model: Path, tmp_path: Path) -> Iterator[KillableServer]:
    """`swift rollout` of the tiny model in float32, for tests that kill it."""

    def start(model: Path, port: int | None) -> ServerProcess:
        return start_server(tmp_path / "server", model, torch_dtype="float32", port=port)

    server = KillableServer(start, tiny_model)
    server.wait()
    yield server
    server.server.stop()


@pytest.fixture(scope="session")
def rollout_servers() -> dict[str, ServerProcess]:
    """What `rollout_server` has started."""
    return {}


@pytest.fixture(scope="session")
def rollout_server(
    launch_server: Callable[..., ServerProcess], rollout_servers: dict[str, ServerProcess]
) -> Callable[..., str]:
    """`rollout_server(model, **flags) -> url`, one server for each model and flags in the whole session.

    Tests that share one must not rely on its weights being the folder's, nor leave it broken; the last one may end it.
    """

    def serve(model: Path, **args: Any) -> str:
        key = json.dumps([str(model), args], sort_keys=True, default=str)
        if key not in rollout_servers or rollout_servers[key].process.poll() is not None:
            rollout_servers[key] = launch_server(model, **args)
        return rollout_servers[key].url

    return serve
