#!/usr/bin/env bash
# scripts/rehearse_gpu.sh [PYTHON]: a machine with a GPU and no network, without its GPU. In .venv-gpu: Python 3.12, torch 2.11
# for CUDA and what such machines have, nothing else; beside it only what `make bundle` carries, and a libcuda that does
# nothing. The engine and all of swift_r1 must be imported there, and the parts of `scripts/gpu` that need no vLLM must pass.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/.venv-gpu build=$PWD/build site=$PWD/build/gpu-site
mkdir -p "$build"
make install
if [ ! -f "$venv/installed" ]; then
    .venv/bin/uv venv -q --clear --python "${1:-3.12}" "$venv"
    .venv/bin/uv pip install -q --python "$venv/bin/python" --index-strategy unsafe-best-match torch==2.11.0 torchvision==0.26.0 \
        torchaudio==2.11.0 transformers==5.17.0 accelerate==1.15.0 peft==0.21.0 numpy==2.5.2 safetensors pyarrow httpx psutil rich \
        pytest pytest-timeout pytest-xdist aiofiles aiohttp attrs charset-normalizer cloudpickle einops hypothesis matplotlib msgpack \
        ninja numba nvidia-ml-py opencv-python-headless pandas pillow prometheus-client protobuf py-cpuinfo requests scipy \
        sentencepiece six sympy tabulate tensorboard tiktoken uvloop xxhash
    # Brought along by transformers' tools, and not on such a machine.
    .venv/bin/uv pip uninstall -q --python "$venv/bin/python" pydantic pydantic-core annotated-types typing-inspection
    touch "$venv/installed"
fi
archive=dist/swift-r1-3.12-sm_90.tar.xz
[ "$archive" -nt uv.lock ] || {
    .venv/bin/uv pip freeze -q --python "$venv/bin/python" >"$build/have.txt"
    make bundle BUNDLE_ARGS="--have $build/have.txt"
}
rm -rf "$site" && mkdir -p "$site" "$build/libcuda" && tar -xJf "$archive" -C "$site"
find "$site" -name '*.so' -exec nm -D --undefined-only {} + 2>/dev/null | grep -oE ' cu[A-Z][A-Za-z0-9_]*' | sort -u |
    sed -E 's/ (.*)/int \1(void) { return 100; }/' >"$build/libcuda/stub.c" # CUDA_ERROR_NO_DEVICE
gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$build/libcuda/libcuda.so.1" "$build/libcuda/stub.c"

export LD_LIBRARY_PATH=$build/libcuda PYTHONPATH=$PWD:$site
engine="vllm._C_stable_libtorch vllm._moe_C_stable_libtorch vllm.vllm_flash_attn._vllm_fa3_C vllm.cumem_allocator
vllm.v1.engine.async_llm vllm.v1.engine.core vllm.v1.worker.gpu_worker vllm.v1.worker.gpu.model_runner
vllm.v1.attention.backends.flash_attn vllm.v1.attention.backends.triton_attn vllm.model_executor.warmup.kernel_warmup
vllm.model_executor.models.qwen2 vllm.lora.worker_manager vllm.distributed.weight_transfer vllm.platforms.cuda"
# The page is looked at elsewhere.
ours=$(git ls-files 'swift_r1/*.py' | grep -vE '__main__|/(starters|bundled|view|report)/|cli/view' | sed 's/\.py$//; s/\/__init__$//' | tr / .)
# shellcheck disable=SC2086  # several words
"$venv/bin/python" -c 'import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print(len(sys.argv) - 1, "modules imported")' $engine $ours
# shellcheck disable=SC2086
"$venv/bin/python" scripts/gpu --rehearse --python "$venv/bin/python" --budget 3000 --out "$build/gpu-rehearsal" \
    --parts machine tests rates train-0.5b kernels embedded packing zero3
