//! The calls in flight of this process.
//!
//! A limit of `n` calls in flight has `n` in-flight slots for each key, shared by all processes. In
//! this folder, *slot* always means an in-flight slot, and never a slot of a rate. The store grants
//! them; see `limit/in_flight.rs` for its side.
//!
//! # The protocol
//!
//! A process sends its state to the store: how many slots it uses, and how many requests wait. This
//! is a *claim*. A claim states totals and no changes, so a claim that is lost, late or repeated
//! does no harm. The answer states totals as well: how many slots the process was ever granted. The
//! difference to the answers before is the number of new slots.
//!
//! - One claim at a time is on its way. Changes meanwhile are in the next claim.
//! - A slot whose call has ended goes to the next request that waits in this process, and the store
//!   is not notified. If other processes wait, the slot goes back with the next claim, and the
//!   store grants it to the request that came first.
//! - A claim counts for a time to live, and the store repeats it while slots are in use. If it
//!   expires, the slots are lost, and their calls have to end. A process that was suspended until
//!   its claim expired uses no slot and passes none on, even before the store notifies it.
//! - If a claim fails, the requests that wait fail with it. The store repeats the claim. The next
//!   change in this process makes a new one.
//!
//! ```text
//!                 claim                    answer
//!     Idle ─────────────────────> Asking ──────────> Idle
//!                                  │
//!                                  │ failure
//!                                  v     claim
//!                                Failed ────────> Asking
//!                                  │  answer to the repeated claim
//!                                  └──────────────────────────────> Idle
//! ```
//!
//! If the quota is divided among classes, each class has its own claims, which state its share of the
//! limit. The store decides which class gets a free slot. So a slot whose call has ended goes back
//! to the store if requests of another class wait, also in this process.
//!
//! An *impatient* request is one that cannot wait. It is queued like the others, until the store
//! answers the claim that counts it. If the request has no slot by then, it is refused.

mod calls;
mod claims;
mod key_calls;
#[cfg(test)]
mod properties;

pub(super) use calls::{Acted, InFlightCalls};
pub(super) use key_calls::KeyCalls;
