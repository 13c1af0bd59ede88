//! Counting against the limits of a quota, by brute force.

use tokio::time::Instant;
use tollgate::Quota;
use tollgate::quota::Limit;

/// Returns which limit the `uses` exceed, if they exceed one. They are in the order of time, each
/// with its units.
pub(crate) fn over(quota: &Quota, uses: &[(Instant, u32)]) -> Option<String> {
    quota.limits().iter().find_map(|limit| match *limit {
        Limit::Sliding { count, window, .. } => {
            uses.iter().enumerate().find_map(|(index, (from, _))| {
                let inside = uses[index..]
                    .iter()
                    .take_while(|(at, _)| *at - *from < window);
                let units: u32 = inside.map(|(_, units)| units).sum();
                (units > count).then(|| format!("{units} > {count} per {window:?}"))
            })
        }
        Limit::Bucket {
            capacity,
            count,
            window,
            ..
        } => {
            let rate = f64::from(count) / window.as_secs_f64();
            let mut tokens = f64::from(capacity);
            let mut last = uses.first()?.0;
            uses.iter().find_map(|(at, units)| {
                tokens = (tokens + (*at - last).as_secs_f64() * rate).min(f64::from(capacity))
                    - f64::from(*units);
                last = *at;
                (tokens < -1e-6).then(|| format!("bucket of {capacity} at {tokens}"))
            })
        }
        _ => None,
    })
}
