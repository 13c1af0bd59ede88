//! The features of a history, and which of them have met.

use std::fmt::Write;

/// Defines the features, so that their list cannot miss one.
macro_rules! features {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// What a history may have, besides plain requests under a sliding window.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum Feature { $($(#[$doc])* $name,)+ }

        impl Feature {
            pub(crate) const ALL: &[Feature] = &[$(Feature::$name),+];
        }
    };
}

features! {
    /// Requests of different costs, also of none.
    Costs,
    /// Several keys of one limiter.
    Keys,
    /// Requests that count in several limiters.
    Joint,
    /// Limits of requests and of tokens.
    Units,
    InFlight,
    Bucket,
    Fixed,
    /// Shares for classes of requests.
    Classes,
    /// Processes whose shares differ.
    Deploys,
    /// True costs that are known after the request.
    Settle,
    /// Callers that give up while they wait.
    Cancel,
    /// Futures that are not polled for a while.
    Idle,
    Holds,
    /// Answers with status 429.
    Refusals,
    SetQuota,
    Guard,
    Drain,
    Deadlines,
    GiveBack,
    /// Requests through a Tower service.
    Layer,
    Retry,
    /// A queue with room for few requests.
    ShortQueue,
    /// Room for the state of few keys.
    FewKeys,
    Explain,
    Processes,
    /// Processes that start and stop meanwhile.
    Restarts,
    /// Processes that are killed.
    Deaths,
    /// Processes that stand still for a while.
    Stalls,
    /// A store whose answers take a trip.
    Late,
    /// A store that loses requests and answers.
    Lossy,
    /// A store that is unreachable for a while.
    Outages,
    FailOpen,
    FallbackShare,
}

/// A set of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Features(u64);

impl Features {
    pub(crate) fn has(self, feature: Feature) -> bool {
        self.0 & (1 << feature as u64) != 0
    }

    pub(crate) fn any(self, features: &[Feature]) -> bool {
        features.iter().any(|feature| self.has(*feature))
    }

    pub(crate) fn add(&mut self, feature: Feature) {
        self.0 |= 1 << feature as u64;
    }

    pub(crate) fn all(self) -> impl Iterator<Item = Feature> {
        Feature::ALL
            .iter()
            .copied()
            .filter(move |feature| self.has(*feature))
    }

    pub(crate) fn len(self) -> u32 {
        self.0.count_ones()
    }
}

/// How often each pair of features has met in a history.
#[derive(Default)]
pub(crate) struct Matrix(Vec<Vec<u32>>);

impl Matrix {
    pub(crate) fn add(&mut self, met: Features) {
        self.0
            .resize(Feature::ALL.len(), vec![0; Feature::ALL.len()]);
        for one in met.all() {
            for other in met.all() {
                self.0[one as usize][other as usize] += 1;
            }
        }
    }

    /// Returns the pairs that never met, although they can.
    pub(crate) fn missing(
        &self,
        cannot_meet: impl Fn(Feature, Feature) -> bool,
    ) -> Vec<(Feature, Feature)> {
        let pairs = Feature::ALL
            .iter()
            .flat_map(|one| Feature::ALL.iter().map(move |other| (*one, *other)));
        let apart = pairs.filter(|(one, other)| one < other && !cannot_meet(*one, *other));
        apart
            .filter(|(one, other)| self.0[*one as usize][*other as usize] == 0)
            .collect()
    }

    /// Returns the lower half as a table. The diagonal counts the histories with the feature.
    pub(crate) fn table(&self) -> String {
        let mut table = String::new();
        for feature in Feature::ALL {
            let name = format!("{feature:?}");
            let row = &self.0[*feature as usize][..=*feature as usize];
            let counts: String = row.iter().map(|count| format!("{count:>4}")).collect();
            let _ = writeln!(table, "{name:>13} {counts}");
        }
        table
    }
}
