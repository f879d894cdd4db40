//! The promises that are kept on any driver, once, for every test program that asks for them.

/// Calls `$on!` with the modules and names of all of them, and before them what `$own` has of its own.
macro_rules! every_promise {
    ($on:ident { $($own:tt)* }) => { $on! {
        $($own)*
        ahead {
            what_is_ahead_takes_no_call,
            as_much_is_ahead_as_was_asked_for_and_no_more,
            flushing_and_shrinking_give_back_what_is_ahead,
            a_failure_in_the_background_is_said_once_and_costs_nothing,
            a_shortage_in_the_background_is_not_said,
            a_buffer_may_shrink_and_go_while_memory_is_mapped_ahead_of_it,
            threads_with_the_background_among_them,
            a_set_grows_inside_what_is_ahead_of_its_members,
        }
        faults {
            a_failed_operation_changes_nothing,
            building_and_dropping_survive_any_failed_call,
            a_set_grows_as_one_or_not_at_all,
            two_failures_cost_no_byte_of_what_is_left,
            lasting_failures_are_accounted_for,
            a_drop_that_cannot_give_back_says_so_and_nothing_else_breaks,
        }
        life {
            random_lives_keep_address_contents_and_books,
            sizes_at_every_edge,
            fallbacks_do_as_they_say,
            what_one_buffer_gives_up_the_next_takes_without_a_new_chunk,
            two_threads_on_buffers_of_one_device,
            overlapping_copies_on_a_device,
            odd_elements_straddle_chunks,
            exact_shrinks_give_every_granule_back_and_keep_the_contents,
            a_range_of_1100_chunks_maps_whole,
            members_of_a_set_out_of_step,
            leaked_memory_stays_and_is_not_counted_as_given_back,
            copies_and_fills_on_a_stream,
            hooks_are_told_of_every_chunk,
        }
        pool {
            a_failed_move_changes_nothing,
            two_failures_of_a_move_cost_no_byte_of_what_is_left,
            lasting_failures_of_a_move_are_accounted_for,
            a_loan_moves_chunks_and_nothing_else,
            lender_and_borrower_go_in_any_order,
            cuts_leave_chunks_that_fit_elsewhere,
            coalescing_makes_the_ladders_chunks_of_small_ones,
            coalescing_does_what_memory_allows,
            a_prewarmed_pool_has_what_a_buffer_takes,
        }
    } };
}
pub(crate) use every_promise;
