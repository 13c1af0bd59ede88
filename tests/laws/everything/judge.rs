//! What must hold of every history, judged by the upstream's log.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::error::Elapsed;
use tokio::time::{sleep, timeout};

use super::api::{Gates, Permit, Refused};
use super::features::Feature;
use super::fleet::{World, lock, ms};
use super::known;
use super::plan::{LimiterPlan, OnAway, Part, Patience, Rate, Request, Shares, Step, Then, Via};
use super::upstream::{BadAnswer, Change, Log, Unit, Use, most_at_once, over, underestimated};

/// Asserts what only a fleet that runs can show: that nothing was leaked.
pub(crate) async fn capacity_comes_back(world: &Arc<World>) {
    let limiters = &world.history.limiters;
    let features = world.history.features;
    world.net.come_back();
    let operator = world.start(world.history.releases.len() - 1);
    let gates = operator.gates().expect("it has just started");
    let keys = || {
        limiters
            .iter()
            .enumerate()
            .flat_map(|(number, plan)| (0..plan.keys.max(1)).map(move |key| (number, key)))
    };
    let has_holds = |limiter, key| {
        lock(&world.log)
            .holds
            .iter()
            .any(|event| event.key == (limiter, key))
    };
    let is_changed = |limiter, key| lock(&world.log).changes.contains_key(&(limiter, key));
    for (limiter, key) in keys() {
        for attempt in 0..10 {
            let is_unset = !is_changed(limiter, key) || gates.unset_quota(limiter, key).await;
            let is_released = !has_holds(limiter, key) || gates.release(limiter, key).await;
            if is_unset && is_released {
                break;
            }
            if attempt == 9 && world.history.store.lost == (0, 0) {
                world.wrong("a store that is back accepts no change");
            }
        }
    }
    sleep(rest(limiters, features.has(Feature::SetQuota))).await;
    stats_agree(world);
    let counts_late = limiters.iter().any(|plan| plan.counted_within > 0);
    let is_owed = known::OWED_WITHOUT_SHARES.stands()
        && features.has(Feature::Deploys)
        && lacks_shares(world)
        && (features.any(&[Feature::SetQuota, Feature::Settle]) || counts_late);
    let is_left = known::UNITS_AFTER_AN_OUTAGE.stands()
        && features.has(Feature::FallbackShare)
        && features.has(Feature::SetQuota);
    let is_filled = known::RESTS_AFTER_SET_QUOTAS.stands()
        && features.has(Feature::SetQuota)
        && features.has(Feature::Bucket);
    let is_settled_far_above = known::SETTLED_FIXED_WINDOWS.stands()
        && features.has(Feature::Fixed)
        && features.has(Feature::FewKeys)
        && features.has(Feature::Settle);
    if is_owed || is_left || is_filled || is_settled_far_above {
        return;
    }
    if world.history.store.lost != (0, 0) {
        return;
    }
    for (limiter, key) in keys() {
        match timeout(Duration::from_secs(10), gates.at_rest(limiter, key)).await {
            Ok(Ok(rest)) if rest.used == 0 && rest.waiting == 0 => {}
            seen => world.wrong(&format!(
                "key {key} of limiter {limiter} is not at rest: {seen:?}"
            )),
        }
    }
    all_is_free(world).await;
}

/// The stats count each request once, by its outcome.
pub(crate) fn stats_agree(world: &World) {
    let processes = lock(&world.processes).clone();
    for process in &processes {
        let Some(gates) = process.gates() else {
            continue;
        };
        let outcomes = gates.outcomes();
        let seen = *lock(&process.outcomes);
        if outcomes != seen {
            world.wrong(&format!(
                "process {} counts {outcomes:?}, its callers saw {seen:?}",
                process.number
            ));
        }
    }
}

/// A fresh process gets all of each limit at once.
async fn all_is_free(world: &Arc<World>) {
    let limiters = &world.history.limiters;
    let fresh = world.start(world.history.releases.len() - 1);
    let gates = fresh.gates().expect("it has just started");
    let may_wait =
        known::RESTS_AFTER_SET_QUOTAS.stands() && world.history.features.has(Feature::SetQuota);
    for (limiter, plan) in limiters.iter().enumerate() {
        let cost = if plan.is_divided { 1 } else { plan.most() };
        let tokens = plan
            .tokens
            .map_or(0, |rate| if plan.is_divided { 1 } else { rate.most() });
        // A slot of a fixed window that is lost is found in the next one.
        let is_fixed = matches!(plan.rates[0], Rate::Fixed { .. });
        let lost = if is_fixed { plan.longest_window() } else { 0 };
        let (soon, again) = (ms(600 + lost), ms(250 + lost));
        let trip = world.history.store.trip.map_or(0, |(_, longest)| longest);
        if plan.max_wait < 4 * trip {
            continue;
        }
        let part = Part {
            limiter,
            key: 0,
            cost,
            tokens,
        };
        let request = |class| Request {
            process: fresh.number,
            parts: vec![part],
            class,
            deadline: None,
            via: Via::Acquire,
            patience: Patience::Endless,
            transit: 0,
            takes: 0,
            then: Then::GiveBack(0),
            actual: None,
        };
        let classes: Vec<_> = match plan.is_divided {
            true => world
                .history
                .releases
                .concat()
                .into_iter()
                .map(|(class, _)| Some(class))
                .chain([None])
                .collect(),
            false => vec![None],
        };
        for class in classes {
            let permit = take(&gates, &request(class), soon, again).await;
            match permit {
                Ok(Ok(permit)) => permit.give_back(),
                Ok(Err(refused)) => world.wrong(&format!(
                    "limiter {limiter}, class {class:?}, refuses at rest: {refused:?}"
                )),
                Err(_) if may_wait => {}
                Err(_) => world.wrong(&format!(
                    "limiter {limiter}, class {class:?}, waits at rest"
                )),
            }
            sleep(ms(plan.longest_window() + 100)).await;
        }
        if plan.is_divided {
            continue;
        }
        let mut calls = Vec::new();
        let one = Part {
            cost: 1,
            tokens: 0,
            ..part
        };
        for number in 0..plan.in_flight.unwrap_or(0).min(plan.most().div_ceil(2)) {
            let one = Request {
                parts: vec![one],
                ..request(None)
            };
            match take(&gates, &one, soon, again).await {
                Ok(Ok(permit)) => calls.push(permit),
                Err(_) if may_wait => {}
                seen => {
                    let seen = seen.map(|permit| permit.map(|_| ()));
                    world.wrong(&format!(
                        "limiter {limiter}: call {number} in flight at rest: {seen:?}"
                    ));
                }
            }
        }
    }
}

/// Takes a permit that is free. Near the boundary of a fixed window, and for the last units of a bucket,
/// a request waits, or is refused if it cannot. Then it is tried `again` that much later.
async fn take(
    gates: &Gates,
    request: &Request,
    soon: Duration,
    again: Duration,
) -> Result<Result<Permit, Refused>, Elapsed> {
    let mut permit = timeout(soon, gates.acquire(request)).await;
    for _ in 0..3 {
        if let Ok(Err(Refused::Local("max_wait"))) = permit {
            sleep(again).await;
            permit = timeout(soon, gates.acquire(request)).await;
        }
    }
    permit
}

/// Returns after which time all limits have forgotten what was used.
fn rest(limiters: &[LimiterPlan], were_set: bool) -> Duration {
    let longest = |of: fn(&LimiterPlan) -> u64| limiters.iter().map(of).max().unwrap_or(0);
    let window = longest(LimiterPlan::longest_window) + longest(|plan| plan.counted_within);
    let hold = longest(|plan| plan.max_hold.max(8000));
    // A bucket that was three times as large may owe as much, and one that was set to a third is refilled as slowly.
    let windows = if were_set { 12 } else { 3 };
    ms(window * windows + longest(|plan| plan.max_wait) + hold + 10_000)
}

/// Adds to the log what is wrong with it.
pub(crate) fn judge(world: &World) {
    let mut log = lock(&world.log);
    let log = &mut *log;
    let mut wrong = Vec::new();
    for uses in log.uses.values_mut() {
        uses.sort_by_key(|one| one.at);
    }
    for (number, plan) in world.history.limiters.iter().enumerate() {
        for key in 0..plan.keys.max(1) {
            let found = over_the_limits(world, log, number, key);
            wrong.extend(found.map(|text| format!("key {key} of limiter {number}: {text}")));
            wrong.extend(too_many_in_flight(world, log, number, key));
            wrong.extend(too_many_bad(world, log, number, key));
        }
    }
    wrong.extend(overtaken(world, log));
    for (number, ends) in &log.ends {
        let arrivals = log.arrivals.get(number).copied().unwrap_or(0);
        if *ends != 1 || arrivals > 3 {
            wrong.push(format!(
                "request {number} has ended {ends} times and arrived {arrivals} times"
            ));
        }
    }
    log.wrong.extend(wrong);
}

/// What quotas a key had: from when until when, and in per cent of the configured one.
fn periods(world: &World, changes: &[Change]) -> Vec<(u64, u64, Option<u32>)> {
    // Permits at hand are of the quota before, as are the slots of a process that has not been told.
    let store = &world.history.store;
    let told = match store.trip {
        None => 80_000,
        Some(_)
            if world
                .history
                .features
                .any(&[Feature::Lossy, Feature::Outages, Feature::Stalls]) =>
        {
            16_000_000
        }
        Some((_, longest)) => 100_000 + longest * 2000,
    };
    let ends = changes
        .iter()
        .map(|change| change.asked)
        .skip(1)
        .chain([u64::MAX]);
    let later = changes.iter().zip(ends).map(|(change, end)| {
        (
            change.done + told,
            end,
            change.is_certain.then_some(change.percent),
        )
    });
    let first = changes.first().map_or(u64::MAX, |change| change.asked);
    [(0, first, Some(100))].into_iter().chain(later).collect()
}

fn over_the_limits(world: &World, log: &Log, limiter: usize, key: u8) -> Option<String> {
    let plan = &world.history.limiters[limiter];
    let changes = log
        .changes
        .get(&(limiter, key))
        .map_or(&[][..], |changes| changes);
    let requests = plan.rates.iter().map(|rate| (*rate, Unit::Requests));
    let limits = requests.chain(plan.tokens.map(|rate| (rate, Unit::Tokens)));
    limits.clone().find_map(|(rate, unit)| {
        let uses = log.uses.get(&(limiter, key, unit))?;
        let most = changes
            .iter()
            .map(|change| change.percent)
            .max()
            .unwrap_or(100)
            .max(100);
        let late = plan.counted_within * 1000;
        let during = periods(world, changes)
            .into_iter()
            .filter(|_| !changes.is_empty())
            .find_map(|(from, to, percent)| {
                let inside: Vec<Use> = uses
                    .iter()
                    // What was sent before may count as late as this.
                    .filter(|one| (from + late..to).contains(&one.at))
                    .copied()
                    .collect();
                let percent = percent?;
                // A process that is without the store may not know of a lower quota.
                let largest = rate.scaled(percent.max(100));
                let found = over(rate.scaled(percent), &inside, |window| {
                    may_exceed(world, largest, window) + forgotten(world, largest, window, changes)
                })?;
                Some(format!(
                    "{unit:?}: {found}, with the quota at {percent} % from {:.3} s on",
                    from as f64 / 1e6
                ))
            });
        let rate = rate.scaled(most);
        let always = over(rate, uses, |window| {
            may_exceed(world, rate, window) + forgotten(world, rate, window, changes)
        });
        always.map(|found| format!("{unit:?}: {found}")).or(during)
    })
}

/// Returns whether the processes of a release have no shares.
fn lacks_shares(world: &World) -> bool {
    world.history.releases.iter().any(Vec::is_empty)
}

/// Returns what a fixed window may have more than its limit, because the quota was set or unset while requests waited
/// for it.
fn forgotten(world: &World, rate: Rate, uses: &[Use], changes: &[Change]) -> u64 {
    let features = world.history.features;
    let is_joint = features.any(&[Feature::Joint, Feature::Units]);
    let Rate::Fixed { count, window } = rate else {
        return 0;
    };
    let waits = world.history.limiters.iter().map(|plan| plan.max_wait);
    let longest = waits.max().unwrap_or(0) * 1000;
    let number = |at: u64| at / (window * 1000);
    let is_after = |change: &Change| {
        let windows = number(change.asked)..=number(change.done + longest);
        windows.contains(&number(uses[0].at))
    };
    let is_known = known::FIXED_WINDOWS_OF_SET_QUOTAS.stands() && is_joint;
    if is_known && changes.iter().any(is_after) {
        count.into()
    } else {
        0
    }
}

/// Returns by how much a window may exceed its limit.
fn may_exceed(world: &World, rate: Rate, window: &[Use]) -> u64 {
    let mut more = underestimated(window);
    let features = world.history.features;
    if known::OVER_WITHOUT_SHARES.stands()
        && features.has(Feature::Deploys)
        && features.any(&[Feature::SetQuota, Feature::Refusals])
        && lacks_shares(world)
    {
        let parts = |release: &Shares| {
            release
                .iter()
                .map(|(_, percent)| u32::from(*percent))
                .sum::<u32>()
        };
        let largest = world.history.releases.iter().map(parts).max();
        more += u64::from(rate.most()) * u64::from(largest.unwrap_or(0)) / 100;
    }
    let is_late = features.has(Feature::SetQuota) && known::SETTLED_AFTER_SET_QUOTAS.stands()
        || features.has(Feature::Stalls) && known::SETTLED_AFTER_A_STALL.stands();
    if features.has(Feature::Settle) && is_late {
        more += u64::from(rate.most()) / 10 + 1;
    }
    if let OnAway::Share(percent) = world.history.on_store_error {
        // Where the store is lost and found, it grants the limit, and each process its share.
        let (from, to) = (window[0].at, window[window.len() - 1].at);
        let longest = world
            .history
            .limiters
            .iter()
            .map(|plan| plan.max_wait)
            .max()
            .unwrap_or(0);
        let after = (longest + 4_500 + rate.window()) * 1000;
        let troubles = lock(&world.net.troubles);
        let near = troubles.iter().filter(|(begin, end)| {
            from <= world.since_start(*end) + after && to >= world.since_start(*begin)
        });
        // A charge whose reply is lost is not repeated: then each outage may have its own share.
        let outages = match world.history.store.lost {
            (0, 0) if !known::SHARES_OF_EACH_OUTAGE.stands() => near.count().min(1),
            _ => near.count(),
        };
        for _ in 0..outages {
            let processes = lock(&world.processes).len() as u64;
            let most = u64::from(rate.most());
            let shares = processes * most * u64::from(percent) / 100;
            more += most.max(shares) + processes;
            let is_anew = known::SHARES_OF_EVICTED_KEYS.stands() && features.has(Feature::FewKeys);
            more += if is_anew { most } else { 0 };
        }
    }
    more
}

fn too_many_in_flight(world: &World, log: &Log, limiter: usize, key: u8) -> Option<String> {
    // What leaves uncounted takes no slot.
    if world.history.on_store_error == OnAway::FailOpen {
        return None;
    }
    let plan = &world.history.limiters[limiter];
    let changes = log
        .changes
        .get(&(limiter, key))
        .map_or(&[][..], |changes| changes);
    let percent = changes
        .iter()
        .map(|change| change.percent)
        .max()
        .unwrap_or(100)
        .max(100);
    let limit = plan.scaled(percent).in_flight?;
    let calls = log.calls.get(&(limiter, key))?;
    let most = most_at_once(calls);
    if most > limit {
        return Some(format!(
            "key {key} of limiter {limiter}: {most} calls in flight, not {limit}"
        ));
    }
    if known::LOWERED_IN_FLIGHT.stands() {
        return None;
    }
    // No call begins beside as many as a lower limit allows.
    periods(world, changes)
        .into_iter()
        .find_map(|(from, to, percent)| {
            let limit = plan.scaled(percent?).in_flight?;
            let begun = |at: u64| {
                calls
                    .iter()
                    .filter(|call| call.0 <= at && at < call.1)
                    .count()
            };
            let starts = calls
                .iter()
                .filter(|call| (from..to).contains(&call.0) && call.0 < call.1);
            let most = starts.map(|call| begun(call.0)).max()?;
            let text =
                || format!("key {key} of limiter {limiter}: {most} calls in flight, not {limit}");
            (most > limit as usize).then(text)
        })
}

/// In any window, the bad answers are at most those that the guard allows, besides those to requests that
/// were in flight when it tripped.
fn too_many_bad(world: &World, log: &Log, limiter: usize, key: u8) -> Option<String> {
    let (count, window) = world.history.limiters[limiter].guard?;
    let is_ended = known::STOPS_AFTER_A_RELEASE.stands()
        && world.history.features.has(Feature::Holds)
        || known::GUARD_AND_DEATHS.stands() && world.history.features.has(Feature::Deaths);
    if is_ended {
        return None;
    }
    let what = format!("key {key} of limiter {limiter}");
    let bad = log.bad.get(&(limiter, key))?;
    // A permit at hand may be used for 50 ms.
    let trip = world.history.store.trip.map_or(0, |(_, longest)| longest);
    let notice = 50_000 + trip * 2000 + if trip > 0 { 20_000 } else { 0 };
    let processes = lock(&world.processes).clone();
    let trips = processes
        .iter()
        .flat_map(|process| lock(&process.trips).clone());
    let trips: Vec<u64> = trips.map(|at| world.since_start(at)).collect();
    let mut bad = bad.clone();
    bad.sort_by_key(|answer| answer.at);
    let was_in_flight = |answer: &BadAnswer| {
        let at_trip = |trip: &u64| answer.sent <= trip + notice && answer.at + notice >= *trip;
        trips.iter().any(at_trip)
    };
    bad.retain(|answer| !was_in_flight(answer));
    bad.iter().enumerate().find_map(|(index, first)| {
        let end = first.at + window * 1000;
        let found = bad[index..]
            .iter()
            .take_while(|answer| answer.at < end)
            .count();
        (found > count as usize).then(|| {
            let from = first.at as f64 / 1e6;
            format!("{what}: {found} bad answers of {count} from {from:.3} s on, trips {trips:?}")
        })
    })
}

/// Returns a request that got its permit before an equal one that came earlier.
fn overtaken(world: &World, log: &Log) -> Option<String> {
    let features = world.history.features;
    let limiters = &world.history.limiters;
    // What fails or is cut off is asked for again. After a hold, all leave at once, the probe first.
    let is_ordered = !features.any(&[
        Feature::Lossy,
        Feature::Outages,
        Feature::Stalls,
        Feature::Holds,
        Feature::Refusals,
        Feature::Guard,
        Feature::Restarts,
        Feature::Idle,
    ]);
    if world.net.is_real() {
        return None;
    }
    let ends = world
        .history
        .steps
        .iter()
        .any(|(_, step)| matches!(step, Step::EndRuntime { .. }));
    if !is_ordered || ends {
        return None;
    }
    log.grants
        .iter()
        .find_map(|((process, parts, class), grants)| {
            // Requests that get in-flight slots at one moment enter the queue of the rate in any order.
            if parts.iter().any(|part| {
                limiters[part.limiter].in_flight.is_some() || part.cost + part.tokens == 0
            }) {
                return None;
            }
            let mut grants = grants.clone();
            grants.sort_unstable();
            grants
                .windows(2)
                .find(|pair| pair[0].1 > pair[1].1)
                .map(|pair| {
                    format!(
                        "process {process}, {parts:?}, class {class:?}: {:?} overtook {:?}",
                        pair[1], pair[0]
                    )
                })
        })
}
