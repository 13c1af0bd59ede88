//! Two limits with different keys, taken by hand: the loop that the README shows keeps both. Under
//! a paused clock.

use std::mem::swap;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tollgate::{Key, Limited, Limiter, Permit, Quota, RateLimitLayer};

const SECOND: Duration = Duration::from_secs(1);

async fn both(
    mut first: (&Limiter, Key),
    mut second: (&Limiter, Key),
    deadline: std::time::Instant,
) -> Result<[Permit; 2], Limited> {
    let mut held = first.0.acquire(first.1).deadline(deadline).await?;
    loop {
        let next = match second.0.acquire(second.1).deadline(deadline).await {
            Ok(next) => next,
            Err(limited) => {
                held.give_back();
                return Err(limited);
            }
        };
        if held.is_valid() {
            return Ok([held, next]);
        }
        // The wait was longer than the first permit's validity: give the permit back, and ask its
        // limiter again.
        held.give_back();
        held = next;
        swap(&mut first, &mut second);
    }
}

fn limiter(quota: Quota) -> Limiter {
    RateLimitLayer::builder(quota)
        .max_wait(10 * SECOND)
        .build()
        .unwrap()
        .limiter()
}

/// The most messages sent within `window`.
fn most(sent: impl Iterator<Item = Instant>, window: Duration) -> usize {
    let sent: Vec<_> = sent.collect();
    let within = |last: Instant| {
        sent.iter()
            .filter(|at| **at <= last && last - **at < window)
            .count()
    };
    sent.iter().map(|last| within(*last)).max().unwrap_or(0)
}

/// Messages to channels: when each is requested, and for which channel.
fn bursts() -> Vec<(u64, u32)> {
    let one = (0..10).map(|_| (0, 1));
    let many = (0..20).map(|number| (100, 100 + number));
    let every_second = (0..9).map(|number| (51_500 + 1000 * number, 2));
    let later = (0..20).map(|number| (60_000, 200 + number));
    one.chain(many).chain(every_second).chain(later).collect()
}

async fn sends_within_both(plan: Vec<(u64, u32)>, all_first: bool) -> usize {
    let (channels, all) = (
        limiter(Quota::per_second(1)),
        limiter(Quota::per_minute(30)),
    );
    let mut calls = JoinSet::new();
    for (at, channel) in plan {
        let (channels, all) = (channels.clone(), all.clone());
        calls.spawn(async move {
            sleep(Duration::from_millis(at)).await;
            let deadline = (Instant::now() + 10 * SECOND).into_std();
            let (one, other) = (
                (&channels, Key::new(channel.to_le_bytes())),
                (&all, Key::ALL),
            );
            let (one, other) = if all_first {
                (other, one)
            } else {
                (one, other)
            };
            both(one, other, deadline)
                .await
                .ok()
                .map(|_permits| (channel, Instant::now()))
        });
    }
    let sent = timeout(600 * SECOND, calls.join_all())
        .await
        .expect("no call waits for ever");
    let sent: Vec<_> = sent.into_iter().flatten().collect();
    for (channel, _) in &sent {
        let of_channel = sent
            .iter()
            .filter(|(other, _)| other == channel)
            .map(|(_, at)| *at);
        assert_eq!(most(of_channel, SECOND), 1, "channel {channel}");
    }
    assert!(most(sent.iter().map(|(_, at)| *at), 60 * SECOND) <= 30);
    sent.len()
}

#[tokio::test(start_paused = true)]
async fn permits_taken_by_hand_keep_both_limits() {
    for all_first in [false, true] {
        let sent = sends_within_both(bursts(), all_first).await;
        println!("{sent}");
        assert!(sent >= 50, "{sent} of 59");
    }
}

/// More calls than either limit allows, over a few channels: as many are sent as the limits allow.
#[tokio::test(start_paused = true)]
async fn permits_taken_by_hand_leave_nothing_unused() {
    for all_first in [false, true] {
        let plan = (0..200)
            .map(|number| (number * 200, (number % 3) as u32))
            .collect();
        let sent = sends_within_both(plan, all_first).await;
        println!("{sent}");
        assert!(sent >= 28, "{sent} of at most 30");
    }
}
