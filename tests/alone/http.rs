//! Real HTTP, judged by the upstream's own log.

use std::time::Duration;

use tollgate::quota::Limit;
use tollgate::{Quota, RateLimitLayer};
use tower::{ServiceBuilder, ServiceExt};
use upstream::{Log, Rule, SENT_HEADER, Upstream, closed_loops};

const SLACK: Duration = Duration::from_millis(10);

fn rules(quota: &Quota) -> Vec<Rule> {
    let sliding = quota
        .limits()
        .iter()
        .filter(|limit| matches!(limit, Limit::Sliding { .. }));
    sliding
        .map(|limit| Rule::new(limit.count(), limit.window()))
        .collect()
}

/// `callers` callers, each in a closed loop for `span`, behind one layer.
async fn run(quota: Quota, callers: usize, span: Duration) -> (Log, usize) {
    let upstream = Upstream::start(rules(&quota));
    let layer = RateLimitLayer::builder(quota)
        .max_wait(Duration::from_secs(600))
        .build()
        .unwrap();
    let service = ServiceBuilder::new()
        .layer(layer)
        .map_request(|mut request: reqwest::Request| {
            request
                .headers_mut()
                .insert(SENT_HEADER, upstream::sent_now());
            request
        })
        .service(reqwest::Client::new());
    let url = reqwest::Url::parse(&upstream.url()).unwrap();
    let get = move || {
        let (service, request) = (
            service.clone(),
            reqwest::Request::new(reqwest::Method::GET, url.clone()),
        );
        async move {
            service
                .oneshot(request)
                .await
                .unwrap()
                .bytes()
                .await
                .unwrap();
        }
    };
    closed_loops(callers, span, get).await;
    let log = upstream.log();
    let refused = log.iter().filter(|arrival| !arrival.accepted).count();
    (log, refused)
}

/// The upstream never counts more than the limit, and nearly all of it is used.
async fn check(quota: Quota, callers: usize, span: Duration) {
    let (log, refused) = run(quota, callers, span).await;
    for rule in rules(&quota) {
        assert_eq!(log.over(rule, SLACK), None, "{quota}");
    }
    // The server has no slack: it refuses a call only when transit times varied by more than our
    // slack.
    assert!(
        refused == 0 || log.jitter() > SLACK,
        "{quota}: {refused} refused at a jitter of {:?}",
        log.jitter()
    );
    let allowed = allowed(&quota, span);
    println!(
        "{quota}: {} calls, {:.1} % of what limit and margin allow; {refused} refused, jitter {:.1?}",
        log.len(),
        100.0 * log.len() as f64 / allowed as f64,
        log.jitter()
    );
    // A machine that stalls loses slots, and a refusal loses windows: the figure is printed, and only
    // an idle limiter is an error.
    assert!(
        log.len() * 20 >= allowed,
        "{quota}: {} of {allowed}",
        log.len()
    );
}

/// How many requests fit into `span` when each leaves as soon as all limits, a margin longer, allow
/// it.
fn allowed(quota: &Quota, span: Duration) -> usize {
    let margin = Duration::from_millis(20);
    let mut moments: Vec<Duration> = Vec::new();
    loop {
        let free = quota.limits().iter().filter_map(|limit| match *limit {
            Limit::Sliding { count, window, .. } => {
                let last = moments.len().checked_sub(count as usize)?;
                Some(moments[last] + window + margin)
            }
            _ => None,
        });
        let next = free
            .max()
            .unwrap_or(Duration::ZERO)
            .max(moments.last().copied().unwrap_or_default());
        if next >= span {
            return moments.len();
        }
        moments.push(next);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_a_second_with_many_callers() {
    check(Quota::per_second(1), 50, Duration::from_millis(4500)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quota_25_per_5_s_with_300_per_minute() {
    let quota = "25/5s, 300/60s".parse().unwrap();
    check(quota, 40, Duration::from_millis(10_500)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_limits_that_bind_in_turn() {
    check(
        "10/1s, 24/4s".parse().unwrap(),
        40,
        Duration::from_millis(8500),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_a_second_spread_by_a_burst() {
    check(
        Quota::per_second(1000).burst(50),
        200,
        Duration::from_secs(3),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_a_second_back_to_back() {
    check(Quota::per_second(1000), 200, Duration::from_secs(3)).await;
}
