"""`swift rollout`: checks, then becomes the server process."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from swift_r1.cli.merge_lora import base_model, merged_folder
from swift_r1.errors import PortTaken, UsageError
from swift_r1.flags.fields import as_words
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.server import RolloutArguments, host_faults
from swift_r1.launch.checks.model_folder import dtype_here, is_local, model_faults
from swift_r1.launch.environment import (
    file_in_memory,
    has_gpu,
    new_environment,
    replace_process,
    server_environment,
)
from swift_r1.runtime.hardware import usable_cpus
from swift_r1.runtime.libraries import vllm_faults
from swift_r1.runtime.processes import say

SERVER_MODULE = "swift_r1.serving.server"
_USAGE = "swift rollout --model FOLDER_OR_ID [config.yaml] [--flag value ...]: serve generations and take weight updates"
_EXAMPLES = """
swift rollout --model models/smollm2-135m --port 8000
swift rollout --adapters output/model/v0-20261121-120000/checkpoint-100
SWIFT_API_KEY=secret swift rollout --model Qwen/Qwen2.5-3B-Instruct --host 0.0.0.0
"""
HELP = (_USAGE, RolloutArguments, _EXAMPLES)


def run(words: Sequence[str]) -> int:
    """Runs the command; does not come back where the server starts.

    Raises:
        UsageError: bad flags, model folder or address.
        PortTaken: another process listens on the port.
    """
    args = parse_arguments(RolloutArguments, words)
    adapters = Path(args.adapters).expanduser() if args.adapters else None
    faults = host_faults(args.host, args.api_key) + _tls_faults(args)
    try:
        base = args.model if adapters is None else base_model(adapters, args.model or None)
        faults += [] if adapters is not None else model_faults(base, os.environ)
    except UsageError as error:
        faults += error.faults
    faults += turn_faults(args) + vllm_faults()
    if faults:
        raise UsageError(*faults)
    check_port(args.host, args.port)
    for line in args.about_flags:
        print(line, file=sys.stderr)
    if args.turn_flags:
        say(
            f"{' '.join(as_words(args.turn_flags))}: the trainer is told (GET /info), and runs the turns",
            "rollout",
        )
    if adapters is not None:
        print(f"merging {adapters} into {base}", file=sys.stderr)
        args = replace(args, model=str(merged_folder(adapters, base, os.environ)))
    gpu = has_gpu(os.environ)
    dtype, about_dtype = dtype_here(args.model, args.torch_dtype, gpu)
    if about_dtype is not None:
        say(about_dtype, "rollout")
    args = replace(args, torch_dtype=dtype)
    added = server_environment(
        os.environ,
        offline=is_local(args.model),
        cpus=usable_cpus(),
        gpu=gpu,
        engines=args.vllm_tensor_parallel_size * args.vllm_data_parallel_size,
    )
    # The key is not in the file, but in the environment.
    environ = new_environment(os.environ, added, args.secrets)
    content = {"args": args.to_dict() | {"merged": adapters is not None}}
    replace_process(SERVER_MODULE, (file_in_memory("swift-rollout-args", content),), environ)


def turn_faults(args: RolloutArguments) -> list[str]:
    """Says why the trainer could not run the turns that are named, as far as this machine can tell."""
    if not args.external_plugins and not args.scheduler_name:
        return []
    from swift_r1.launch.checks.names import scheduler_name_faults
    from swift_r1.plugins import load_plugins

    try:
        load_plugins(args.external_plugins)
    except UsageError as error:
        return list(error.faults)
    return scheduler_name_faults(args)


def check_port(host: str, port: int) -> None:
    """Says whether the server will be able to listen there.

    Raises:
        PortTaken: another process listens.
        UsageError: the address is not this machine's, or the port is not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise UsageError(f"--host {host}: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} of {host} is taken: another server listens there; give another --port"
            ) from error
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}") from error


def _tls_faults(args: RolloutArguments) -> list[str]:
    """Says why the certificate and key cannot be used, told before the model loads."""
    if args.ssl_certfile is None or args.ssl_keyfile is None:
        return []
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(args, name)
        if not os.access(path, os.R_OK) or os.path.isdir(path):
            return [f"--{name} {path}: no readable file"]
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
    except (ssl.SSLError, ValueError) as error:
        return [
            f"--ssl_certfile {args.ssl_certfile} and --ssl_keyfile {args.ssl_keyfile} are not a pair in PEM: {error}"
        ]
    return []
