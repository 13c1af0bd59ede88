//! Set quotas.

use std::sync::Arc;
use std::time::Duration;

use super::caller::{Caller, LONG, granted};
use tollgate::Quota;
use tollgate::store::{Change, ChangeKind, Demand, Lease, LimitSpec, SetQuota, Store, StoreError};

/// Changes the set quota of a caller's key, to the limits of `spec` unless it ends. Returns what is in force
/// then, or `None` if the store has no set quotas.
async fn change(caller: &Caller, kind: ChangeKind, spec: &Arc<LimitSpec>) -> Option<SetQuota> {
    let change = Change::Quota { kind, life: LONG };
    let reply = caller.store.change(caller.key, spec, change);
    match reply.arrives().await {
        Ok(in_force) => Some(in_force.set_quota.expect("the reply states the set quota")),
        Err(StoreError::Unsupported(_)) => None,
        Err(error) => panic!("the store answers: {error}"),
    }
}

/// Sets the quota of a caller's key. Returns its version, or `None` if the store has no set quotas.
async fn set(caller: &Caller, quota: Quota) -> Option<u32> {
    let of_operator = Caller::new(&caller.store, "", quota).spec;
    let set = change(caller, ChangeKind::Set, &of_operator).await?;
    assert_eq!(set.version % 2, 1, "the version of a set quota is odd");
    assert_eq!(set.quota, Some(quota));
    Some(set.version)
}

/// Ends the set quota of a caller's key, under `spec`. Returns the version in force then.
async fn end(caller: &Caller, spec: &Arc<LimitSpec>) -> u32 {
    let end = change(caller, ChangeKind::End, spec).await;
    end.expect("quotas can be set").version
}

/// Books `count` permits now, and asserts which quota the reply states.
async fn book(caller: &Caller, count: u32, told: Option<(u32, Option<Quota>)>) -> Lease {
    let lease = caller.book(1, count, Duration::ZERO).await;
    let states = lease.set_quota.as_ref();
    let states = states.map(|quota| (quota.version, quota.quota));
    assert_eq!(states, told, "the reply states another version: {lease:?}");
    lease
}

/// From the call that sets a quota on, it decides for all callers, with the units that were used. When it
/// ends, the quotas of callers decide.
pub(super) async fn set_quotas_decide_for_all_callers(store: &Arc<dyn Store>) {
    let own = Quota::per_minute(10);
    let caller = Caller::new(store, "set quota", own);
    assert_eq!(granted(&book(&caller, 4, None).await), 4);
    let stricter = Quota::per_minute(6);
    let Some(first) = set(&caller, stricter).await else {
        return;
    };
    let lease = book(&caller, 4, Some((first, Some(stricter)))).await;
    assert_eq!(granted(&lease), 2, "4 of 6 were used: {lease:?}");
    let usage = caller.peek().await;
    let limits: Vec<_> = usage.limits.iter().map(|usage| usage.limit).collect();
    assert_eq!(limits, stricter.limits(), "{usage:?}");
    let quota = usage.set_quota.expect("a peek states the set quota");
    assert_eq!((quota.version, quota.quota), (first, Some(stricter)));
    assert!(quota.left <= LONG && quota.left > LONG / 2, "{quota:?}");
    assert_eq!(quota.life, LONG);
    let knows_first = caller.informed(stricter, first);
    assert_eq!(granted(&book(&knows_first, 1, None).await), 0);

    let looser = Quota::per_minute(50).and(Quota::in_flight(3));
    let second = set(&caller, looser).await.expect("it was set before");
    assert!(second > first, "{second} after {first}");
    let lease = book(&knows_first, 60, Some((second, Some(looser)))).await;
    assert_eq!(granted(&lease), 44, "6 of 50 were used: {lease:?}");

    let end = end(&caller, &caller.spec).await;
    assert!(end % 2 == 0 && end > second, "{end} after {second}");
    let knows_second = caller.informed(looser, second);
    let lease = book(&knows_second, 1, Some((end, None))).await;
    let nothing = (granted(&lease), lease.recovering, lease.refused);
    assert_eq!(nothing, (0, Some(Duration::ZERO), None), "{lease:?}");
    let knows_end = caller.informed(own, end);
    let lease = book(&knows_end, 1, None).await;
    assert_eq!(granted(&lease), 0, "50 of 10 were used: {lease:?}");
    assert!(lease.refused.is_some(), "{lease:?}");
}

/// Learns the quota of a caller's key. Returns the set quota, or `None` if the store has no set quotas.
async fn learn(caller: &Caller, quota: Quota) -> Option<SetQuota> {
    let stated = Caller::new(&caller.store, "", quota).spec;
    change(caller, ChangeKind::Learn, &stated).await
}

/// A quota that the upstream states is a set quota, but it does not replace that of an operator.
pub(super) async fn learned_quotas_give_way_to_those_of_operators(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "learned quota", Quota::per_minute(10));
    assert_eq!(granted(&book(&caller, 4, None).await), 4);
    let stated = Quota::per_minute(6);
    let Some(first) = learn(&caller, stated).await else {
        return;
    };
    assert!(
        first.is_learned() && first.quota == Some(stated),
        "{first:?}"
    );
    let lease = book(&caller, 4, Some((first.version, Some(stated)))).await;
    assert_eq!(granted(&lease), 2, "4 of 6 were used: {lease:?}");
    let again = learn(&caller, stated).await.expect("it was learned before");
    assert_eq!(
        again.version, first.version,
        "the same quota, learned again"
    );
    let second = learn(&caller, Quota::per_minute(8)).await;
    let second = second.expect("it was learned before");
    assert!(second.is_learned() && second.version > first.version);

    let of_operator = Quota::per_minute(9);
    let third = set(&caller, of_operator).await.expect("quotas can be set");
    assert!(third > second.version, "{third} after {second:?}");
    let kept = learn(&caller, stated).await.expect("quotas can be set");
    assert_eq!((kept.version, kept.quota), (third, Some(of_operator)));
    assert!(!kept.is_learned(), "{kept:?}");
    // The end of the learned quota is late: it ends no other one.
    let knows_second = caller.informed(Quota::per_minute(8), second.version);
    assert_eq!(end(&caller, &knows_second.spec).await, third);
    let set = caller.peek().await.set_quota;
    assert_eq!(set.and_then(|set| set.quota), Some(of_operator));
    end(&caller, &caller.spec).await;
    let last = learn(&caller, stated).await.expect("quotas can be set");
    assert!(last.is_learned() && last.version > third, "{last:?}");
}

/// A store that has lost its state learns the set quota from the callers that know it.
pub(super) async fn callers_retell_set_quotas(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "retold quota", Quota::per_minute(10));
    if set(
        &Caller::new(store, "other key", Quota::per_minute(1)),
        Quota::per_minute(2),
    )
    .await
    .is_none()
    {
        return;
    }
    let quota = Quota::per_minute(3);
    let knows = caller.informed(quota, 5);
    assert_eq!(granted(&book(&knows, 1, None).await), 1);
    let lease = book(&caller, 5, Some((5, Some(quota)))).await;
    assert_eq!(granted(&lease), 2, "{lease:?}");
    // A caller that knows the end brings the set quota to an end.
    let knows_end = caller.informed(Quota::per_minute(10), 6);
    let demands = [Demand::new(1, 1)];
    let lease = knows_end.ask(knows_end.asks_for(&demands)).await;
    assert_eq!((granted(&lease), lease.set_quota), (0, None));
    let refused = lease.refused.and_then(|refusal| refusal.limit);
    assert_eq!(refused, Some(quota.limits()[0]), "its limits fade");
    book(&knows, 1, Some((6, None))).await;
}
