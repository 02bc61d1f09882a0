"""`make bundle`: an archive for a machine with an NVIDIA GPU and no network (docs/install.md, "Without a network").

    make bundle BUNDLE_ARGS='--python 3.12 --torch 2.11 --arch sm_90'
    make bundle BUNDLE_ARGS='--have have.txt'     # what `python3 -m pip list --format=freeze` says over there

There, with the packages that the machine has:

    mkdir site && tar -xJf swift-r1-3.12-sm_90.tar.xz -C site
    PYTHONPATH=$PWD/site python3 -m swift_r1 doctor

vLLM's libraries hold machine code for seven kinds of GPU: only that of `--arch` is kept.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).parent / "uv"
# Of the packages of uv.lock, what the trainer, the server and vLLM's engine for dense and MoE text models import beside
# torch and transformers.
CARRIED = """
annotated-doc annotated-types antlr4-python3-runtime datasets deepspeed dill fastapi hjson latex2sympy2-extended math-verify
multiprocess pydantic pydantic-core starlette typing-inspection uvicorn
apache-tvm-ffi astor blake3 cachetools cbor2 compressed-tensors depyf distro httpcore2 httpx2 jiter llguidance loguru
msgspec openai opentelemetry-api oss-harmony partial-json-parser pybase64 pyzmq setproctitle sniffio truststore vllm
xgrammar
"""
# Never imported by the models and chips that a bundle is for: a front end in Rust, and kernels for Blackwell that the
# others are compiled from at run time.
LEFT_OUT = (
    "bin",
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",
    "vllm/third_party/tml_fa4",
    "vllm/benchmarks",
    "vllm/entrypoints/serve/instrumentator/static",
)
# cuobjdump's "fatbin": a header, then an entry for each architecture
_CONTAINER = struct.pack("<I", 0xBA55ED50)
_PTX, _CUBIN = 1, 2


@dataclass(frozen=True)
class Entry:
    """One architecture's code in a fatbin: `kind` is `_PTX` or `_CUBIN`, `sm` 90 for sm_90 and sm_90a."""

    kind: int
    sm: int
    start: int
    size: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="that machine's Python [%(default)s]")
    parser.add_argument(
        "--torch", default="2.11", help="that machine's torch, from 2.11 [%(default)s]"
    )
    parser.add_argument("--arch", default="sm_90", help="its GPU's architecture [%(default)s]")
    parser.add_argument(
        "--have", type=Path, help="its `pip list --format=freeze`: what it names is not carried"
    )
    args = parser.parse_args()
    arch = re.fullmatch(r"sm_(\d+)a?", args.arch)
    if arch is None:
        parser.error(f"--arch {args.arch}: not like sm_90")
    there = args.have.read_text().split() if args.have else []
    have = {re.sub(r"[-_.]+", "-", line.split("=")[0]).lower() for line in there}
    site = ROOT / "build" / "bundle"
    shutil.rmtree(site, ignore_errors=True)
    unpack([name for name in CARRIED.split() if name not in have], args.python, site)
    if (site / "vllm").is_dir():
        trim(site, args.torch, int(arch[1]))
    archive = ROOT / "dist" / f"swift-r1-{args.python}-{args.arch}.tar.xz"
    archive.parent.mkdir(exist_ok=True)
    size = sum(file.stat().st_size for file in site.rglob("*"))
    print(f"packing {size / 1e6:.0f} MB, a few minutes", flush=True)
    with tarfile.open(archive, "w:xz", preset=9) as out:
        out.add(site, ".")
    print(f"{archive}  {archive.stat().st_size / 2**20:.1f} MiB", flush=True)


def unpack(names: list[str], python: str, site: Path) -> None:
    """Installs the locked versions of packages for that Python on x86-64 Linux into a folder, without a copy of their
    scripts. DeepSpeed is built here, which compiles nothing."""
    export = "export -q --frozen --no-dev --no-emit-project --no-annotate --no-hashes --extra gpu"
    locked = subprocess.check_output([UV, *export.split()], cwd=ROOT, text=True).splitlines()
    wanted = [line for line in locked if line.partition("==")[0] in names]
    if len(wanted) != len(names):
        raise SystemExit(f"uv.lock has {len(wanted)} of the {len(names)} packages {names}")
    print(f"{len(wanted)} packages for Python {python}", flush=True)
    target = f"--target {site} --python-version {python} --python-platform x86_64-manylinux_2_34"
    how = "--no-deps --no-build-isolation --link-mode copy -q -r -"
    subprocess.run(
        [UV, "pip", "install", "--python", sys.executable, *target.split(), *how.split()],
        input="\n".join(wanted),
        text=True,
        check=True,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
    )
    for name in LEFT_OUT:
        left_out = site / name
        if left_out.is_dir():
            shutil.rmtree(left_out)
        else:
            left_out.unlink(missing_ok=True)


def trim(site: Path, torch: str, arch: int) -> None:
    """Keeps vLLM's code for one architecture, and has its metadata ask for that machine's torch: its libraries use only
    the stable interface."""
    other = "3" if arch != 90 else "2"  # FlashAttention 3 is for Hopper alone, 2 for all
    (site / "vllm" / "vllm_flash_attn" / f"_vllm_fa{other}_C.abi3.so").unlink()
    for library in sorted((site / "vllm").rglob("*.so")):
        with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            for entry in superfluous(data, arch):
                data[entry.start : entry.start + entry.size] = bytes(entry.size)
    (metadata,) = site.glob("vllm-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(
        re.sub(r"(?m)^(Requires-Dist: torch==)\S+", rf"\g<1>{torch}.*", text), encoding="utf-8"
    )


def superfluous(data: mmap.mmap, arch: int) -> Iterator[Entry]:
    """Yields the code that a GPU of `arch` never loads: all but its own, or where a kernel has none, all but the newest
    PTX that the driver can compile for it."""
    for entries in containers(data):
        own = [entry for entry in entries if entry.kind == _CUBIN and entry.sm == arch]
        older = [entry for entry in entries if entry.kind == _PTX and entry.sm <= arch]
        kept = own or sorted(older, key=lambda entry: entry.sm)[-1:]
        yield from (entry for entry in entries if entry not in kept)


def containers(data: mmap.mmap) -> Iterator[list[Entry]]:
    """Yields the entries of each fatbin: <magic u32, version u16 = 1, header u16 = 16, size u64>, then for each entry
    <kind u16, version u16, header u32, size u64, 12 bytes, sm u32, ...> and its code."""
    start = data.find(_CONTAINER)
    while start >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, start + 4)
        end = start + 16 + size
        if (version, header) != (1, 16) or end > len(data):  # the same four bytes in other data
            start = data.find(_CONTAINER, start + 4)
            continue
        entries = []
        place = start + 16
        while place < end:
            kind, _version, own_header, length = struct.unpack_from("<HHIQ", data, place)
            (sm,) = struct.unpack_from("<I", data, place + 28)
            entries.append(Entry(kind, sm, place + own_header, length))
            place += own_header + length
        yield entries
        start = data.find(_CONTAINER, end)


if __name__ == "__main__":
    main()
