"""`make bundle`: an archive for a machine with an NVIDIA GPU and no network (docs/install.md, "Without a network").

    python3 scripts/bundle.py --python 3.12 --torch 2.11 --arch sm_90
    python3 scripts/bundle.py --have have.txt     # what `python3 -m pip list --format=freeze` says over there

There, with the packages that the machine has:

    mkdir site && tar -xJf swift-r1-3.12-sm_90.tar.xz -C site
    PYTHONPATH=$PWD/site python3 -m swift_r1 doctor

The packages are those of requirements/bundle.in in the versions of requirements/gpu.txt. vLLM's libraries hold machine
code for seven kinds of GPU: only that of `--arch` is kept.
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
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
# Never imported by the models and chips that a bundle is for: a front end in Rust, and kernels for Blackwell that the
# others are compiled from at run time.
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/",
    "vllm/third_party/fmha_sm100/",
    "vllm/third_party/tml_fa4/",
    "vllm/benchmarks/",
    "vllm/entrypoints/serve/instrumentator/static/",
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
        prog="scripts/bundle.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--python", default="3.12", help="that machine's Python [%(default)s]")
    parser.add_argument(
        "--torch", default="2.11", help="that machine's torch, from 2.11 [%(default)s]"
    )
    parser.add_argument("--arch", default="sm_90", help="its GPU's architecture [%(default)s]")
    parser.add_argument(
        "--have", type=Path, help="its `pip list --format=freeze`: what it names is not carried"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder of the archive [%(default)s]"
    )
    args = parser.parse_args()
    arch = re.fullmatch(r"sm_(\d+)a?", args.arch)
    if arch is None:
        parser.error(f"--arch {args.arch}: not like sm_90")
    have = (
        set()
        if args.have is None
        else {_plain(line.split("=")[0]) for line in args.have.read_text().split()}
    )
    wanted = [pin for name, pin in pins().items() if name not in have]
    work = ROOT / "build" / "bundle"
    shutil.rmtree(work, ignore_errors=True)
    site = work / "site"
    print(f"{len(wanted)} packages for Python {args.python}", flush=True)
    for wheel in wheels(wanted, args.python, work / "wheels"):
        unpack(wheel, site)
    if (site / "vllm").is_dir():
        trim(site, args.torch, int(arch[1]))
    args.out.mkdir(parents=True, exist_ok=True)
    archive = args.out / f"swift-r1-{args.python}-{args.arch}.tar.xz"
    print(
        f"packing {sum(file.stat().st_size for file in site.rglob('*')) / 1e6:.0f} MB, a few minutes",
        flush=True,
    )
    with tarfile.open(archive, "w:xz", preset=9) as out:
        out.add(site, ".")
    print(f"{archive}  {archive.stat().st_size / 2**20:.1f} MiB", flush=True)


def pins() -> dict[str, str]:
    """Returns `name==version` by normalised name, for the names of bundle.in. Raises SystemExit: one is not pinned."""
    locked = {}
    for line in (REQUIREMENTS / "gpu.txt").read_text().splitlines():
        name, separator, _version = line.partition("==")
        if separator:
            locked[_plain(name)] = line
    names = [
        _plain(line)
        for line in (REQUIREMENTS / "bundle.in").read_text().splitlines()
        if line[:1] not in ("", "#")
    ]
    unknown = [name for name in names if name not in locked]
    if unknown:
        raise SystemExit(
            f"requirements/gpu.txt does not pin {', '.join(unknown)}: run scripts/lock.sh"
        )
    return {name: locked[name] for name in names}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wheels(pinned: list[str], python: str, folder: Path) -> list[Path]:
    """Downloads each package's wheel for that Python on x86-64 Linux; two that have none are built here, which compiles
    nothing."""
    platforms = ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
    platforms += [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    target += [word for platform in platforms for word in ("--platform", platform)]
    built = {"deepspeed", "antlr4-python3-runtime"}
    ready = [pin for pin in pinned if _plain(pin.split("==")[0]) not in built]
    source = [pin for pin in pinned if pin not in ready]
    _run([*pip, "download", "--no-deps", *target, "-d", str(folder), *ready])
    if source:
        _run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), *source])
    return sorted(folder.glob("*.whl"))


def _run(words: list[str]) -> None:
    code = subprocess.run(words, env=os.environ | {"DS_ACCELERATOR": "cpu"}, check=False).returncode
    if code:
        raise SystemExit(f"{' '.join(words[:6])} ... ended with {code}")


def unpack(wheel: Path, site: Path) -> None:
    """Unpacks a wheel as pip's --target would; its scripts are left out."""
    with zipfile.ZipFile(wheel) as content:
        for member in content.infolist():
            name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", member.filename)
            if ".data/" in name or name.startswith(LEFT_OUT) or member.is_dir():
                continue
            target = site / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with content.open(member) as read, target.open("wb") as write:
                shutil.copyfileobj(read, write)


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
