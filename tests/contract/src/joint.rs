//! The laws of joint requests: the calls for several keys that the limiter gathers.
//!
//! A store may ignore that they belong together. Then the other laws say all there is to say about
//! them.

use std::sync::Arc;
use std::time::Duration;

use super::caller::{Arrivals, Caller, LONG, pass};
use tollgate::__lab::{JointCall, part_of};
use tollgate::Quota;
use tollgate::store::{Demand, Lease, Store};

/// Asks for one permit of each key at one moment. Returns `None` if the store decides about the keys
/// one by one.
async fn ask_jointly(
    callers: &[Caller],
    costs: &[u32],
    earliest: Duration,
    latest: Duration,
) -> Option<Vec<Lease>> {
    let joint = JointCall::default();
    let mut replies = Vec::new();
    for (caller, cost) in callers.iter().zip(costs) {
        let demands = [Demand::new(*cost, 1).earliest(earliest)];
        let mut request = caller.asks_for(&demands);
        request.latest = latest;
        replies.push(caller.store.lease(part_of(&joint, request)));
        if !joint.is_used() {
            return None;
        }
    }
    joint.send();
    let mut leases = Vec::new();
    for reply in replies {
        leases.push(reply.arrives().await.expect("the store answers"));
    }
    let waits: Vec<Duration> = leases
        .iter()
        .flat_map(|lease| lease.grants.first())
        .map(|grant| grant.wait)
        .collect();
    if waits.is_empty() {
        let refusing = leases.iter().filter(|lease| lease.refused.is_some());
        assert_eq!(refusing.count(), 1, "one key refuses: {leases:?}");
        let is_undecided = |lease: &&Lease| lease.recovering == Some(Duration::ZERO);
        let undecided = leases.iter().filter(is_undecided).count();
        assert_eq!(undecided + 1, callers.len(), "{leases:?}");
    } else {
        assert_eq!(waits.len(), callers.len(), "all or nothing: {leases:?}");
        let is_common = waits
            .iter()
            .all(|wait| *wait == waits[0] && *wait >= earliest);
        assert!(is_common, "one moment: {leases:?}");
    }
    Some(leases)
}

fn three(store: &Arc<dyn Store>, law: &str) -> [Caller; 3] {
    let millis = Duration::from_millis;
    [
        Quota::new(6, millis(200)),
        Quota::new(4, millis(150)),
        Quota::bucket(5)
            .refill(5, millis(100))
            .and(Quota::new(7, millis(250))),
    ]
    .map(|quota| Caller::new(store, &format!("{law} {quota}"), quota))
}

/// Books for several keys and for single ones in turns, uses each permit at its first or last
/// moment, and counts every window.
pub(super) async fn joint_requests_are_never_over(store: &Arc<dyn Store>) {
    let callers = three(store, "joint");
    let mut arrivals: [Arrivals; 3] = Default::default();
    for round in 0u32..60 {
        let earliest = Duration::from_millis([0, 0, 90, 0, 700][round as usize % 5]);
        let costs = [1 + round % 2, 1, 1 + round % 3];
        let Some(leases) = ask_jointly(&callers, &costs, earliest, LONG).await else {
            return;
        };
        for (arrivals, lease) in arrivals.iter_mut().zip(&leases) {
            arrivals.add(lease, round);
        }
        let alone = round as usize % 3;
        arrivals[alone].add(&callers[alone].book(1, 1, LONG).await, round);
        if round % 7 == 0 {
            pass(Duration::from_millis(60)).await;
        }
    }
    let [first, second, third] = arrivals;
    first.assert_never_over(6, 200_000);
    second.assert_never_over(4, 150_000);
    third.assert_never_over(7, 250_000);
}

/// If one key refuses, the others are as before, and the request gets the first common moment if it
/// can wait until then.
pub(super) async fn refused_joint_requests_leave_no_trace(store: &Arc<dyn Store>) {
    let window = Duration::from_secs(600);
    let callers = ["plenty", "scarce", "bucket"].map(|law| {
        let quota = match law {
            "plenty" => Quota::new(9, window),
            "scarce" => Quota::new(2, window),
            _ => Quota::bucket(4).refill(4, window),
        };
        Caller::new(store, law, quota)
    });
    for _ in 0..2 {
        if ask_jointly(&callers, &[1; 3], Duration::ZERO, window)
            .await
            .is_none()
        {
            return;
        }
    }
    let before = [callers[0].peek().await, callers[2].peek().await];
    let leases = ask_jointly(&callers, &[1; 3], Duration::ZERO, window / 2).await;
    let leases = leases.expect("it decides jointly");
    let refused = leases[1].refused.expect("the scarce key refuses");
    let after = [callers[0].peek().await, callers[2].peek().await];
    // The use of a bucket falls with time: units count from the deadlines of their permits.
    for (before, after) in before.iter().zip(&after) {
        assert!(after.limits[0].used <= before.limits[0].used, "{after:?}");
    }
    let leases = ask_jointly(&callers, &[1; 3], Duration::ZERO, LONG).await;
    let leases = leases.expect("it decides jointly");
    let slot = leases[1].now + leases[1].grants[0].wait.as_micros() as u64;
    let stated = leases[1].now + refused.wait.expect("a slot").as_micros() as u64;
    assert!(
        slot <= stated,
        "the slot is not later than stated: {slot}, {stated}"
    );
    let booked = callers[0].peek().await;
    assert_eq!(booked.limits[0].used, 3, "{booked:?}");
    assert_eq!(
        booked.free, 7,
        "it takes nothing of the time before: {booked:?}"
    );
}
