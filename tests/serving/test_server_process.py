"""The server as a process: what it refuses before it loads a model, HTTPS, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoConfig

from swift_r1.errors import EXIT_PORT_TAKEN, EXIT_USAGE, UsageError
from swift_r1.flags.server import RolloutArguments
from swift_r1.serving.engines.vllm_start import start_vllm
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.connections import ServerLoop
from swift_r1.wire.protocol import RolloutRequest, SamplingParams
from tests import forks
from tests.conftest import start_server, wait_until_gone


def run_server(folder: Path, **args: Any) -> subprocess.CompletedProcess[str]:
    (folder / "args.json").write_text(json.dumps({"args": args}))
    return forks.run(["-m", "swift_r1.serving.server", folder / "args.json"], timeout=120)


def test_a_taken_port_is_exit_4_before_the_model_loads(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run_server(tmp_path, model="no-such-model", port=port)
    assert done.returncode == EXIT_PORT_TAKEN
    assert f"port {port} on 127.0.0.1 is taken" in done.stderr


def test_an_open_address_needs_a_key(tmp_path: Path) -> None:
    done = run_server(tmp_path, model="no-such-model", host="0.0.0.0", port=0)
    assert done.returncode == EXIT_USAGE and "--api_key" in done.stderr


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    files = folder / f"{name}.pem", folder / f"{name}.key"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    ]
    extra = [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-out",
        str(files[0]),
        "-keyout",
        str(files[1]),
    ]
    subprocess.run([*words, *extra], check=True, capture_output=True, timeout=60)
    return files


def rollout(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "swift_r1", "rollout", "--model", "no-such-model", *words]
    return forks.run(command, timeout=60)


def test_a_certificate_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    (one, key), (_other, wrong_key) = certificate(tmp_path, "one"), certificate(tmp_path, "other")
    for words, said in (
        (("--ssl_certfile", str(one)), "--ssl_certfile and --ssl_keyfile go together"),
        (
            ("--ssl_certfile", str(one), "--ssl_keyfile", str(tmp_path / "none")),
            "none: no readable file",
        ),
        (("--ssl_certfile", str(one), "--ssl_keyfile", str(wrong_key)), "are not a pair in PEM"),
        (("--ssl_certfile", str(key), "--ssl_keyfile", str(key)), "are not a pair in PEM"),
    ):
        done = rollout(*words)
        assert done.returncode == EXIT_USAGE and said in done.stderr, done.stderr


@pytest.mark.long
def test_vllm_beside_another_torch(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by their metadata, in place of an engine that dies with `undefined symbol`."""
    (tmp_path / "torch-0.dist-info").mkdir()
    (tmp_path / "torch-0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.12.0\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    done = run_server(tmp_path, model=str(tiny_model), port=0)
    assert done.returncode == EXIT_USAGE, done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        "needs torch 2.13, and 2.12.0 is installed: pip install torch==2.13.0"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("deepseek_v3", "vLLM's latent attention (MLA) computes another distribution on a CPU"),
        ("deepseek_v32", "vLLM has no sparse attention on a CPU"),
        ("kimi_linear", "vLLM has no kernels of Kimi Linear on a CPU"),
        ("lfm2_moe", "vLLM computes another distribution of a mixture of LFM2's on a CPU"),
        ("qwen3_next", "vLLM computes the layers of qwen3_next only in bfloat16 on a CPU"),
        ("gpt_oss", "vLLM's engine ends at the first completion of a gpt-oss on a CPU"),
        ("gemma3", "vLLM lets no token of an image see those behind it on a CPU"),
        ("aria", "vLLM's tower reads the padding of images that are not square on a CPU"),
    ],
)
def test_what_vllm_does_not_serve_on_a_cpu(tmp_path: Path, family: str, why: str) -> None:
    if not pytest.importorskip("vllm.platforms").current_platform.is_cpu():
        pytest.skip("vLLM is a GPU's here")
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=re.escape(why) + ".* use the embedded engine"):
        start_vllm(
            RolloutArguments(
                model=str(tmp_path),
                torch_dtype="float32",
                vllm_limit_mm_per_prompt={"image": int(family in ("gemma3", "aria"))},
            ),
            0,
        )


def test_https(
    tmp_path: Path, tiny_model: Path, start_tiny: Callable[..., Any], monkeypatch: Any
) -> None:
    """The client takes the certificates that SSL_CERT_FILE names, and no others."""
    one, key = certificate(tmp_path, "one")
    server = start_tiny(tiny_model, ssl_certfile=str(one), ssl_keyfile=str(key))
    url = server.url.replace("http:", "https:")
    monkeypatch.setenv("SSL_CERT_FILE", str(one))
    with RolloutClient(url) as client:
        assert client.wait_until_ready(120).engine == "tiny"
        asked = RolloutRequest(
            request_id="r",
            prompt_token_ids=(1, 2),
            seeds=(1,),
            sampling=SamplingParams(max_tokens=2),
        )
        assert client.generate([asked])[0].completions
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate(tmp_path, "stranger")[0]))
    # certificates are read, and connections kept, once for a process: this is as another one
    monkeypatch.setattr(ServerLoop, "_shared", None)
    with (
        RolloutClient(url) as stranger,
        pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        stranger.info()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_running_generations_end(
    tiny_model: Path, start_tiny: Callable[..., Any], number: signal.Signals, code: int
) -> None:
    server = start_tiny(tiny_model)
    with RolloutClient(server.url) as client:
        client.wait_until_ready(120)
    check_drain(server, number, code)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_vllms_processes_too_let_them_end(
    tiny_model: Path, launch_server: Callable[..., Any], number: signal.Signals, code: int
) -> None:
    check_drain(launch_server(tiny_model, torch_dtype="float32"), number, code)


ENDS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]


@pytest.mark.parametrize(("number", "code"), ENDS)
def test_a_signal_while_the_model_loads_ends_it(
    tiny_model: Path, start_tiny: Callable[..., Any], number: signal.Signals, code: int
) -> None:
    server = start_tiny(tiny_model)
    wait_until(server, lambda: listens(server.port))
    check_end(server, number, code)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), ENDS)
def test_a_signal_while_vllm_loads_leaves_nothing_behind(
    tiny_model: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    server = start_server(tmp_path, tiny_model, torch_dtype="float32")
    try:
        # Its engine has begun: a process beside the tracker of its shared memory.
        wait_until(server, lambda: len(server.below()) >= 2)
        check_end(server, number, code)
    finally:
        server.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", [{}, {"vllm_tensor_parallel_size": 2}, {"vllm_data_parallel_size": 2}]
)
def test_sigkill_of_the_server_alone_ends_vllm(
    tiny_model: Path, launch_server: Callable[..., Any], flags: dict[str, int]
) -> None:
    check_end(
        launch_server(tiny_model, torch_dtype="float32", **flags), signal.SIGKILL, -signal.SIGKILL
    )


def check_end(server: Any, number: signal.Signals, code: int) -> None:
    """The signal, to the server alone, ends it and whatever it has started within 5 s."""
    below = server.below()
    server.process.send_signal(number)
    assert server.process.wait(5) == code
    wait_until_gone(below)


def wait_until(server: Any, what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert server.process.poll() is None and time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.01)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def check_drain(server: Any, number: signal.Signals, code: int) -> None:
    """A signal to the server (Ctrl-C: to all its processes, as a terminal sends it) while it generates."""
    sampling = SamplingParams(max_tokens=150, ignore_eos=True)
    lengths: list[int] = []

    def generate() -> None:
        asked = RolloutRequest(
            request_id="r", prompt_token_ids=(1, 2), n=2, seeds=(1, 2), sampling=sampling
        )
        with RolloutClient(server.url) as client:
            lengths.extend(len(one.token_ids) for one in client.generate([asked])[0].completions)

    thread = threading.Thread(target=generate)
    thread.start()
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        while "swift_running_requests 1.0" not in http.get("/metrics").text:
            assert thread.is_alive()
    if number == signal.SIGINT:
        os.killpg(server.process.pid, number)
    else:
        server.process.send_signal(number)
    thread.join(60)
    assert lengths == [150] * 2
    assert server.process.wait(60) == code
