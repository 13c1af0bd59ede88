//! The settings for gates that count: their quota, and the store in which they count.

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use super::Latency;
use tollgate::OnStoreError;
use tollgate::Quota;

/// The store that all processes of a run share: a memory store behind a link that takes time and
/// fails.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct StoreModel {
    /// How long a call takes. The store does it half-way. A notification takes half as long.
    /// Default: one millisecond.
    pub trip: Latency,
    /// The outages of the store: begin and end. A call in that time fails after 0.25 s; half of
    /// these calls are done.
    pub away: Vec<(f64, f64)>,
    /// The period after which the `away` times repeat. Default: they do not repeat.
    pub away_every: Option<f64>,
    /// The probability that a call is done and its answer is lost. Default: 0.
    pub lose: f64,
}

impl Default for StoreModel {
    fn default() -> Self {
        StoreModel {
            trip: Latency(0.001, 0.001, 0.0),
            away: Vec::new(),
            away_every: None,
            lose: 0.0,
        }
    }
}

impl StoreModel {
    pub(super) fn check(&self) -> Result<(), String> {
        self.trip.check("store.trip")?;
        let end = self.away_every.unwrap_or(f64::INFINITY);
        if let Some((from, to)) = self
            .away
            .iter()
            .find(|(from, to)| *from < 0.0 || to <= from || *to > end)
        {
            return Err(format!(
                "store.away has [{from}, {to}]: give when it begins and when it ends, before store.away_every is over"
            ));
        }
        if !(0.0..=1.0).contains(&self.lose) {
            return Err(format!(
                "store.lose is {}: give a probability, from 0 to 1",
                self.lose
            ));
        }
        Ok(())
    }

    /// Returns the end of the outage, if the store is unreachable at `at`.
    pub(crate) fn away_until(&self, at: f64) -> Option<f64> {
        let into = self.away_every.map_or(at, |every| at.rem_euclid(every));
        let (_, to) = self
            .away
            .iter()
            .find(|(from, to)| (*from..*to).contains(&into))?;
        Some(at - into + to)
    }
}

pub(super) fn quota<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Quota>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else {
        return Ok(None);
    };
    text.parse()
        .map(Some)
        .map_err(|error| D::Error::custom(format!("quota: {error}")))
}

pub(super) fn on_store_error<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<OnStoreError, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Names {
        FailClosed,
        FailOpen,
        FallbackShare,
    }
    Ok(match Names::deserialize(deserializer)? {
        Names::FailClosed => OnStoreError::FailClosed,
        Names::FailOpen => OnStoreError::FailOpen,
        Names::FallbackShare => OnStoreError::FallbackShare,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_model_is_unreachable_as_scheduled_and_repeated() {
        let once = StoreModel {
            away: vec![(20.0, 30.0), (40.0, 41.0)],
            ..StoreModel::default()
        };
        let again = StoreModel {
            away_every: Some(60.0),
            ..once.clone()
        };
        for (at, of_once, of_again) in [
            (19.9, None, None),
            (20.0, Some(30.0), Some(30.0)),
            (30.0, None, None),
            (40.5, Some(41.0), Some(41.0)),
            (85.0, None, Some(90.0)),
        ] {
            assert_eq!(
                (once.away_until(at), again.away_until(at)),
                (of_once, of_again),
                "at {at}"
            );
        }
    }
}
