"""Names of ms-swift's GRPO flags (v3 and v4), so that one we lack is told apart from a typo.

A frozen list of facts: names only, without those of `swift rlhf`. Flags of things this project does not do are refused
by name.
"""

from __future__ import annotations

_REFUSED = {
    "reward models are not done here: write a reward function (--external_plugins, --reward_funcs)": """
        reward_model reward_model_type reward_model_revision reward_model_plugin reward_model_template
        reward_adapters reward_template num_reward_models
    """,
    "vision and audio are not done here: this trains language models on text": """
        freeze_vit freeze_aligner vit_lr aligner_lr vit_gradient_checkpointing max_pixels min_pixels
        image_size video_max_pixels fps_max_frames norm_bbox vllm_limit_mm_per_prompt limit_mm_per_prompt
        attn_impl_vit use_audio_in_video vllm_mm_processor_cache_gb
    """,
    "mixture-of-experts specifics are not done here": """
        router_aux_loss_coef moe_router_load_balancing_type moe_grouped_gemm moe_aux_loss_coeff
        expert_model_parallel_size moe_permute_fusion moe_shared_expert_overlap router_replay_mode
        vllm_enable_expert_parallel moe_z_loss_coeff moe_expert_capacity_factor moe_token_dispatcher_type
        expert_tensor_parallel_size
    """,
    "Megatron is not done here: --deepspeed shards the model": """
        tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size sequence_parallel_impl
        mcore_model mcore_adapter use_distributed_optimizer overlap_grad_reduce overlap_param_gather
        recompute_granularity recompute_method recompute_num_layers train_iters micro_batch_size
        global_batch_size megatron_extra_kwargs offload_bridge load_safetensors save_safetensors
        decoder_first_pipeline_num_layers
    """,
}

_NAMES = """
    acc_strategy adapters add_non_thinking_prefix agent_template attn_impl average_tokens_across_devices bf16
    bnb_4bit_compute_dtype bnb_4bit_quant_storage cached_dataset cached_val_dataset callbacks check_model
    chord_enable_phi_function chord_mu_decay_steps chord_mu_peak chord_mu_valley chord_mu_warmup_steps
    chord_sft_dataset chord_sft_per_device_train_batch_size cpo_alpha custom_register_path data_parallel_size
    dataloader_persistent_workers dataloader_pin_memory ddp_backend ddp_broadcast_buffers ddp_find_unused_parameters
    deepspeed_autotp_size desirable_weight device_map disable_gradient_checkpointing download_mode
    ds3_gather_for_generation enable_channel_loss eval_dataset eval_dataset_args eval_datasets_args
    eval_generation_config eval_use_evalscope fp16 freeze_llm fsdp fsdp_config full_determinism galore_rank
    galore_target_modules gc_collect_after_offload gradient_checkpointing_kwargs group_by_length host hqq_axis
    hub_model_id hub_private_repo hub_strategy hub_token ignore_args_error include_num_input_tokens_seen
    init_strategy init_weights interleave_prob label_smoothing lazy_tokenize lmbda load_args load_best_model_at_end
    load_data_args local_repo_path log_entropy log_interval log_rollout_offpolicy_metrics logging_dir
    logging_nan_inf_filter logging_strategy logprobs lora_bias lora_dropout lora_dtype lora_ga_batch_size
    lora_ga_direction lora_ga_iters lora_ga_max_length lorap_lr_ratio loss_scale max_logprobs max_memory
    max_model_len max_new_tokens metric model_author model_kwargs model_name model_revision model_type
    modules_to_save move_model_batches multi_turn_func neftune_noise_alpha new_special_tokens num_beams
    num_infer_workers num_labels off_policy_sequence_mask_delta optim_args optim_target_modules optimizer
    packing_length packing_num_proc padding_free padding_side port problem_type push_to_hub ref_adapters ref_model
    ref_model_revision ref_model_type remove_unused_columns repetition_penalty resume_only_model rope_scaling
    rpo_alpha sequence_parallel sequence_parallel_size served_model_name sft_alpha simpo_gamma ssl_certfile
    ssl_keyfile stopping_strategy stream structured_outputs_regex swanlab_exp_name swanlab_lark_secret
    swanlab_lark_webhook_url swanlab_mode swanlab_project swanlab_token swanlab_workspace target_parameters
    target_regex task_type teacher_adapters teacher_deepspeed teacher_model template template_backend temporary_dir
    tensor_parallel_size tf32 top_logprobs torch_empty_cache_steps train_dataloader_shuffle
    trainable_parameters_regex tuner_backend undesirable_weight unsloth use_cce use_chat_template use_cpu use_dora
    use_galore use_liger_kernel use_muon use_rslora use_swift_lora val_dataset_shuffle verbose
    vllm_data_parallel_size vllm_device vllm_disable_cascade_attn vllm_disable_custom_all_reduce vllm_enable_lora
    vllm_enable_prefix_caching vllm_kv_cache_dtype vllm_max_lora_rank vllm_max_num_seqs vllm_mode_colocate
    vllm_pipeline_parallel_size vllm_quantization vllm_reasoning_parser vllm_server_group_port
    vllm_server_pass_dataset vllm_speculative_config vllm_tensor_parallel_size vllm_use_async_engine
    wandb_log_unique_prompts wandb_project zero_hpz_partition_size
"""

MS_SWIFT_GRPO_FLAGS: frozenset[str] = frozenset(_NAMES.split())

REFUSED_FLAGS = {name: reason for reason, names in _REFUSED.items() for name in names.split()}
"""Why a flag is refused for good."""
