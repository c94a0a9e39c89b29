"""The card of `python -m lm.check`: all properties, and what each measures."""

from collections.abc import Callable

from lm.checking import programs, properties, structure, together
from lm.checking.subject import Subject

# In the order of the card: what is fast and finds most comes first.
PROPERTIES: dict[str, Callable[[Subject], str]] = {
    "ideas of the config are on": structure.ideas_of_the_config_are_on,
    "looks back only, within its document": properties.sees_earlier_tokens_of_its_document,
    "texts of a batch are independent": properties.examples_are_independent,
    "padding changes nothing": properties.padding_changes_nothing,
    "a packed document is the same alone": properties.a_packed_document_is_the_same_alone,
    "shifted positions change nothing": structure.shifted_positions_change_nothing,
    "heads, features, tokens have no order": structure.axes_have_no_order,
    "branches that add 0 leave the stream": structure.branches_that_add_nothing_leave_the_stream,
    "without ideas: the plain Transformer": structure.without_ideas_it_is_the_plain_transformer,
    "step 0 = the model without it": structure.starts_as_the_model_without_it,
    "the loss of step 0 is near ln V": properties.the_loss_at_step_0_is_that_of_equal_probabilities,
    "losses of packed documents = alone": properties.losses_of_packed_documents_are_those_of_documents_alone,
    "cached decoding = full pass": properties.cached_decoding_is_the_full_pass,
    "the loss reads each parameter and layer": properties.the_loss_reads_every_parameter_of_every_layer,
    "micro-batches, loss chunks = whole batch": properties.micro_batches_and_loss_chunks_are_the_whole_batch,
    "losses are means over the targets": properties.losses_are_means_over_the_targets,
    "FLOPs = traced program": programs.flops_are_those_of_the_traced_program,
    "plan's kernels = program's kernels": programs.the_plan_has_the_kernels_of_the_program,
    "plan's memory = traced program's": programs.the_plan_has_the_memory_of_the_traced_program,
    "what is carried is read": programs.what_is_carried_is_read,
    "exponentials and logits are wide": programs.exponentials_and_logits_are_wide,
    "heads are independent": structure.heads_are_independent,
    "layers see all that windows allow": structure.layers_see_all_that_their_windows_allow,
    "turns = the same layers again": structure.loops_are_the_same_layers_again,
    "scanned = unrolled = rematerialized": properties.scanned_and_rematerialized_are_unrolled,
    "documents of several chunks": properties.documents_of_several_chunks_are_the_same_alone,
    "dropout": structure.dropout_draws_anew_at_each_place,
    "dropout of steps and micro-batches": structure.training_draws_anew_in_each_step,
    "gradients = float64, finite differences": properties.gradients_are_those_of_float64,
    "large weights stay finite": properties.large_weights_stay_finite,
    "bfloat16 is within its error": properties.bfloat16_is_within_its_error,
    "kernels and platforms compute the same": programs.implementations_compute_the_same,
    "sizes do not depend on the width": structure.sizes_do_not_depend_on_the_width,
    "sizes do not explode with the depth": structure.sizes_do_not_explode_with_the_depth,
    "training resumes to the bit": properties.training_resumes_to_the_bit,
    "devices compute the same": properties.devices_compute_the_same,
    "every other idea beside it, or refused": together.every_other_idea_is_right_beside_it_or_refused,
    "export": programs.is_exported_to_the_same_logits_or_refused,
}
