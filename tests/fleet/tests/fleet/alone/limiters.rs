//! The servers of `limiters.rs` behind a layer: they refuse nothing.

use anyhow::ensure;
use real_limiters::ServerKind;
use tollgate::AdaptiveThrottleLayer;
use tower::Layer;

use super::*;
use crate::limiters::{LIMIT, SPAN, at_the_same_time, figures};

/// Checks that the server refuses nothing behind `limit`, and that at least `used` per cent of its limit are used.
fn keeps(kind: ServerKind, limit: &RateLimitLayer, used: f64) {
    once_in_three(|| {
        let figures = figures(kind, |client| limit.clone().layer(client))?;
        ensure!(
            figures.refused == 0.0,
            "{kind} refused {:.2} %",
            figures.refused
        );
        ensure!(
            figures.used >= used,
            "{:.1} % of {kind} is used",
            figures.used
        );
        Ok(())
    });
}

/// On a calm machine only: `./.ci/run`.
mod calm {
    use super::*;

    /// On a calm machine, 85 % is used. A stall delays requests on the way and lets permits of 2 ms expire.
    #[test]
    fn nginx_with_20_ms_spacing_refuses_nothing() {
        let _turn = turn();
        let limit = RateLimitLayer::builder(Quota::every(LIMIT.window / LIMIT.count))
            .transit_slack(ms(1))
            .max_rate_loss(14)
            .max_wait(SPAN * 2);
        keeps(ServerKind::NginxStrict, &limit.build().unwrap(), 60.0);
    }

    /// HAProxy estimates the use of a window from the window before.
    #[test]
    fn nginx_with_a_burst_and_haproxy_refuse_nothing() {
        let _turn = turn();
        let bucket = Quota::bucket(ServerKind::BURST + 1).refill(LIMIT.count, LIMIT.window);
        let counter = Quota::sliding_counter(LIMIT.count, LIMIT.window);
        let quotas = [
            (ServerKind::NginxBurst, bucket),
            (ServerKind::Haproxy, counter),
        ];
        at_the_same_time(quotas, |(kind, quota)| {
            let limit = RateLimitLayer::builder(quota).max_wait(SPAN * 2);
            keeps(kind, &limit.build().unwrap(), 85.0);
        });
    }

    /// The floor is generous: neither server states anything, and five seconds are short.
    #[test]
    fn adaptive_layer_finds_a_speed_in_silence() {
        let _turn = turn();
        at_the_same_time([ServerKind::NginxBurst, ServerKind::Haproxy], |kind| {
            once_in_three(|| {
                let throttle = AdaptiveThrottleLayer::builder()
                    .max_wait(SPAN * 2)
                    .build()?;
                let throttle = throttle.retrying();
                let figures = figures(kind, |client| throttle.layer(client))?;
                ensure!(
                    figures.refused <= 30.0,
                    "{kind} refused {:.2} %",
                    figures.refused
                );
                ensure!(
                    figures.used >= 15.0,
                    "{:.1} % of {kind} is used",
                    figures.used
                );
                Ok(())
            });
        });
    }
}
