"""The flags of ms-swift's GRPO (versions 3 and 4) that do not act here: under each reason those that share it.

Behind `=` are the values that are so here, which are accepted (`*`: any). At other values, and without any, the flag is
refused with the reason, which says what to do instead. `meanings` reads this.
"""

from __future__ import annotations

TABLE = {
    # What others do
    "reward models are only read here: ms-swift trains them (swift rlhf --rlhf_type rm)": """
        center_rewards_coefficient
    """,
    "--reward_model says how many there are": """
        num_reward_models=*
    """,
    "the teacher is spread as the policy is, and its config.json says what it is: leave it out": """
        teacher_deepspeed teacher_model_type teacher_model_revision
    """,
    "belongs to another --rlhf_type (dpo, kto, cpo, gkd, ...), which ms-swift does: leave it out": """
        cpo_alpha simpo_gamma rpo_alpha ld_alpha loss_weights discopop_tau desirable_weight undesirable_weight
        label_smoothing=0 lmbda sft_alpha=0 seq_kd=false
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
        expert_model_parallel_size=1 moe_permute_fusion moe_shared_expert_overlap
        vllm_enable_expert_parallel=false moe_z_loss_coeff moe_expert_capacity_factor moe_token_dispatcher_type
        expert_tensor_parallel_size=1 experts_impl
    """,
    "vLLM tells the experts it chose on a GPU only; --rollout_importance_sampling_mode corrects for other choices": """
        router_replay_mode=disabled
    """,
    "Megatron is not done here: --deepspeed shards the model": """
        tensor_model_parallel_size=1 pipeline_model_parallel_size=1 context_parallel_size=1 sequence_parallel_impl
        mcore_model mcore_adapter use_distributed_optimizer overlap_grad_reduce overlap_param_gather
        recompute_granularity recompute_method recompute_num_layers train_iters micro_batch_size
        global_batch_size megatron_extra_kwargs offload_bridge load_safetensors=true
        decoder_first_pipeline_num_layers parallelism_config accelerator_config sequence_parallel=false
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
        stream temporary_dir verbose log_interval num_infer_workers
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
    "log-probs are computed in the micro-batches of training (--max_tokens_per_micro_batch): leave it out": """
        local_rollout_forward_batch_size
    """,
    "another command reads it: `swift merge-lora` merges adapters, `swift eval` measures checkpoints": """
        lora_modules ckpt_dir
    """,
    # What is always so
    "a run always trains; it evaluates where --eval_steps or --eval_on_start says so": """
        do_train=true|false do_eval=true|false do_predict=false
    """,
    "--metric_for_best_model keeps the best checkpoint, and --create_checkpoint_symlink links it as `best`": """
        load_best_model_at_end=false
    """,
    "logging.jsonl has a line every --logging_steps, in which what is not finite is left out of the means": """
        logging_strategy=steps logging_nan_inf_filter=true
    """,
    "--eval_datasets has benchmarks (docs/evaluation.md), each with its own settings in the JSON form": """
        eval_use_evalscope=false eval_dataset eval_dataset_args eval_datasets_args extra_eval_args
    """,
    "--eval_temperature, --eval_top_p and --eval_max_completion_length say how evaluation samples": """
        eval_generation_config
    """,
    "the first evaluation is after --eval_steps steps, or with --eval_on_start true before the first": """
        eval_delay=0
    """,
    "ms-swift's Trainer is not here: a plugin has rewards, data, turns and environments": """
        callbacks
    """,
    "a flag that is not known is always a fault": """
        ignore_args_error=false
    """,
    "what a flag means does not depend on files of another run: a config file comes first on the command line": """
        load_args=false load_data_args=false
    """,
    "files of --model are read as they are; those of a checkpoint are checked by their hashes": """
        check_model=false
    """,
    "logging.jsonl has tokens_per_second and completions/mean_length": """
        include_num_input_tokens_seen=false|no
    """,
    "reward functions get every column of the data": """
        remove_unused_columns=false
    """,
    "columns are always mapped by their names, and --columns renames them": """
        disable_auto_column_mapping=false
    """,
    "all held-out prompts are evaluated, or --eval_limit of them at random: their order does not matter": """
        val_dataset_shuffle=false
    """,
    "a hub's set is loaded again when it has changed; to force that, delete its folder in the hub's cache": """
        download_mode=reuse_dataset_if_exists
    """,
    "prepared rows are kept and found again (--load_from_cache_file true): give --dataset": """
        cached_dataset cached_val_dataset
    """,
    "prompts are shuffled each pass, whatever their lengths (--dataset_shuffle false: as they are)": """
        train_dataloader_shuffle=true group_by_length=false train_sampling_strategy=random length_column_name=length
    """,
    "prompts are tokenised when they are needed, in advance by --dataloader_num_workers processes": """
        lazy_tokenize=true
    """,
    "--packing true packs the completions of a step, up to --max_tokens_per_micro_batch tokens": """
        packing_length packing_num_proc=1 packing_strategy
    """,
    "prompts are in the tokenizer's chat template, or that of --prompt_template (no: as they are)": """
        template_backend=jinja use_chat_template=true
    """,
    "answers in the data are for rewards, and no part of the prompt": """
        add_non_thinking_prefix=true|false disable_ignore_empty_think=false
    """,
    "nobody is told when a run ends: `swift rlhf ...; notify $?` does it, the exit code says how it ended": """
        swanlab_notification_method swanlab_webhook_url swanlab_secret swanlab_sender_email swanlab_receiver_email
        swanlab_smtp_server swanlab_smtp_port swanlab_email_language swanlab_lark_webhook_url swanlab_lark_secret
    """,
    "--hub_model_id names owner and repository, whose main branch gets the model": """
        push_to_hub_organization hub_revision
    """,
    "while a checkpoint is sent to the hub, later ones are not, but for the last": """
        hub_always_push=false
    """,
    "--trackio_space_id names the Space, which keeps its own bucket": """
        trackio_bucket_id trackio_static_space_id
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
    "checkpoints are always safetensors, by the first rank, and resuming always continues in the data": """
        save_safetensors=true safe_serialization=true save_on_each_node=false ignore_data_skip=false
        use_flash_ckpt=false enable_jit_checkpoint=false restore_callback_states_from_checkpoint=false
        max_shard_size=5GB
    """,
    "weights always go to engines in flat buckets of 64 MiB or of one weight, whatever the number of layers": """
        enable_flattened_weight_sync=true move_model_batches=*
    """,
    "--max_completion_length is the longest completion": """
        max_new_tokens
    """,
    "--multi_turn_scheduler is what leads several turns": """
        multi_turn_func
    """,
    "--log_completions shows completions, and completions.jsonl has all of them": """
        num_sample_generations=0
    """,
    "the thoughts of earlier turns stay in the conversation that the model reads": """
        preserve_thinking=true
    """,
    "schedulers and environments always get the row's columns": """
        vllm_server_pass_dataset=true
    """,
    "completions come whole and from one beam, each token with its own log-prob; others: /v1/chat/completions": """
        logprobs=true num_beams=1 stream=false top_logprobs
    """,
    "the server's engine always works on requests as they come": """
        vllm_use_async_engine=true
    """,
    "everything goes through the server's one port": """
        vllm_server_group_port=*
    """,
    "ZeRO-3 always gathers whole weights to generate with": """
        ds3_gather_for_generation=true
    """,
    "what --offload_model and --offload_optimizer free is always given back at once": """
        gc_collect_after_offload=true
    """,
    "an engine is always on the devices of its ranks; CUDA_VISIBLE_DEVICES says which those are": """
        vllm_device=auto
    """,
    "a model is spread over devices by --vllm_tensor_parallel_size": """
        vllm_pipeline_parallel_size=1
    """,
    "beside a trainer is one engine for --vllm_tensor_parallel_size ranks; copies of it are for `swift rollout`": """
        vllm_data_parallel_size=1 data_parallel_size=1
    """,
    "an answer has at most 20 of the likeliest tokens beside each of its own": """
        max_logprobs=20
    """,
    "what a model is, is always read from its own files": """
        model_type=* reward_model_type=*
    """,
    "a model's newest files are read: give a folder with those of another revision": """
        model_revision=main|master reward_model_revision=main|master
    """,
    "prompts are written with the chat template of the model's tokenizer, or with --prompt_template": """
        template
    """,
    "weights come from the trainer as it has them, 16 or 32 bits each: leave it out": """
        vllm_quantization
    """,
    "vLLM's log-probs of speculated tokens, which ratios need, can be NaN: leave it out": """
        vllm_speculative_config
    """,
    "rewards get completions as they were written, thoughts included (ms-swift refuses it too): leave it out": """
        vllm_reasoning_parser
    """,
    "--vllm_mode says where vLLM runs: colocate, or server for `swift rollout`": """
        vllm_mode_colocate num_infer_workers
    """,
    "prompts are tokenised in order, to token ids, by processes that stay": """
        dataloader_persistent_workers=true dataloader_pin_memory=false
        dataloader_in_order=true dataloader_multiprocessing_context=fork
    """,
    "the loss never holds logits here, which is what these kernels are for (docs/performance.md): leave it out": """
        use_liger_kernel=false liger_kernel_config use_cce=false
    """,
    "what is not kept for the backward pass is always recomputed without reentrant autograd: leave it out": """
        gradient_checkpointing_kwargs={"use_reentrant":false}
    """,
    "rows are padded on the right, where no token sees the padding, or packed: leave it out": """
        padding_side=right
    """,
    "each process has a GPU of its own: --deepspeed zero3 spreads a model over them; --use_cpu true uses none": """
        device_map max_memory
    """,
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps the memory of a GPU in one piece: leave it out": """
        torch_empty_cache_steps
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
    "each run has a folder of its own: --add_version false and --resume_from_checkpoint continue in an old one": """
        overwrite_output_dir=false
    """,
    "biases would be trained in the model itself, which is the reference: --train_type full can train them alone": """
        lora_bias=none
    """,
    "adapters are peft's LoRA layers (docs/backends.md): leave it out": """
        tuner_backend=peft unsloth=false use_swift_lora=false target_parameters
    """,
    "LoRA-GA changes the model under the adapters, which is the reference: use --init_weights gaussian": """
        lora_ga_batch_size lora_ga_direction lora_ga_iters lora_ga_max_length lora_ga_scale lora_ga_stable_gamma
    """,
    "4-bit weights are bitsandbytes', stored in bytes: leave it out": """
        bnb_4bit_quant_storage=uint8 hqq_axis
    """,
    "--optim says which optimizers there are, and --adam_beta1 and its like are their numbers": """
        optimizer optim_args optim_target_modules use_muon=false
    """,
    "the language model is what is trained: --freeze_parameters and its like freeze parts of it": """
        freeze_llm=false task_type=causal_lm
    """,
    "noise in the embeddings would make the log-probs those of another policy: leave it out": """
        neftune_noise_alpha=0
    """,
    "the loss is over the tokens of all processes, and a step that is not finite is skipped and logged as it is": """
        average_tokens_across_devices=true logging_nan_inf_filter=false
    """,
    "download it first (hf download MODEL --revision REVISION) and give the folder": """
        model_revision ref_model_revision
    """,
    "transformers' own code loads the model, by its config.json: leave it out": """
        ref_model_type local_repo_path model_kwargs={} init_strategy
    """,
    "prompts are made by the model's own chat template: leave it out, or save another with its tokenizer": """
        template
    """,
    "trainer and engines read it from the model's config.json: write it there": """
        rope_scaling
    """,
    "the engines need them too: save a model with them (resize_token_embeddings) and give its folder": """
        new_special_tokens
    """,
    "only the dataset swift/self-cognition reads it, which is not done here: leave it out": """
        model_author model_name
    """,
    "log-probs before training always run without it: --gradient_checkpointing is for the training itself": """
        disable_gradient_checkpointing=true
    """,
}
