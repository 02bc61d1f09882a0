"""The flags of ms-swift's GRPO (versions 3 and 4) that are no flags here, and what each means.

A flag of ms-swift has one of three meanings: it acts (it is a field of an argument class), it is always so here, or it
is refused with a reason and a way. The table below has the last two: under each reason the flags, and behind `=` the
values that are so here, which are accepted. At other values, and without any, the flag is refused with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

_TABLE = {
    # What others do
    "reward models are not done in this version: write a reward function (--external_plugins, --reward_funcs)": """
        reward_model reward_model_type reward_model_revision reward_model_plugin reward_model_template
        reward_adapters reward_template num_reward_models=0 center_rewards_coefficient
    """,
    "distillation from a teacher is not done in this version: leave the teacher's flags out for plain GRPO": """
        teacher_model teacher_model_type teacher_model_revision teacher_model_server teacher_adapters
        teacher_deepspeed teacher_tag_key=dataset teacher_kl_coef offload_teacher_model=false advantage_reweight
        rlsd_lambda rlsd_lambda_decay_steps rlsd_lambda_warmup_steps rlsd_negative_only rlsd_reweight_clip_range
        sdar_loss_coef=0 sdar_gate_beta
    """,
    "CHORD (supervised steps beside GRPO's) is not done in this version: leave its flags out for plain GRPO": """
        chord_sft_dataset chord_sft_per_device_train_batch_size chord_enable_phi_function chord_mu_decay_steps
        chord_mu_peak chord_mu_valley chord_mu_warmup_steps
    """,
    "the losses fipo and real are not done in this version: --loss_type says which are": """
        fipo_clip_high_only fipo_clip_range fipo_decay_rate fipo_safety_threshold real_tau
    """,
    "belongs to another --rlhf_type (dpo, kto, cpo, gkd, ...), which ms-swift does: leave it out": """
        cpo_alpha simpo_gamma rpo_alpha ld_alpha loss_weights discopop_tau desirable_weight undesirable_weight
        label_smoothing=0 lmbda sft_alpha=0 seq_kd=false gkd_logits_topk
    """,
    "belongs to supervised training, which ms-swift does (swift sft): leave it out": """
        label_smoothing_factor=0 enable_dft_loss=false enable_channel_loss=false mrl_dims acc_strategy num_labels
        problem_type predict_with_generate=false prediction_loss_only=false generation_max_length
        generation_num_beams generation_config label_names include_for_metrics batch_eval_metrics=false
        eval_metric metric sortish_sampler=false is_binary_loss_scale
    """,
    "vision and audio are not done here: this trains language models on text": """
        freeze_vit=true freeze_aligner=true vit_lr aligner_lr vit_gradient_checkpointing max_pixels min_pixels
        image_size video_max_pixels fps_max_frames norm_bbox=none vllm_limit_mm_per_prompt limit_mm_per_prompt
        attn_impl_vit use_audio_in_video=false vllm_mm_processor_cache_gb
    """,
    "mixture-of-experts specifics are not done here: leave it out": """
        router_aux_loss_coef=0 moe_router_load_balancing_type moe_grouped_gemm moe_aux_loss_coeff=0
        expert_model_parallel_size=1 moe_permute_fusion moe_shared_expert_overlap router_replay_mode=disabled
        vllm_enable_expert_parallel=false moe_z_loss_coeff moe_expert_capacity_factor moe_token_dispatcher_type
        expert_tensor_parallel_size=1 experts_impl
    """,
    "Megatron is not done here: --deepspeed shards the model": """
        tensor_model_parallel_size=1 pipeline_model_parallel_size=1 context_parallel_size=1 sequence_parallel_impl
        mcore_model mcore_adapter use_distributed_optimizer overlap_grad_reduce overlap_param_gather
        recompute_granularity recompute_method recompute_num_layers train_iters micro_batch_size
        global_batch_size megatron_extra_kwargs offload_bridge load_safetensors=true
        decoder_first_pipeline_num_layers parallelism_config accelerator_config
    """,
    "generation is done by vLLM, or in the trainer's process (--use_vllm false): leave it out": """
        infer_backend=vllm sglang_context_length sglang_disable_cuda_graph sglang_disable_custom_all_reduce
        sglang_dp_size sglang_enable_dp_attention sglang_enable_ep_moe sglang_ep_size sglang_kv_cache_dtype
        sglang_mem_fraction_static sglang_pp_size sglang_quantization sglang_speculative_algorithm
        sglang_speculative_eagle_topk sglang_speculative_num_draft_tokens sglang_speculative_num_steps
        sglang_tp_size lmdeploy_cache_max_entry_count lmdeploy_quant_policy lmdeploy_session_len lmdeploy_tp
        lmdeploy_vision_batch_size
    """,
    "belongs to `swift infer` and `swift deploy`, which ms-swift does: leave it out": """
        max_batch_size owned_by reranker_use_activation result_path val_dataset_sample write_batch_size
        merge_lora=false
    """,
    "Ray is not used here: NNODES, NODE_RANK and MASTER_ADDR start a run on several machines": """
        use_ray=false ray_exp_name device_groups
    """,
    "this tuner is not done here: use --train_type lora": """
        adalora_beta1 adalora_beta2 adalora_deltaT adalora_init_r adalora_orth_reg_weight adalora_target_r
        adalora_tfinal adalora_tinit adapter_act adapter_length boft_block_num boft_block_size boft_dropout
        boft_n_butterfly_factor fourier_n_frequency fourier_scaling llamapro_num_groups llamapro_num_new_blocks
        lisa_activated_layers=0 lisa_step_interval reft_args reft_intervention_type reft_layer_key reft_layers
        reft_rank vera_d_initial vera_dropout vera_projection_prng_key vera_rank
    """,
    "GaLore is not done here: --train_type lora or --optim adamw_8bit save memory too": """
        use_galore=false galore_config galore_cos_threshold galore_gamma_proj galore_optim_per_parameter
        galore_proj_bits galore_proj_group_size galore_proj_quant galore_proj_type galore_quantization
        galore_queue_size galore_rank galore_scale galore_target_modules galore_update_proj_gap
        galore_with_embedding
    """,
    "another command reads it: `swift merge-lora` merges adapters, `swift eval` measures checkpoints": """
        lora_modules ckpt_dir
    """,
    # What is always so
    "a run always trains; it evaluates where --eval_steps or --eval_on_start says so": """
        do_train=true|false do_eval=true|false do_predict=false
    """,
    "the batch is what the flags say: where memory is short, --max_tokens_per_micro_batch cuts a step finer": """
        auto_find_batch_size=false
    """,
    "evaluation generates with the training's engine and dtype, and keeps no logits": """
        bf16_full_eval=false fp16_full_eval=false eval_accumulation_steps eval_do_concat_batches=true
        eval_use_gather_object=false use_cache=false use_logits_to_keep=true
    """,
    "progress is always shown where a terminal reads it; to a file go plain lines": """
        disable_tqdm=false log_on_each_node=false log_level=passive|info|warning log_level_replica=warning|passive
        debug skip_memory_metrics=true
    """,
    "checkpoints are always safetensors, by the first rank, and resuming always goes on in the data": """
        save_safetensors=true safe_serialization=true save_on_each_node=false ignore_data_skip=false
        use_flash_ckpt=false enable_jit_checkpoint=false restore_callback_states_from_checkpoint=false
        max_shard_size=5GB
    """,
    "weights always go in flat buckets": """
        enable_flattened_weight_sync=true
    """,
    "prompts are tokenised in order, by processes that stay": """
        dataloader_in_order=true dataloader_multiprocessing_context=fork
    """,
    "the trainer's forward is not compiled: leave it out": """
        torch_compile=false torch_compile_backend torch_compile_mode
    """,
    "the launcher sets it: NPROC_PER_NODE says how many processes train": """
        local_rank=-1
    """,
    "under DDP a weight without a gradient counts as zero, and buffers are equal on all ranks: leave it out": """
        ddp_find_unused_parameters=true|false ddp_broadcast_buffers=true|false ddp_static_graph=true|false
    """,
    "the model is not split by tensors in training: --deepspeed zero3 or --fsdp fsdp2 spread it over all ranks": """
        deepspeed_autotp_size=1
    """,
    "belongs into the file or JSON of --fsdp, under fsdp_config": """
        fsdp_config
    """,
    "gradients are sent in buckets of 25 MiB: leave it out": """
        ddp_bucket_cap_mb=25
    """,
    "only NVIDIA GPUs and CPUs are supported: leave it out": """
        enable_npu_model_patch=true tpu_num_cores tpu_metrics_debug=false use_mps_device=false use_ipex=false
        jit_mode_eval=false
    """,
    "later versions of transformers have dropped it: leave it out": """
        fp16_backend=auto half_precision_backend=auto fp16_opt_level past_index=-1 torchdynamo ray_scope
        split_batches dispatch_batches include_tokens_per_second=true include_inputs_for_metrics=false
        mp_parameters fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap
    """,
    "each run has a folder of its own: --add_version false and --resume_from_checkpoint go on in an old one": """
        overwrite_output_dir=false
    """,
}

_PENDING = """
    evaluation_strategy no_cuda push_to_hub_model_id push_to_hub_organization push_to_hub_token
    adapters add_non_thinking_prefix agent_template attn_impl average_tokens_across_devices bf16
    bnb_4bit_compute_dtype bnb_4bit_quant_storage cached_dataset cached_val_dataset callbacks check_model
    create_checkpoint_symlink custom_register_path data_parallel_size dataloader_drop_last
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor
    device_map
    disable_auto_column_mapping disable_gradient_checkpointing disable_ignore_empty_think download_mode
    ds3_gather_for_generation early_stop_interval eval_dataset eval_dataset_args eval_datasets_args eval_delay
    eval_generation_config eval_strategy eval_use_evalscope extra_eval_args fp16 freeze_llm
    full_determinism gc_collect_after_offload gradient_checkpointing_kwargs group_by_length hqq_axis
    hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_args_error
    include_num_input_tokens_seen init_strategy init_weights interleave_prob lazy_tokenize length_column_name
    liger_kernel_config load_args load_best_model_at_end load_data_args local_repo_path
    local_rollout_forward_batch_size log_entropy log_interval log_rollout_offpolicy_metrics logging_dir
    logging_first_step logging_nan_inf_filter logging_strategy logprobs lora_bias lora_dropout lora_dtype
    lora_ga_batch_size lora_ga_direction lora_ga_iters lora_ga_max_length lora_ga_scale lora_ga_stable_gamma
    lorap_lr_ratio loss_scale max_epochs max_logprobs max_memory max_new_tokens min_p model_author model_kwargs
    model_name model_revision model_type modules_to_save move_model_batches multi_turn_func neftune_noise_alpha
    new_special_tokens num_beams num_infer_workers num_sample_generations off_policy_sequence_mask_delta optim_args
    optim_target_modules optimizer packing_length packing_num_proc packing_strategy padding_side
    preserve_thinking project push_to_hub ref_adapters ref_model ref_model_revision ref_model_type
    remove_unused_columns repetition_penalty response_length resume_only_model rope_scaling save_strategy
    sequence_parallel sequence_parallel_size stopping_strategy stream structured_outputs_regex
    swanlab_email_language swanlab_exp_name swanlab_lark_secret swanlab_lark_webhook_url swanlab_mode
    swanlab_notification_method swanlab_project swanlab_receiver_email swanlab_secret swanlab_sender_email
    swanlab_smtp_port swanlab_smtp_server swanlab_token swanlab_webhook_url swanlab_workspace target_parameters
    target_regex task_type template template_backend temporary_dir tensor_parallel_size tf32 top_logprobs
    torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id train_dataloader_shuffle
    train_sampling_strategy trainable_parameters_regex tuner_backend unsloth use_cce use_chat_template use_cpu
    use_dora use_liger_kernel use_muon use_rslora use_swift_lora val_dataset_shuffle verbose vllm_device
    vllm_disable_cascade_attn vllm_disable_custom_all_reduce vllm_kv_cache_dtype vllm_max_num_seqs
    vllm_mode_colocate vllm_pipeline_parallel_size vllm_quantization vllm_reasoning_parser vllm_server_group_port
    vllm_server_pass_dataset vllm_speculative_config vllm_use_async_engine wandb_log_unique_prompts wandb_project
"""
"""Names without a meaning yet: refused as not done in this version."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a flag means that is no field of an argument class.

    Attributes:
        reason: why it is so here, and what to do instead of another value.
        so: the values that are so here and are accepted, as written on a command line; none: always refused.
    """

    reason: str
    so: tuple[str, ...] = ()

    def accepts(self, words: Sequence[str]) -> bool:
        """Whether the value is the one that is so here. No words are `true`, as for every switch."""
        return _plain(" ".join(words) or "true") in map(_plain, self.so)

    def fault(self, shown: str, words: Sequence[str]) -> str:
        """The line about a value that is not accepted of the flag `shown`."""
        if not self.so:
            return f"{shown}: {self.reason}"
        return f"{shown} must be {' or '.join(self.so)}, not {' '.join(words) or 'true'!r}: {self.reason}"


def _plain(value: str) -> object:
    """A value without differences of spelling: numbers and JSON by what they say, words by their letters."""
    value = value.strip().lower()
    with suppress(ValueError):
        return float(value)
    with suppress(ValueError):
        return json.dumps(json.loads(value), sort_keys=True)
    return value


def _meanings() -> dict[str, Meaning]:
    found: dict[str, Meaning] = {}
    for reason, entries in _TABLE.items():
        for entry in entries.split():
            name, equals, values = entry.partition("=")
            found[name] = Meaning(reason, tuple(values.split("|")) if equals else ())
    not_yet = Meaning("not done in this version: leave it out")
    return found | dict.fromkeys(_PENDING.split(), not_yet)


MEANINGS = _meanings()
"""By name, the flags of ms-swift that are no fields of `swift rlhf` or of `swift rollout`."""
