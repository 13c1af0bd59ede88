//! Requests of several keys, by several processes, to a server that enforces the limit of each key.

use std::collections::BTreeMap;

use anyhow::ensure;
use fleet::{Arrivals, Options, key_in};
use upstream::{Arrival, KeyedRule};

use super::*;

const ALL: KeyedRule = KeyedRule {
    name: "all",
    rule: Rule::per_second(20),
    key: |_, _| Some("all".to_owned()),
    scope: "global",
};
const CHANNEL: KeyedRule = KeyedRule {
    name: "channel",
    rule: Rule::new(4, ms(2500)),
    key: |path, _| key_in(path, "channel").map(str::to_owned),
    scope: "channel",
};
const ROUTE: KeyedRule = KeyedRule {
    name: "route",
    rule: Rule::new(3, ms(2500)),
    key: |path, _| key_in(path, "route").map(str::to_owned),
    scope: "route",
};

/// Returns what a layer has to state of a server's limit.
fn quota(limit: KeyedRule) -> String {
    let Rule { count, window } = limit.rule;
    format!("{count}/{}ms", window.as_millis())
}

fn and_per(limit: KeyedRule) -> (String, String) {
    (limit.name.to_owned(), quota(limit))
}

/// Paths of 30 channels with three routes each. Some channels are called far more often than others.
fn paths() -> Vec<String> {
    // Two sequences that fill the interval from 0 to 1 evenly.
    let evenly = |number: u32, step: f64| (f64::from(number) * step).fract();
    let path = |number| {
        let channel = (30.0 * evenly(number, 0.754_877_666).powi(2)) as u32;
        let end = (3.0 * evenly(number, 0.569_840_291)) as u32;
        format!("channel/{channel}/route/{channel}.{end}")
    };
    (0..600).map(path).collect()
}

/// A server with three limits, and the options of four processes that make 40 calls per second.
fn chat() -> (Site, Options) {
    let site = Site {
        redis: RedisServer::start().unwrap(),
        upstream: Upstream::open().keyed([ALL, CHANNEL, ROUTE]),
    };
    let options = Options {
        quota: quota(ALL),
        and_per: [CHANNEL, ROUTE].map(and_per).into(),
        paths: paths(),
        arrivals: Arrivals::Every(ms(100)),
        max_wait: ms(1000),
        ..Options::default()
    };
    (site, options)
}

/// Returns the share of `limit` that its busiest key used, less the margin that tollgate keeps.
fn used(log: &Log, limit: KeyedRule) -> f64 {
    let Rule { count, window } = limit.rule;
    let keys = log.by_key(limit.name);
    let busiest = keys.values().max_by_key(|accepted| accepted.len());
    let used = busiest.and_then(|log| log.used(Rule::new(count, window + MARGIN)));
    used.unwrap_or_default()
}

/// Checks that no key had more calls than its limit allows, of those that the server accepted and
/// those that it refused. No stall excuses a call too many: it is the moment of sending that counts,
/// and of the arrival only what was not late on the way.
fn assert_never_over(log: &[Arrival], limits: &[KeyedRule]) {
    for limit in limits {
        let mut keys: BTreeMap<&str, Vec<Arrival>> = BTreeMap::new();
        for arrival in log {
            let of_limit = arrival.keys.iter().filter(|(name, _)| *name == limit.name);
            for (_, key) in of_limit {
                keys.entry(key).or_default().push(arrival.clone());
            }
        }
        for (key, calls) in keys {
            let over = over_rule(&Log::from(calls), limit.rule);
            assert_eq!(over, None, "{} {key}", limit.name);
        }
    }
}

#[test]
fn processes_go_on_within_all_limits_after_a_kill() {
    let _turn = busy_turn();
    once_in_three(one_of_four_is_killed);
}

fn one_of_four_is_killed() -> anyhow::Result<()> {
    let (site, options) = chat();
    let options = Options {
        span: ms(6500),
        ..options
    };
    let mut fleet = site.start(4, &options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(1500));
    fleet.kill(0);
    let killed = Instant::now();
    let reports = fleet.finish();
    let log = site.upstream.log();
    assert!(!reports[0].ended, "it was killed before its end");
    assert_all_ended(&reports[1..]);
    // Its bookings lie at most `max_wait` ahead, and count for a window.
    let after = part(&log, killed + ms(2100), start + options.span);
    let used = used(&after, ALL);
    println!(
        "4 processes with 3 limits, one killed at 1.5 s: {:?} calls in each second, {:.1} % of the limit of all calls later; \
         {:.2} store calls for each, jitter {:.1?}",
        per_second(&log),
        100.0 * used,
        fleet::store_calls(&site.redis) as f64 / log.len() as f64,
        log.jitter()
    );
    assert_never_over(&log, &[ALL, CHANNEL, ROUTE]);
    ensure!(used >= 0.95, "the others use {used:.3}");
    Ok(())
}

#[test]
fn processes_with_shares_keep_all_limits_while_redis_restarts() {
    let _turn = busy_turn();
    once_in_three(redis_restarts);
}

fn redis_restarts() -> anyhow::Result<()> {
    let (mut site, options) = chat();
    let options = Options {
        span: ms(9500),
        share: 0.25,
        ..options
    };
    let mut fleet = site.start(4, &options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(1500));
    // Processes notice it before the server has ended.
    let away = Instant::now();
    site.redis.kill();
    wait_until(start, ms(3500));
    site.redis.restart().unwrap();
    let back = Instant::now();
    let reports = fleet.finish();
    let log = site.upstream.log();
    assert_all_ended(&reports);
    let meanwhile = between(&log, away + ms(1100), back);
    // The new Redis grants nothing of a key for a window, from the first call of a process that
    // knows the lost state.
    let last = between(&log, start + ms(8000), start + ms(9500));
    // In the window in which Redis is lost, grants of Redis and of the shares may both count.
    let is_lost = |arrival: &Arrival| (away..away + CHANNEL.rule.window).contains(&arrival.at);
    let (lost, others): (Vec<_>, Vec<_>) = log.iter().cloned().partition(is_lost);
    println!(
        "4 processes with 3 limits and shares, Redis killed at 1.5 s and started at 3.5 s: {:?} calls in each second; {meanwhile} \
         without Redis; the server refused {} in the window in which it was lost; jitter {:.1?}",
        per_second(&log),
        lost.iter().filter(|arrival| !arrival.accepted).count(),
        log.jitter()
    );
    assert_never_over(&others, &[ALL, CHANNEL, ROUTE]);
    ensure!(meanwhile >= 8, "{meanwhile} calls without Redis");
    ensure!(last >= 20, "{last} calls in the last 1.5 seconds");
    Ok(())
}

#[test]
fn advance_bookings_of_a_killed_process_block_one_window() {
    let _turn = turn_beside_others();
    once_in_three(killed_with_advance_bookings);
}

fn killed_with_advance_bookings() -> anyhow::Result<()> {
    let channel = KeyedRule {
        rule: Rule::new(1, ms(4000)),
        ..CHANNEL
    };
    let site = Site {
        redis: RedisServer::start().unwrap(),
        upstream: Upstream::open().keyed([ALL, channel]),
    };
    let options = Options {
        quota: quota(ALL),
        and_per: vec![and_per(channel)],
        span: ms(7500),
        ..Options::default()
    };
    // The second call to each channel waits for four seconds. It has booked a unit of all calls.
    let doomed = Options {
        paths: (0..15).map(|number| format!("channel/{number}")).collect(),
        tasks: 15,
        who: "doomed ".into(),
        ..options.clone()
    };
    let heir = Options {
        tasks: 16,
        max_wait: ms(2000),
        ..options
    };
    let (mut fleet, mut heirs) = (site.start(1, &doomed), site.start(2, &heir));
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(300));
    heirs.go();
    wait_until(start, ms(900));
    fleet.kill(0);
    let killed = Instant::now();
    let has_advance_bookings = has_advance_bookings(&site.redis);
    let heirs = heirs.finish();
    assert_all_ended(&heirs);
    let log = site.upstream.log();
    let used = |from, to| used(&part(&log, from, to), ALL);
    // Any window that contains a call and the slots booked four seconds after the start counts
    // both.
    let before = used(killed, start + ms(2900));
    let after = used(start + ms(5400), start + ms(7400));
    println!(
        "a process killed with 15 advance bookings: {:?} calls in each second; the others use {:.1} % until a window before the \
         slots that it had booked, and {:.1} % from a window later on",
        per_second(&log),
        100.0 * before,
        100.0 * after
    );
    assert!(has_advance_bookings, "a state has advance bookings");
    assert_never_over(&log, &[ALL, channel]);
    ensure!(before >= 0.95 && after >= 0.95, "{before:.3}, {after:.3}");
    Ok(())
}

/// Returns whether a state in Redis has the record of advance bookings, which has kind 5. The second byte of a state is
/// the number of its records. They follow a head of 65 bytes, and have 88 bytes each.
fn has_advance_bookings(redis: &RedisServer) -> bool {
    let names: Vec<String> = redis.command(&["KEYS", "tollgate:*"]);
    names.iter().any(|name| {
        let state: Vec<u8> = redis.command(&["GET", name]);
        let records = state.get(1).copied().unwrap_or_default();
        (0..usize::from(records)).any(|record| state.get(65 + 88 * record) == Some(&5))
    })
}
