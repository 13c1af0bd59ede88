//! The contract of a store, as a test suite that any store can run.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() {
//! use std::sync::Arc;
//! use tollgate::store::MemoryStore;
//!
//! store_contract::check(Arc::new(MemoryStore::default())).await;
//! # }
//! ```
//!
//! The suite checks the replies of a store: the slots, validity and stamps of grants in the store's
//! own time. No check depends on when a task wakes, so the suite finds the same faults on a slow
//! machine as on a fast one. It takes about two seconds. If the store uses Tokio's clock and that
//! is paused, the suite takes no time.

mod caller;
mod in_flight;
mod joint;
mod later_use;
mod rates;
mod registers;
mod set_quota;

use std::sync::Arc;

use tollgate::store::Store;

/// Runs every law of the contract against `store`, each on keys of its own.
///
/// # Panics
///
/// If the store breaks a law. The message names the law and shows the store's reply.
pub async fn check(store: Arc<dyn Store>) {
    rates::grants_at_once_what_is_free(&store).await;
    rates::is_never_over(&store).await;
    rates::counts_a_cost_whole(&store).await;
    rates::takes_all_limits_or_none(&store).await;
    rates::refuses_without_a_trace_and_says_when(&store).await;
    rates::serves_in_order(&store).await;
    rates::hands_a_returned_slot_to_the_next(&store).await;
    rates::counts_what_passed_unused_back_once(&store).await;
    rates::takes_back_any_number_of_permits(&store).await;
    rates::fetches_ahead_only_what_is_plenty(&store).await;
    rates::never_grants_what_costs_more_than_the_limit(&store).await;
    rates::forgets_no_sooner_and_no_later_than_the_window(&store).await;
    rates::keeps_keys_apart_and_peeks_without_a_trace(&store).await;
    rates::tells_how_long_a_request_would_wait(&store).await;
    rates::leaves_to_others_what_they_use(&store).await;
    rates::counts_charges_by_their_age(&store).await;
    rates::decides_in_one_step(&store).await;
    later_use::is_never_over_with_later_use(&store).await;
    later_use::is_not_blocked_by_later_use(&store).await;
    later_use::erases_later_use_that_is_returned(&store).await;
    set_quota::set_quotas_decide_for_all_callers(&store).await;
    set_quota::callers_retell_set_quotas(&store).await;
    set_quota::learned_quotas_give_way_to_those_of_operators(&store).await;
    joint::joint_requests_are_never_over(&store).await;
    joint::refused_joint_requests_leave_no_trace(&store).await;
    in_flight::counts_calls_in_flight(&store).await;
    in_flight::serves_classes_below_their_share_first(&store).await;
    registers::changes_registers_in_one_step(&store).await;
}
