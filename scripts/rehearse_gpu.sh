#!/usr/bin/env bash
# `make rehearse-gpu [PYTHON=python3.12]`: a machine with a GPU and no network, without its GPU. In .venv-gpu: Python 3.12,
# torch 2.11 for CUDA and what such machines have, nothing else; beside it only what `make bundle` carries, and a libcuda
# that does nothing. Every import of the trainer, the engine and the server must succeed there, and the parts of
# `scripts/gpu` that need no vLLM must pass, a short `swift rlhf --use_vllm false` among them.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3.12}
venv=.venv-gpu
site=build/gpu-site
mkdir -p build
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
    { echo "make rehearse-gpu: no Python 3.12 at $python: say where it is with PYTHON=" >&2; exit 2; }
command -v gcc >/dev/null || { echo "make rehearse-gpu: it needs gcc, for the stand-in of libcuda" >&2; exit 2; }

if [ ! -f "$venv/installed" ]; then
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -r requirements/gpu-machine.in
    # Brought along by transformers' tools, and not on such a machine.
    "$venv/bin/python" -m pip uninstall -q -y pydantic pydantic-core annotated-types typing-inspection
    touch "$venv/installed"
fi
archive=dist/swift-r1-3.12-sm_90.tar.xz
[ "$archive" -nt requirements/bundle.in ] || {
    "$venv/bin/python" -m pip list --disable-pip-version-check --format=freeze >build/have.txt
    make bundle HAVE=build/have.txt PYTHON=3.12
}
rm -rf "$site" && mkdir -p "$site" && tar -xJf "$archive" -C "$site"

stub=build/libcuda
mkdir -p "$stub"
find "$site" -name '*.so' -exec nm -D --undefined-only {} + 2>/dev/null | grep -oE ' cu[A-Z][A-Za-z0-9_]*' | sort -u |
    sed -E 's/ (.*)/int \1(void) { return 100; }/' >"$stub/stub.c" # CUDA_ERROR_NO_DEVICE
gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$stub/libcuda.so.1" "$stub/stub.c"

export LD_LIBRARY_PATH=$PWD/$stub PYTHONPATH=$PWD:$PWD/$site
"$venv/bin/python" - <<'END'
import importlib
import pkgutil
import sys

import swift_r1

ENGINE = """vllm._C_stable_libtorch vllm._moe_C_stable_libtorch vllm.vllm_flash_attn._vllm_fa3_C vllm.cumem_allocator
vllm.v1.engine.async_llm vllm.v1.engine.core vllm.v1.worker.gpu_worker vllm.v1.worker.gpu.model_runner
vllm.v1.worker.gpu_model_runner vllm.v1.attention.backends.flash_attn vllm.v1.attention.backends.triton_attn
vllm.model_executor.model_loader.default_loader vllm.model_executor.layers.quantization.online.base
vllm.model_executor.warmup.kernel_warmup vllm.model_executor.models.qwen2 vllm.lora.worker_manager
vllm.distributed.weight_transfer vllm.platforms.cuda vllm.compilation.backends""".split()
ours = [one.name for one in pkgutil.walk_packages(swift_r1.__path__, "swift_r1.") if not one.name.endswith("__main__")]
view = {"nicegui"}  # the page is looked at elsewhere
faults = []
for name in (*ENGINE, *ours):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in view:
            faults.append(f"{name}: {error}")
    except Exception as error:
        faults.append(f"{name}: {type(error).__name__}: {error}")
print(*faults, f"{len(ENGINE) + len(ours)} modules, {len(faults)} of which cannot be imported", sep="\n")
sys.exit(bool(faults))
END
parts="machine tests rates train-0.5b kernels attention embedded packing zero3"
# shellcheck disable=SC2086  # several words
"$venv/bin/python" scripts/gpu --rehearse --python "$venv/bin/python" --budget 3000 --out build/gpu-rehearsal --parts $parts
