//! What `explain` says about a request is what happens to it, through a real Redis: random histories of
//! two processes.

#![cfg(feature = "redis")]

use crate::support::patient;

use std::time::Duration;

use proptest::prelude::*;
use redis_server::RedisServer;
use tokio::time::Instant;
use tollgate::limiter::{Because, Verdict};
use tollgate::{Key, Limited, Limiter, OnStoreError, Quota, RateLimitLayer, Reason};

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A request of one of the processes takes what is free.
    Take {
        process: usize,
        cost: u32,
    },
    /// The last permit is given back.
    GiveBack,
    Hold {
        process: usize,
    },
    Release {
        process: usize,
    },
    /// A request is explained, and then enters.
    Explain {
        process: usize,
        cost: u32,
    },
}

/// Limits whose units come back only after the history.
fn quota() -> impl Strategy<Value = Quota> {
    let hour = Duration::from_secs(3600);
    prop_oneof![
        (1_u32..12).prop_map(move |count| Quota::new(count, hour)),
        (2_u32..12, 1_u32..8).prop_map(move |(long, short)| {
            Quota::new(long, hour * 2).and(Quota::new(short, hour))
        }),
        (3_u32..8, 1_u32..8)
            .prop_map(move |(burst, count)| Quota::bucket(burst).refill(count, hour)),
        Just(Quota::new(400, hour)),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let cost = || prop_oneof![3 => Just(1_u32), 1 => 2_u32..4];
    let process = || 0_usize..2;
    prop_oneof![
        4 => (process(), cost()).prop_map(|(process, cost)| Step::Take { process, cost }),
        1 => Just(Step::GiveBack),
        1 => process().prop_map(|process| Step::Hold { process }),
        1 => process().prop_map(|process| Step::Release { process }),
        4 => (process(), cost()).prop_map(|(process, cost)| Step::Explain { process, cost }),
    ]
}

async fn wrong(limiters: &[Limiter; 2], steps: &[Step]) -> Option<String> {
    let mut taken = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        match *step {
            Step::Take { process, cost } => {
                let request = limiters[process].acquire(Key::ALL).cost(cost);
                taken.extend(request.await.ok().map(|permit| (process, permit)));
            }
            Step::GiveBack => {
                if let Some((process, permit)) = taken.pop() {
                    permit.give_back();
                    // Also what was prefetched. Then the store has it.
                    limiters[process].shutdown().await.unwrap();
                }
            }
            Step::Hold { process } => {
                let span = Duration::from_secs(1800);
                limiters[process].hold_for(Key::ALL, span).await.unwrap();
            }
            Step::Release { process } => limiters[process].release(Key::ALL).await.unwrap(),
            Step::Explain { process, cost } => {
                let began = Instant::now();
                let request = || limiters[process].acquire(Key::ALL).cost(cost);
                let explanation = request().explain().await.unwrap();
                let happened = request().await;
                let elapsed = began.elapsed();
                let is_right = match (&explanation.verdict, &happened) {
                    (Verdict::Goes, Ok(_)) => true,
                    (
                        Verdict::Refused {
                            reason,
                            retry_after,
                            ..
                        },
                        happened,
                    ) => {
                        let real = happened.as_ref().err().and_then(Limited::retry_after);
                        let is_same = happened.as_ref().err().and_then(Limited::reason).as_ref()
                            == Some(reason);
                        match (*retry_after, real) {
                            // The last units of a bucket come some milliseconds later.
                            (Some(stated), _) if stated < elapsed + Duration::from_millis(200) => {
                                true
                            }
                            // A hold that is known is refused without a call, which would also tell
                            // how long the limits take after it.
                            (Some(stated), Some(real)) if reason.clone() == Reason::Held => {
                                is_same && real <= stated + Duration::from_millis(20)
                            }
                            (Some(stated), Some(real)) => {
                                let error = stated.abs_diff(real);
                                is_same && error <= elapsed + Duration::from_millis(20)
                            }
                            (stated, real) => is_same && stated == real,
                        }
                    }
                    _ => false,
                };
                if !is_right {
                    return Some(format!("step {number}: {explanation}\nbut {happened:?}"));
                }
                taken.extend(happened.ok().map(|permit| (process, permit)));
            }
        }
    }
    None
}

#[test]
fn requests_do_what_explain_says() {
    let server = RedisServer::start().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let config = ProptestConfig {
        failure_persistence: None,
        ..histories::config(12)
    };
    let histories = (quota(), prop::collection::vec(step(), 1..30));
    let stores = [(); 2].map(|()| patient::store(&server.url()));
    let result =
        proptest::test_runner::TestRunner::new(config).run(&histories, |(quota, steps)| {
            let _: () = server.command(&["FLUSHALL"]);
            let limiters = stores.clone().map(|store| {
                let builder = RateLimitLayer::builder(quota).store(store);
                let layer = builder.max_wait(Duration::ZERO).build().unwrap();
                layer.limiter()
            });
            let wrong = runtime.block_on(wrong(&limiters, &steps));
            prop_assert!(wrong.is_none(), "{}", wrong.unwrap_or_default());
            Ok(())
        });
    result.unwrap();
}

#[tokio::test]
async fn holds_of_other_processes_and_the_store_are_told() {
    let server = RedisServer::start().unwrap();
    let [ours, theirs] = [(); 2].map(|()| {
        let builder =
            RateLimitLayer::builder(Quota::per_hour(100)).store(patient::store(&server.url()));
        builder.build().unwrap().limiter()
    });
    drop(ours.acquire(Key::ALL).await.unwrap());
    // It may have prefetched a permit, too.
    let used = async || ours.peek(Key::ALL).await.unwrap().limits[0].used;
    let before = used().await;
    let free = ours.explain(Key::ALL).await.unwrap();
    assert_eq!(free.verdict, Verdict::Goes);
    assert!(free.to_string().contains("answered in"), "{free}");
    assert_eq!(used().await, before, "it took nothing");

    theirs
        .hold_for(Key::ALL, Duration::from_secs(600))
        .await
        .unwrap();
    let held = ours.explain(Key::ALL).await.unwrap();
    let Verdict::Refused {
        reason: Reason::Held,
        because,
        retry_after,
        ..
    } = held.verdict
    else {
        panic!("{held}")
    };
    assert_eq!(because, Some(Because::Held));
    let left = retry_after.unwrap();
    assert!(left > Duration::from_secs(500), "{held}");
}

#[tokio::test]
async fn errors_of_an_unreachable_store_are_returned() {
    let server = RedisServer::start().unwrap();
    let url = server.url();
    drop(server);
    let with = |mode| {
        let builder = RateLimitLayer::builder(Quota::per_hour(100)).on_store_error(mode);
        let layer = builder.store(patient::store(&url)).build();
        layer.unwrap().limiter()
    };
    assert!(
        with(OnStoreError::FailClosed)
            .explain(Key::ALL)
            .await
            .is_err()
    );
    let open = with(OnStoreError::FailOpen)
        .explain(Key::ALL)
        .await
        .unwrap();
    assert_eq!(open.verdict, Verdict::Goes);
    assert!(open.to_string().contains(", uncounted"), "{open}");
}
