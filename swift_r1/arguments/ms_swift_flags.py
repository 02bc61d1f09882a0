"""Names of ms-swift's GRPO flags (v3 and v4), so that one we lack is told apart from a typo.

A frozen list of facts: names only. Flags of things this project does not do are refused by name.
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
    acc_strategy adam_beta1 adam_beta2 adam_epsilon adapters add_non_thinking_prefix add_version
    advantage_estimator agent_template api_key async_generate attn_impl average_tokens_across_devices beta bf16
    bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant cached_dataset
    cached_val_dataset callbacks check_model chord_enable_phi_function chord_mu_decay_steps chord_mu_peak
    chord_mu_valley chord_mu_warmup_steps chord_sft_dataset chord_sft_per_device_train_batch_size columns
    completion_length_limit_scope context_manager cosine_max_len cosine_max_len_value_correct
    cosine_max_len_value_wrong cosine_min_len_value_correct cosine_min_len_value_wrong cpo_alpha
    create_checkpoint_symlink custom_dataset_info custom_register_path data_parallel_size data_seed
    dataloader_drop_last dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor dataset dataset_num_proc dataset_shuffle ddp_backend ddp_broadcast_buffers
    ddp_find_unused_parameters ddp_timeout deepspeed deepspeed_autotp_size delta desirable_weight device_map
    disable_gradient_checkpointing download_mode ds3_gather_for_generation dtype dynamic_sample
    enable_channel_loss enable_thinking epsilon epsilon_high eval_dataset eval_dataset_args eval_datasets
    eval_datasets_args eval_generation_config eval_limit eval_on_start eval_steps eval_strategy
    eval_use_evalscope external_plugins fp16 freeze_llm freeze_parameters freeze_parameters_ratio
    freeze_parameters_regex fsdp fsdp_config full_determinism galore_rank galore_target_modules gamma
    gc_collect_after_offload generation_batch_size gradient_accumulation_steps gradient_checkpointing
    gradient_checkpointing_kwargs greater_is_better group_by_length gym_env host hqq_axis hub_model_id
    hub_private_repo hub_strategy hub_token ignore_args_error importance_sampling_level
    include_num_input_tokens_seen init_strategy init_weights interleave_prob kl_in_reward label_smoothing lam
    lazy_tokenize learning_rate lmbda load_args load_best_model_at_end load_data_args load_from_cache_file
    local_repo_path log_completions log_entropy log_interval log_rollout_offpolicy_metrics logging_dir
    logging_first_step logging_nan_inf_filter logging_steps logging_strategy logprobs lora_alpha lora_bias
    lora_dropout lora_dtype lora_ga_batch_size lora_ga_direction lora_ga_iters lora_ga_max_length lora_rank
    lorap_lr_ratio loss_scale loss_type lr_scheduler_kwargs lr_scheduler_type max_completion_length max_epochs
    max_grad_norm max_length max_logprobs max_memory max_model_len max_new_tokens max_pixels max_resample_times
    max_steps max_turns metric metric_for_best_model model model_author model_kwargs model_name model_revision
    model_type modules_to_save move_model_batches multi_turn_func multi_turn_scheduler neftune_noise_alpha
    new_special_tokens num_beams num_generations num_generations_eval num_infer_workers num_iterations
    num_labels num_train_epochs off_policy_sequence_mask_delta offload_model offload_optimizer optim optim_args
    optim_target_modules optimizer output_dir overlong_filter packing packing_length packing_num_proc
    padding_free padding_side per_device_eval_batch_size per_device_train_batch_size port problem_type
    push_to_hub quant_bits quant_method ref_adapters ref_model ref_model_mixup_alpha ref_model_revision
    ref_model_sync_steps ref_model_type remove_unused_columns repetition_max_penalty repetition_n_grams
    repetition_penalty report_to response_prefix resume_from_checkpoint resume_only_model reward_funcs
    reward_weights rlhf_type rollout_importance_sampling_mode rollout_importance_sampling_threshold rope_scaling
    rpo_alpha run_name save_only_model save_safetensors save_steps save_strategy save_total_limit scale_rewards
    seed sequence_parallel sequence_parallel_size served_model_name sft_alpha shuffle_buffer_size simpo_gamma
    sleep_level soft_cache_length soft_max_length split_dataset_ratio ssl_certfile ssl_keyfile
    steps_per_generation stop_words stopping_strategy stream streaming strict structured_outputs_regex
    swanlab_exp_name swanlab_lark_secret swanlab_lark_webhook_url swanlab_mode swanlab_project swanlab_token
    swanlab_workspace sync_ref_model system target_modules target_parameters target_regex task_type tau_neg
    tau_pos teacher_adapters teacher_deepspeed teacher_model temperature template template_backend temporary_dir
    tensor_parallel_size tf32 top_entropy_quantile top_k top_logprobs top_p torch_dtype torch_empty_cache_steps
    train_dataloader_shuffle train_type trainable_parameters trainable_parameters_regex truncation_strategy
    tuner_backend tuner_type undesirable_weight unsloth use_cce use_chat_template use_cpu use_dora use_galore
    use_gym_env use_hf use_liger_kernel use_muon use_rslora use_swift_lora use_vllm val_dataset
    val_dataset_shuffle verbose vllm_data_parallel_size vllm_device vllm_disable_cascade_attn
    vllm_disable_custom_all_reduce vllm_enable_lora vllm_enable_prefix_caching vllm_enforce_eager
    vllm_engine_kwargs vllm_gpu_memory_utilization vllm_kv_cache_dtype vllm_max_lora_rank vllm_max_model_len
    vllm_max_num_seqs vllm_mode vllm_mode_colocate vllm_pipeline_parallel_size vllm_quantization
    vllm_reasoning_parser vllm_server_base_url vllm_server_group_port vllm_server_host vllm_server_pass_dataset
    vllm_server_port vllm_server_timeout vllm_speculative_config vllm_tensor_parallel_size vllm_use_async_engine
    wandb_log_unique_prompts wandb_project warmup_ratio warmup_steps weight_decay zero_hpz_partition_size
"""

MS_SWIFT_GRPO_FLAGS: frozenset[str] = frozenset(_NAMES.split())

REFUSED_FLAGS = {name: reason for reason, names in _REFUSED.items() for name in names.split()}
"""Why a flag is refused for good."""
