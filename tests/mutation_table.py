"""List the faults that tests/mutations.py makes, one at a time, to see a test fail.

They are of kinds that happen, in every package of the library. Where `harm` begins with `several`,
only runs on several ranks show the fault.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A fault made on purpose."""

    name: str
    path: str  # of the file, from the repository's root
    old: str  # text that occurs once in the file
    new: str  # text that replaces it
    harm: str  # what a user would suffer
    tests: tuple[str, ...]  # arguments of pytest; one of these tests has to fail


MUTATIONS = [
    # The plan: memory, time, ranks, search, the check of streams.
    Mutation(
        name="segment_of_ten_mib",
        path="recipe_lib/plan/allocation/caching_allocator.py",
        old="LARGE_SEGMENT if size < LARGE_REQUEST else",
        new="LARGE_SEGMENT if size <= LARGE_REQUEST else",
        harm="a tensor of 10 MiB is planned to reserve 20",
        tests=("tests/plan/allocation/test_caching_allocator.py",),
    ),
    Mutation(
        name="event_forgets_collectives",
        path="recipe_lib/plan/timing/stream_schedule.py",
        old="recorded[sync.event] = max([streams[sync.stream], *pending[sync.stream]])",
        new="recorded[sync.event] = streams[sync.stream]",
        harm="gathers of FSDP are planned to take no time of a step",
        tests=("tests/plan/timing/test_stream_schedule.py",),
    ),
    Mutation(
        name="reduce_scatter_of_a_shard",
        path="recipe_lib/plan/tracing/operator_costs.py",
        old='"c10d::_reduce_scatter_base_": ("reduce_scatter", 1, False),',
        new='"c10d::_reduce_scatter_base_": ("reduce_scatter", 0, False),',
        harm="gradients are planned to be sent as one rank's part of them",
        tests=("tests/plan/test_cluster.py::test_totals_of_sharding",),
    ),
    Mutation(
        name="search_changes_the_batch",
        path="recipe_lib/plan/search/trial_order.py",
        old="        // int(cfg.parallel.pipeline * cfg.parallel.context)\n",
        new="",
        harm="a search on a config with a pipeline proposes a larger global batch",
        tests=("tests/plan/test_search_pipelines.py::test_which_pipelines_are_tried",),
    ),
    Mutation(
        name="planned_steps_of_one_rank",
        path="recipe_lib/plan/simulated_world/planned_data.py",
        old="per_step = cfg.batch_size * cfg.gradient_accumulation_steps * ranks",
        new="per_step = cfg.batch_size * cfg.gradient_accumulation_steps",
        harm="a run on two ranks is planned with twice its steps, and so its hours",
        tests=("tests/plan/simulated_world/test_sequence_lengths.py",),
    ),
    Mutation(
        name="write_over_a_read",
        path="recipe_lib/plan/streams/stream_checker.py",
        old="for earlier in memory.read.values():",
        new="for earlier in ():",
        harm="--check-streams passes a copy that overwrites what another stream still reads",
        tests=("tests/plan/streams/test_races.py",),
    ),
    Mutation(
        name="margin_with_the_estimate",
        path="recipe_lib/plan/build_plan.py",
        old="margin=usable - heaviest.reserved - not_simulated.bytes,",
        new="margin=usable - heaviest.reserved,",
        harm="a plan shows memory to spare that what it could not simulate takes",
        tests=("tests/plan/test_rank_plans.py",),
    ),
    # Models of other classes, and their tensor plans.
    Mutation(
        name="dora_lengths_of_a_part",
        path="recipe_lib/external/tensor_parallel.py",
        old='return norms if lora_a_dim != 1 else all_reduce(norms.square(), "sum", group).sqrt()',
        new="return norms",
        harm="several: DoRA on ranks that share matrices trains other weights than on one",
        tests=(
            "tests/recipes/test_external_tensor.py",
            "-k",
            "dora",
        ),
    ),
    Mutation(
        name="blocked_axis_is_cut",
        path="recipe_lib/external/tensor_plan/axes.py",
        old="    if leaf.blocked:\n        block(leaf.blocked, root)\n",
        new="",
        harm="a plan cuts dimensions that have to stay whole",
        tests=("tests/external/tensor_plan/test_axes.py",),
    ),
    # The command line, data, saved states and configs.
    Mutation(
        name="blames_who_was_ended",
        path="recipe_lib/cli/launch.py",
        old="order = {PEER_FAILED: 1, -signal.SIGTERM: 2}",
        new="order = {PEER_FAILED: 1}",
        harm="`tune run` names a rank that torchrun ended, and not the one that crashed",
        tests=("tests/cli/test_launch.py::test_one_code_out_of_many",),
    ),
    Mutation(
        name="labels_off_by_one",
        path="recipe_lib/data/dataset.py",
        old="np.where(self._trained[start + 1 : end], ids[1:],",
        new="np.where(self._trained[start : end - 1], ids[1:],",
        harm="the loss leaves out an answer's first token and counts the first after it",
        tests=("tests/data/test_dataset.py",),
    ),
    Mutation(
        name="cache_ignores_the_template",
        path="recipe_lib/data/cache.py",
        old="            tokenizer.chat_template,\n            tokenizer.chat_template_place,\n",
        new="",
        harm="a changed chat template trains on what the former one wrote",
        tests=("tests/data/test_cache.py", "-k", "changes_the_key"),
    ),
    Mutation(
        name="newest_state_by_name",
        path="recipe_lib/checkpoint/run_files.py",
        old="return sorted(states, key=lambda item: item[1].sequence, reverse=True)",
        new="return sorted(states, key=lambda item: item[0].name, reverse=True)",
        harm="resume=latest goes back from step 10 to step 9",
        tests=("tests/checkpoint/test_state.py", "-k", "keep_and_order"),
    ),
    Mutation(
        name="first_rows_of_a_fused_matrix",
        path="recipe_lib/checkpoint/huggingface.py",
        old="(offsets[0] + entry.start, *offsets[1:])",
        new="(offsets[0], *offsets[1:])",
        harm="keys and values of Phi 3 are loaded with the weights of queries",
        tests=("tests/checkpoint/test_weights_in.py",),
    ),
    Mutation(
        name="random_numbers_begin_anew",
        path="recipe_lib/checkpoint/resumable_state.py",
        old="if manifest.world_size == world.size:",
        new="if manifest.world_size != world.size:",
        harm="a resumed run with dropout is not the uninterrupted one",
        tests=("tests/checkpoint/test_state.py", "-k", "goes_on_bitwise"),
    ),
    Mutation(
        name="upper_bits_of_scales",
        path="recipe_lib/checkpoint/gguf/gguf_file.py",
        old="first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)",
        new="first = scales[:, :4] | ((scales[:, 4:] >> 5) << 6)",
        harm="half of the blocks of a GGUF file in q4_k are read with wrong scales",
        tests=("tests/checkpoint/gguf/test_k_quants.py",),
    ),
    Mutation(
        name="unknown_key_in_a_section",
        path="recipe_lib/config/check_settings.py",
        old="        else:\n            report_unknown_key(checked, name, value, source",
        new="        elif not section:\n            report_unknown_key(checked, name, value, source",
        harm="a misspelled key in a section is ignored without a word",
        tests=("tests/config/test_unknown_keys.py",),
    ),
    # Ranks.
    Mutation(
        name="fsdp_takes_the_mean",
        path="recipe_lib/parallel/fsdp.py",
        old="        fsdp_module.set_gradient_divide_factor(1.0)\n",
        new="",
        harm="several: gradients are those of one rank divided once too often",
        tests=("tests/parallel/test_fsdp.py", "-m", "not slow", "-k", "gradients_are_sums"),
    ),
    Mutation(
        name="wrong_key_head",
        path="recipe_lib/parallel/tensor.py",
        old="group.rank * spec.num_kv_heads // group.size if copies_kv_heads",
        new="group.rank % spec.num_kv_heads if copies_kv_heads",
        harm="several: four ranks that share two key heads attend with the wrong ones",
        tests=(
            "tests/parallel/test_tensor.py",
            "-k",
            "plain_model and 4",
        ),
    ),
    Mutation(
        name="shared_sequences_count_twice",
        path="recipe_lib/parallel/world.py",
        old="if self.context is not None and self.context.rank:",
        new="if self.context is not None and self.context.rank > self.context.size:",
        harm="several: the loss of ranks that share sequences is logged as often as they are",
        tests=("tests/recipes/test_context_runs.py", "-k", "losses_are_those and gemma3"),
    ),
    Mutation(
        name="tied_gradient_counts_twice",
        path="recipe_lib/optim/optimizers.py",
        old="trained, parallel.tied_copy",
        new="trained, None",
        harm="several: a pipeline with tied embeddings clips by a norm that is too large",
        tests=("tests/parallel/pipeline/test_equality.py::test_every_schedule_on_two_ranks",),
    ),
    Mutation(
        name="one_more_in_flight",
        path="recipe_lib/parallel/pipeline/schedules.py",
        old="ahead = min(ranks - 1 - rank, micro_batches) if",
        new="ahead = min(ranks - rank, micro_batches) if",
        harm="each stage of 1f1b keeps one micro-batch more than it needs",
        tests=("tests/parallel/pipeline/test_schedules.py", "-k", "by_hand"),
    ),
    Mutation(
        name="blames_who_waits",
        path="recipe_lib/parallel/heartbeat.py",
        old="return sorted(behind - ahead)",
        new="return sorted(behind)",
        harm="of a run that hangs a rank is named that waits for the one that is stuck",
        tests=("tests/parallel/test_heartbeat_rules.py",),
    ),
    # Training.
    Mutation(
        name="loss_over_all_tokens",
        path="recipes/full_finetune_distributed.py",
        old="/ max(1, batches.num_label_tokens)",
        new="/ max(1, batches.total_tokens)",
        harm="prompts make losses and gradients smaller",
        tests=(
            "tests/recipes/test_worlds.py",
            "-k",
            "plain_loop and alpaca",
        ),
    ),
    Mutation(
        name="patience_begins_anew",
        path="recipe_lib/training/best_step.py",
        old='self._reference = record["reference"]',
        new="self._reference = None",
        harm="a resumed run stops at another step than the uninterrupted one",
        tests=("tests/training/test_best_step.py",),
    ),
    Mutation(
        name="point_of_one_rank",
        path="recipe_lib/methods/dpo/loss.py",
        old="return (world.all_reduce_sum(total) / max(1, num_items)).clamp(min=0)",
        new="return (total / max(1, num_items)).clamp(min=0)",
        harm="several: KTO compares with the point of reference of one rank's samples",
        tests=("tests/recipes/test_kto.py", "-k", "two_ranks and accumulation"),
    ),
    Mutation(
        name="dropout_stays_off",
        path="recipe_lib/training/losses.py",
        old="    model.train()\n    return num_label_tokens, num_items\n",
        new="    return num_label_tokens, num_items\n",
        harm="after its first validation a run trains without dropout",
        tests=("tests/training/test_validation.py",),
    ),
    Mutation(
        name="resume_loses_a_line",
        path="recipe_lib/training/records.py",
        old='if line["step"] <= step]',
        new='if line["step"] < step]',
        harm="metrics.jsonl of a resumed run lacks the step that it goes on from",
        tests=("tests/training/records/test_metrics.py",),
    ),
    # Models and what they compute.
    Mutation(
        name="documents_see_each_other",
        path="recipe_lib/ops/special_attention.py",
        old="reach = reach - torch.searchsorted(",
        new="reach = reach + 1 - torch.searchsorted(",
        harm="a packed document sees the last token of the one before it",
        tests=("tests/ops/test_attention.py",),
    ),
    Mutation(
        name="balance_of_own_tokens",
        path="recipe_lib/models/mixture.py",
        old='total_rows = rows if sequences is None else all_reduce(rows, "sum", sequences)',
        new="total_rows = rows",
        harm="several: ranks that share sequences balance experts by their own part of them",
        tests=("tests/parallel/test_context.py", "-k", "one_family_of_each_kind"),
    ),
    Mutation(
        name="pieces_drop_other_channels",
        path="recipe_lib/memory/mlp_tiles.py",
        old="        torch.set_rng_state(cpu_state)\n",
        new="",
        harm="with memory.mlp_tiles gradients are those of another dropout than the loss",
        tests=("tests/memory/test_mlp_tiles.py", "-k", "dropout"),
    ),
    Mutation(
        name="dora_lengths_of_the_first_rank",
        path="recipe_lib/adapters/lora.py",
        old="local.copy_(lengths[offset[0] : offset[0] + local.shape[0]])",
        new="local.copy_(lengths[: local.shape[0]])",
        harm="several: sharded DoRA does not begin as the model that was loaded",
        tests=(
            "tests/adapters/test_lora_sharded.py",
            "-k",
            "dora",
        ),
    ),
    Mutation(
        name="space_after_a_special_token",
        path="recipe_lib/tokenizers/tokenizer.py",
        old="position = TextPosition.AFTER_SPECIAL\n",
        new="position = TextPosition.INSIDE\n",
        harm="the first word after a special token has other ids than in transformers",
        tests=("tests/tokenizers/test_made.py",),
    ),
    Mutation(
        name="muon_goes_by_its_part",
        path="recipe_lib/optim/algorithms/muon.py",
        old="math.sqrt(max(matrix.shape))",
        new="math.sqrt(max(part.weights.shape))",
        harm="several: Muon's steps are smaller on more ranks",
        tests=(
            "tests/optim/test_muon.py",
            "-k",
            "numbers_of_one and 3",
        ),
    ),
    Mutation(
        name="adapter_scaled_once",
        path="recipe_lib/adapters/adapted_product.py",
        old="narrow_grad = (out_rows @ lora_b).mul_(scaling)",
        new="narrow_grad = out_rows @ lora_b",
        harm="LoRA's A and the layers before are trained by gradients of another scale",
        tests=("tests/adapters/test_adapted_product.py",),
    ),
    Mutation(
        name="trained_bias_beside_an_adapter",
        path="recipe_lib/adapters/adapted_product.py",
        old="isinstance(part, Tensor) and part.requires_grad for part in self.arguments",
        new="False for part in self.arguments",
        harm="a bias that a copied recipe trains beside LoRA never gets a gradient",
        tests=("tests/adapters/test_adapted_product.py",),
    ),
    # What is shown, and what a trained model answers.
    Mutation(
        name="eta_of_the_whole",
        path="recipe_lib/report/phases.py",
        old="seconds / self.done * (self.total - self.done)",
        new="seconds / self.done * self.total",
        harm="the time left of a phase does not fall",
        tests=("tests/report/test_phases.py",),
    ),
    Mutation(
        name="one_seed_for_all_prompts",
        path="recipe_lib/generation/sample.py",
        old="manual_seed(seeds[number]) for number",
        new="manual_seed(seeds[0]) for number",
        harm="an answer depends on which prompt is first in its batch",
        tests=("tests/generation/test_batch.py", "-k", "seed"),
    ),
    Mutation(
        name="scores_of_one_rank",
        path="recipe_lib/evaluation/held_out.py",
        old="for rows in world.gather_json(own_scores) for row in rows)",
        new="for rows in [own_scores] for row in rows)",
        harm="several: tune eval on two ranks counts half of the samples",
        tests=(
            "tests/evaluation/test_eval.py",
            "-k",
            "ranks_share",
        ),
    ),
    Mutation(
        name="torn_line_stays",
        path="recipe_lib/files.py",
        old="            with suppress(OSError):\n                self._file.truncate(size)\n",
        new="            with suppress(OSError):\n",
        harm="a full disk leaves half a line in metrics.jsonl, before the next one",
        tests=("tests/training/records/test_metrics.py",),
    ),
    # Recipes.
    Mutation(
        name="logs_one_rank_s_loss",
        path="recipes/full_finetune_distributed.py",
        old="mean_loss = self.world.all_reduce_sum(loss)",
        new="mean_loss = loss",
        harm="several: the loss that is logged is that of the first rank's samples",
        tests=(
            "tests/recipes/test_worlds.py",
            "-k",
            "more_ranks and text and 2",
        ),
    ),
    Mutation(
        name="reward_is_a_sum",
        path="recipes/reward_distributed.py",
        old="self.compute_loss(micro_batch, sums) / batches.num_items",
        new="self.compute_loss(micro_batch, sums)",
        harm="gradients of a reward model grow with its batch",
        tests=(
            "tests/recipes/test_reward.py",
            "-k",
            "gradient_of_the_mean",
        ),
    ),
]
