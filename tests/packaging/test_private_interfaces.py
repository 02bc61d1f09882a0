"""What is used of other packages without a promise that it stays, and which feature breaks where it is gone.

Read from their source, without importing it: so vLLM's and DeepSpeed's GPU side is checked too. How most of it behaves
is checked where it is used; what nothing else would notice is tried here.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import logging
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CAPPED = {"datasets", "torch", "transformers", "deepspeed", "peft", "bitsandbytes", "vllm"}

# Feature: (package, file in it, names), a name as `Class.method(parameters that are passed)` or `Class.attribute`.
RELIED_ON = {
    "prepared rows are found again, and streamed, without a hash of user objects (data/cache.py, streaming.py)": [
        ("datasets", "builder.py", "BuilderConfig.create_config_id(config_kwargs)"),
        (
            "datasets",
            "io/generator.py",
            "GeneratorDatasetInputStream.__init__(generator features streaming fingerprint)",
        ),
    ],
    "--ddp_timeout holds in groups that DeepSpeed makes, and for no rank that is alive (runtime/ranks.py)": [
        ("torch", "distributed/distributed_c10d.py", "_get_default_timeout(backend) _set_pg_timeout(timeout group)"),
    ],
    "AdamW leaves an update that is not finite out by itself (training/backends/local.py)": [
        ("torch", "optim/adam.py", "Adam._step_supports_amp_scaling"),
    ],
    "an engine on the trainer's GPU reads its weights there (sync/transport.py)": [
        ("torch", "storage.py", "_StorageBase._share_cuda_ _StorageBase._new_shared_cuda"),
    ],
    "the ranks of one machine meet on its loopback address alone (launch/loopback.py)": [
        (
            "torch",
            "distributed/elastic/rendezvous/static_tcp_rendezvous.py",
            "StaticTCPRendezvous._store StaticTCPRendezvous.use_agent_store",
        ),
    ],
    "ranks end when one has died, and after a signal (launch/elastic.py)": [
        (
            "torch",
            "distributed/elastic/multiprocessing/api.py",
            "SignalException.__init__(msg sigval)",
        ),
        (
            "torch",
            "distributed/launcher/api.py",
            "LaunchConfig.shutdown_timeout LaunchConfig.local_addr LaunchConfig.logs_specs "
            "LaunchConfig.monitor_interval LaunchConfig.signals_to_handle",
        ),
    ],
    "ZeRO's start without a C++ compiler (backends/deepspeed.py)": [
        ("deepspeed", "ops/op_builder/cpu/comm.py", "ShareMemCommBuilder.NAME"),
    ],
    "several models with --zero_hpz_partition_size (backends/deepspeed.py)": [
        ("deepspeed", "utils/groups.py", "_ZERO_PARAM_INTRA_PARALLEL_GROUP"),
    ],
    "checkpoints of a ZeRO run (backends/deepspeed.py)": [
        (
            "deepspeed",
            "utils/tensor_fragment.py",
            "safe_get_full_fp32_param(param) safe_get_full_optimizer_state(param optim_state_key) "
            "safe_set_full_fp32_param(param value) safe_set_full_optimizer_state(param value optim_state_key) "
            "safe_get_local_fp32_param(param) safe_set_local_fp32_param(param value) "
            "safe_set_local_optimizer_state(param value optim_state_key)",
        ),
        (
            "deepspeed",
            "runtime/zero/stage3.py",
            "DeepSpeedZeroOptimizer_Stage3.fp32_partitioned_groups_flat "
            "DeepSpeedZeroOptimizer_Stage3.grad_partitions_flat_buffer",
        ),
        (
            "deepspeed",
            "runtime/zero/stage_1_and_2.py",
            "DeepSpeedZeroOptimizer.single_partition_of_fp32_groups DeepSpeedZeroOptimizer._hp_optimizer_states_linked "
            "DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state()",
        ),
        (
            "deepspeed",
            "runtime/bf16_optimizer.py",
            "BF16_Optimizer.fp32_groups_flat_partition BF16_Optimizer.fp32_groups_gradients_flat "
            "BF16_Optimizer._hp_optimizer_states_linked BF16_Optimizer._lazy_init_hp_params_optimizer_state()",
        ),
    ],
    "float16 under ZeRO (backends/deepspeed.py)": [
        (
            "deepspeed",
            "runtime/fp16/loss_scaler.py",
            "DynamicLossScaler.cur_scale DynamicLossScaler.cur_iter DynamicLossScaler.last_overflow_iter "
            "DynamicLossScaler.raise_error_at_min_scale",
        ),
    ],
    "ZeRO-3 loads a model in parts (backends/deepspeed.py)": [
        ("transformers", "integrations/deepspeed.py", "HfDeepSpeedConfig unset_hf_deepspeed_config()"),
        ("torch", "nn/modules/module.py", "Module._non_persistent_buffers_set"),
    ],
    "checkpoints in the form that from_pretrained reads (training/checkpoint/tensors.py)": [
        ("transformers", "core_model_loading.py", "revert_weight_conversion(model state_dict)"),
        ("transformers", "modeling_utils.py", "PreTrainedModel._keys_to_ignore_on_save"),
    ],
    "shared prompts and decoding of many completions (models/attention.py, inference/engines)": [
        ("transformers", "integrations/sdpa_attention.py", "sdpa_attention_forward(module query key value)"),
        ("transformers", "masking_utils.py", "ALL_MASK_ATTENTION_FUNCTIONS"),
        ("transformers", "configuration_utils.py", "PreTrainedConfig._attn_implementation"),
        (
            "transformers",
            "cache_utils.py",
            "CacheLayerMixin.lazy_initialization(key_states value_states) "
            "CacheLayerMixin.update(key_states value_states) CacheLayerMixin.get_mask_sizes(query_length) "
            "CacheLayerMixin.get_seq_length()",
        ),
    ],
    "adapters (models/lora.py)": [
        ("transformers", "integrations/peft.py", "PeftAdapterMixin._hf_peft_config_loaded"),
        ("peft", "tuners/lora/layer.py", "LoraLayer.lora_A LoraLayer.lora_B Linear.get_delta_weight(adapter)"),
        ("peft", "tuners/lora/layer.py", "LoraLayer.lora_dropout LoraLayer.lora_magnitude_vector"),
        ("peft", "tuners/lora/dora.py", "DoraLinearLayer.get_weight_norm(weight lora_weight scaling)"),
        ("peft", "tuners/tuners_utils.py", "BaseTunerLayer._disable_adapters BaseTunerLayer._active_adapter"),
        (
            "peft",
            "utils/other.py",
            "AuxiliaryTrainingWrapper._disable_adapters AuxiliaryTrainingWrapper.original_module",
        ),
    ],
    "4-bit weights (models/loading.py)": [
        ("bitsandbytes", "functional.py", "dequantize_4bit(A quant_state) QuantState.shape QuantState.dtype"),
    ],
    "8-bit moments in checkpoints (backends/optimizer_state.py)": [
        ("bitsandbytes", "optim/optimizer.py", "Optimizer2State.init_state(group p gindex pindex)"),
    ],
    "new weights in the engine (serving/engines/vllm_worker.py)": [
        ("vllm", "v1/worker/gpu_model_runner.py", "GPUModelRunner.reload_weights(weights_iterator)"),
        ("vllm", "v1/worker/gpu_worker.py", "Worker.reload_weights() Worker.vllm_config"),
        ("vllm", "model_executor/model_loader/reload/layerwise.py", "finalize_layerwise_reload"),
        (
            "vllm",
            "model_executor/layers/vocab_parallel_embedding.py",
            "VocabParallelEmbedding UnquantizedEmbeddingMethod.process_weights_after_loading(layer)",
        ),
    ],
    "weights by NCCL (sync/transport.py, engines/vllm_worker.py)": [
        (
            "vllm",
            "v1/worker/gpu_worker.py",
            "Worker._weight_update_active Worker.weight_transfer_engine Worker.init_weight_transfer_engine(init_info) "
            "Worker.shutdown_weight_transfer_engine() Worker.start_weight_update() Worker.update_weights(update_info) "
            "Worker.finish_weight_update()",
        ),
        ("vllm", "distributed/weight_transfer/base.py", "WeightTransferEngine.reset_weight_update_target()"),
        (
            "vllm",
            "distributed/device_communicators/pynccl.py",
            "PyNcclCommunicator.from_unique_id_bytes(unique_id_bytes rank world_size device) "
            "PyNcclCommunicator.broadcast(tensor src stream) PyNcclCommunicator.destroy()",
        ),
        ("vllm", "distributed/device_communicators/pynccl_wrapper.py", "NCCLLibrary.ncclGetUniqueId() ncclUniqueId"),
    ],
    "the rollout server (serving/engines/vllm.py)": [
        (
            "vllm",
            "v1/engine/async_llm.py",
            "AsyncLLM.from_vllm_config(vllm_config disable_log_stats) AsyncLLM.errored "
            "AsyncLLM.generate(prompt sampling_params request_id lora_request) AsyncLLM.add_lora(lora_request) "
            "AsyncLLM.sleep(level) AsyncLLM.wake_up(tags) AsyncLLM.reset_prefix_cache() AsyncLLM.get_tokenizer() "
            "AsyncLLM.collective_rpc(method args) AsyncLLM.update_weight_version(new_version) AsyncLLM.shutdown()",
        ),
        ("vllm", "v1/engine/exceptions.py", "EngineDeadError"),
        ("vllm", "v1/executor/uniproc_executor.py", "UniProcExecutor"),
        ("vllm", "utils/ompmultiprocessing.py", "OMPProcessManager.configure_omp_envs(rank local_rank)"),
        ("vllm", "outputs.py", "CompletionOutput.weight_versions RequestOutput.prompt_logprobs"),
    ],
}  # fmt: skip


@functools.cache
def declared(package: str, path: str) -> dict[str, list[str] | None]:
    """All names of a module, `Class.name` of those in classes; with the parameters' names where it is a function."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed"
    file = Path(spec.submodule_search_locations[0], path)
    assert file.is_file(), f"{package} has no {path}"
    found: dict[str, list[str] | None] = {}

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = owner
            if isinstance(child, ast.ClassDef):
                found[child.name] = None
                inside = f"{child.name}."
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = child.args
                names = [
                    one.arg
                    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                ]
                found[owner + child.name] = names
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                found.setdefault(owner + child.id, None)
            elif isinstance(child, ast.Attribute) and ast.unparse(child.value) == "self":
                found.setdefault(owner + child.attr, None)
            visit(child, inside)

    visit(ast.parse(file.read_text(encoding="utf-8")), "")
    return found


def missing(package: str, path: str, names: str) -> list[str]:
    known, gone = declared(package, path), []
    for name, passed in re.findall(r"([\w.]+)(?:\(([^)]*)\))?", names):
        if name not in known:
            gone.append(f"{package}/{path} has no {name}")
        elif lost := set(passed.split()) - set(known[name] or ()):
            gone.append(f"{package}/{path}: {name} takes no {', '.join(sorted(lost))}")
    return gone


@pytest.mark.parametrize("feature", RELIED_ON)
def test_what_is_relied_on_is_there(feature: str) -> None:
    gone = [
        line
        for package, path, names in RELIED_ON[feature]
        for line in missing(package, path, names)
    ]
    assert not gone, f"breaks: {feature}: {'; '.join(gone)}"


def test_packages_of_which_that_is_used_have_an_upper_bound() -> None:
    assert {package for parts in RELIED_ON.values() for package, _, _ in parts} == {
        one.lower() for one in CAPPED
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["train"], *extras["vllm-cpu"], *extras["gpu"]):
        if (one := Requirement(text)).name in CAPPED:
            assert any(part.operator == "<" for part in one.specifier), f"{one} has no upper bound"


def test_vllms_false_alarm_is_left_out_of_the_log() -> None:
    """A warning at each update that weights failed to load (serving/engines/vllm_worker.py)."""
    name, warning = (
        "vllm.model_executor.model_loader.reload.layerwise",
        "%s: Failed to load weights",
    )
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    source = (
        Path(spec.submodule_search_locations[0], *name.split(".")[1:])
        .with_suffix(".py")
        .read_text()
    )
    assert "logger = init_logger(__name__)" in source and f'logger.warning("{warning}"' in source
    importlib.import_module("swift_r1.serving.engines.vllm_worker")
    logger = logging.getLogger(name)
    said = [
        logger.makeRecord(name, logging.WARNING, "", 0, text, ("Layer",), None)
        for text in (warning, "%s: else")
    ]
    assert [bool(logger.filter(one)) for one in said] == [False, True]
