//! Rate limiting with a quota: a request enters with its key, and a [`Permit`] comes out, at once
//! or after a wait.

// All state of a key in this process is behind one lock that is never held across an `await`; only
// the permits at hand of `Key::ALL` are taken without it (`unlocked`). A waiting future holds a number in
// the key's queue and can be dropped at any time. The limiter does not count: the store does.
//
// If no permit is at hand, a request enters in `wait`. It is a `request`, which knows the order in which it waits for
// holds, slots and in-flight slots. The future in `wait` polls it.
//
// `Core` has methods in `engine` and `effects`, and where it implements a trait: in `counting`, `listener` and
// `guarding`. Below `effects` in the table, what a core does is written as functions. A function takes the core as its
// first argument, and callers name its file: `holds::release(core, key)`.
//
// The imports point one way: a file imports only files that stand above it in this table. But a core owns
// the joint requests that wait, so `engine` imports their type from `joint`.
//
// | file | what it has |
// |---|---|
// | `reservation`, `hosts`, `quotas` | values: booked slots, why there is none, hosts, quotas that requests state |
// | `lanes` | the waiters of a line by costs, and the slots booked for them |
// | `session`, `prefetched`, `unlocked`, `queue`, `key_state` | the state of one key: the store's clock, permits at hand, waiters, bookings, holds |
// | `key_states` | the states of all keys, and the way to visit one |
// | `settings` | what a limiter is built from |
// | `in_flight` | the calls in flight of all keys |
// | `unit_check`, `whole_limit` | which units requests state; the requests that wait for a whole limit |
// | `tasks` | tasks that run at once, as far as they can |
// | `engine` | `Core`: the state of all keys |
// | `store_call` | a call to the store whose answer is still to come |
// | `division` | what the parts of a divided quota do for each other |
// | `effects` | access to the state of a key, and the effects that it returns |
// | `cores` | the cores of a limiter whose quota counts several units |
// | `counting` | what is counted of requests, and the stats of a limiter |
// | `holds`, `in_flight_slot`, `own_quota` | holds of keys and their probes, in-flight slots, quotas that requests or responses state, or an operator sets |
// | `part` | the keys of a request: what it states for them, and the slots that it gets in its line |
// | `admitted` | a request that is sent, for its response, and which of its keys the response is about |
// | `responses`, `listener`, `status` | what comes from the upstream and from the store, and what can be read |
// | `explanation`, `waited` | why a request would wait now, or be refused: the answer, and its words; how it has waited |
// | `around` | layers around each other: which requests are refused |
// | `settlement` | the true cost of a request that was sent |
// | `sent` | a request that was sent and not yet answered |
// | `taken` | what a request has that may leave; [`Permit`], the same in the hands of a user |
// | `joint` | requests of several keys: their common slots |
// | `at_once` | the fast path: permits at hand |
// | `line` | where a request waits for its slots: the queue of its key, or the set of requests with the same keys |
// | `request` | the way of a request to its permit |
// | `wait` | the slow path, and the future that waits |
// | `explain` | why a request would wait now, or be refused: how that is found, and its text |
// | `acquire` | the public future of a permit |
// | `limiter` | [`Limiter`], the public face |
// | `guarding` | what a ban guard needs of limiters |

mod acquire;
mod admitted;
mod around;
mod at_once;
mod cores;
mod counting;
mod division;
mod effects;
mod engine;
mod explain;
mod explanation;
mod guarding;
mod holds;
mod hosts;
mod in_flight;
mod in_flight_slot;
mod joint;
mod key_state;
mod key_states;
mod lanes;
mod line;
// The folder and this file have the same name. The path of the type is `crate::limiter::Limiter`.
#[allow(clippy::module_inception)]
mod limiter;
mod listener;
mod own_quota;
mod part;
mod prefetched;
mod queue;
mod quotas;
mod request;
mod reservation;
mod responses;
mod sent;
mod session;
mod settings;
mod settlement;
mod status;
mod store_call;
mod taken;
mod tasks;
mod unit_check;
mod unlocked;
mod wait;
mod waited;
mod whole_limit;

pub use acquire::Acquire;
pub(crate) use admitted::Admitted;
pub(crate) use around::{
    InnerCall, Mark, forget_panic, is_any as is_inside_a_layer, is_unsure, note_pair,
    refusal_of_throttle,
};
pub(crate) use at_once::send_all_at_once;
pub(crate) use engine::{CoreId, read_marks};
pub(crate) use explanation::Held;
pub(crate) use explanation::Shown;
pub use explanation::{Because, Explanation, Verdict};
pub(crate) use guarding::CountedUnit;
pub(crate) use in_flight_slot::InFlightSlot;
pub use key_state::{HeaderTrust, StatedLimit};
pub use limiter::Limiter;
pub use own_quota::QuotaError;
pub(crate) use part::{Entry, MOST_PARTS, PartRef};
pub(crate) use quotas::{CountedLate, QuotaId, Quotas};
pub(crate) use request::Suspect;
pub use sent::Sent;
pub use settings::OnStoreError;
pub(crate) use settings::{OnScope, PartOfQuota, Settings};
pub use settlement::Settlement;
pub use status::{KeyStatus, QuotaSource};
pub use taken::Permit;
pub(crate) use taken::Taken;
pub(crate) use wait::{Wait, slow as start_slow};
pub use waited::Waited;
