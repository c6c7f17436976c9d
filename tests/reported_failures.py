"""Which test shows what docs/troubleshooting.md says of each failure that users of other systems reported."""

from __future__ import annotations

# File -> test -> reports.
SHOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "tests/balance/test_exact.py": {
        "test_a_graph_safe_dispatch_never_drops_and_has_one_size": ("Megatron-LM #6274", "torchtitan #4751"),
        "test_loads_and_rows_are_exact": ("marin #6656",),
    },
    "tests/conformance/test_scenarios.py": {
        "test_conforms": ("transformers #48687", "Automodel #3325"),
    },
    "tests/deep_ep_backends/test_graph_safe.py": {
        "test_random_routings_are_reported_where_rows_were_dropped_and_only_there": ("Megatron-LM #7133",),
        "test_what_stands_in_fresh_memory_may_look_like_ids": ("Megatron-LM #7400",),
    },
    "tests/deep_ep_backends/test_rules.py": {
        "test_chunks_keep_rows_across_domains_below_the_limit": ("Megatron-LM #3999",),
        "test_early_releases_of_hybridep_are_refused_on_all_ranks": ("DeepEP #756",),
        "test_the_variant_is_told_by_attributes": ("torchtitan #3414", "NeMo-RL #2411"),
    },
    "tests/deep_ep_backends/test_variants.py": {
        "test_a_list_of_counts_that_differs_from_the_rows_is_refused": ("xtuner #2053",),
    },
    "tests/dispatchers/test_chunks.py": {
        "test_chunks_have_the_bits_of_one_dispatch": ("Automodel #2979",),
    },
    "tests/dispatchers/test_exact_reduction.py": {
        "test_exact_has_the_same_bits_on_any_number_of_ranks": ("Megatron-LM #1603", "vLLM #45683"),
    },
    "tests/dispatchers/test_expert_rows.py": {
        "test_both_on_ranks_of_which_some_have_no_rows": ("Automodel #2995",),
    },
    "tests/dispatchers/test_growing.py": {
        "test_a_retried_step_has_the_bits_of_one_that_fits": ("Automodel #3931", "Megatron-LM #6229"),
    },
    "tests/dispatchers/test_idle_groups.py": {"test_in_one_process": ("PyTorch #172439",)},
    "tests/dispatchers/test_reported_failures.py": {
        "test_a_communicator_opens_before_the_first_step": ("ms-swift #9486",),
        "test_all_ranks_call_collectives_in_one_order": ("Megatron-LM #5749", "Megatron-LM #1810"),
        "test_outputs_and_gradients_at_ep_32": ("Automodel #2676",),
        "test_padding_of_a_replayed_routing_goes_to_no_expert": ("prime-rl #3350", "verl #7524"),
    },
    "tests/dispatchers/test_rounds.py": {
        "test_gradients_are_those_of_one_process": ("Model-Optimizer #1966", "Megatron-LM #4226"),
    },
    "tests/dispatchers/test_self_test.py": {
        "test_finds_a_planted_fault": ("Megatron-Bridge #5462",),
    },
    "tests/dispatchers/test_sharing.py": {
        "test_an_explicit_name_is_never_replaced": ("ISEEKYAN/Megatron-LM #182",),
    },
    "tests/dispatchers/test_training_page.py": {
        "test_gradients_under_fsdp_on_parts_of_sequences_and_in_stages": ("slime #295", "verl #6879"),
        "test_weights_and_moments_come_back_under_another_ep_size_and_backend": ("DeepSpeed #8147", "AReaL #1468"),
        "test_without_the_rule_gradients_of_experts_are_ep_size_times_too_large": (
            "Megatron-LM #5956",
            "PyTorch #160285",
            "transformers #48205",
        ),
    },
    "tests/dispatchers/test_watchdog.py": {
        "test_a_dead_rank_ends_the_others": ("DeepEP #370",),
        "test_ranks_that_are_threads_name_the_one_that_stays_away": ("DeepEP #570", "PaddleFleet #83"),
    },
    "tests/integration/cases/test_case1_qwen3_vl_hybridep.py": {
        "test_the_rule_belongs_to_the_installed_version": ("Megatron-Bridge #3294",),
    },
    "tests/integration/cases/test_case2_thd_vendor_backends.py": {
        "test_counts_that_vary_by_rank_and_step_are_the_dense_layer": (
            "Automodel #3641",
            "Megatron-Bridge #5288",
            "ms-swift #8393",
            "Megatron-LM #4816",
            "DeepEP #604",
            "NeMo-RL #4079",
        ),
    },
    "tests/integration/cases/test_case3_padded_forward.py": {
        "test_gradients_do_not_depend_on_how_micro_batches_are_cut": ("AReaL #1384",),
    },
    "tests/integration/cases/test_case4_pipeline_metadata.py": {
        "test_a_rank_that_never_got_the_layout_is_told_so_by_name": ("Megatron-LM #4092", "Megatron-LM #4150"),
    },
    "tests/integration/cases/test_case5_graph_safe_padding.py": {
        "test_the_library_pads_and_nobody_after_it": ("Megatron-LM #4071",),
    },
    "tests/integration/deepspeed/test_autoep.py": {
        "test_evaluation_between_steps_fails_only_where_zero_3_keeps_what_it_has_gathered": (
            "ms-swift #3237",
            "ArcticTraining #265",
        ),
    },
    "tests/integration/megatron_core/test_layers.py": {
        "test_rows_of_the_padding_mask_go_nowhere": ("Megatron-LM #5542",),
    },
    "tests/integration/megatron_core/test_replay.py": {
        "test_layers_for_multi_token_prediction_choose_by_themselves": ("NeMo-RL #3903",),
    },
    "tests/integration/nccl_ep/test_nccl_ep.py": {
        "test_megatron_7578_a_packed_micro_batch_64_times_longer_than_the_first": ("Megatron-LM #7578",),
    },
    "tests/integration/titan/test_titan_moe.py": {
        "test_unequal_and_no_tokens_give_the_whole_module": ("Megatron-LM #1877",),
    },
    "tests/integration/transformers/test_one_rank.py": {
        "test_one_plan_serves_all_layers_of_a_forward": ("DeepSpeed #8354",),
    },
    "tests/integration/transformers/test_ranks.py": {
        "test_adapters_on_stacked_experts_train_as_without_expert_parallelism": ("Megatron-Bridge #5634",),
        "test_loss_and_gradients_are_those_of_the_unsharded_model": ("transformers #48518", "transformers #48792"),
    },
    "tests/recompute/test_kept_ids.py": {
        "test_a_router_that_is_given_its_ids": ("Megatron-LM #7425",),
    },
    "tests/recompute/test_kept_routes.py": {
        "test_a_library_that_delivers_other_rows_each_time": ("Automodel #3743",),
        "test_exchanges_of_a_recomputed_dispatch": ("Automodel #3684",),
    },
    "tests/replay/test_routing_table.py": {
        "test_every_cut_and_back": ("verl #7106", "miles #3146"),
    },
    "tests/simulated_cuda/test_capture.py": {
        "test_a_captured_layer_exchanges_nothing_with_the_host": ("Megatron-Bridge #3517",),
    },
}
