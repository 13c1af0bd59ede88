//! Why a scenario cannot be run.

use std::fmt;

use super::strategy::Strategy;
use tollgate::ConfigError;

/// A scenario that cannot be run with a strategy.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunError {
    /// A group of the scenario names a strategy that does not come with tollgate.
    UnknownStrategy(String),
    /// The settings of the scenario do not suit a gate.
    Gate {
        /// The name of the strategy.
        strategy: String,
        /// Which setting is wrong, and why.
        source: ConfigError,
    },
    /// One of several scenarios cannot be run.
    Scenario {
        /// The name of the scenario.
        name: String,
        /// Why it cannot be run.
        source: Box<RunError>,
    },
}

impl RunError {
    pub(super) fn gate(strategy: &str, source: ConfigError) -> Self {
        RunError::Gate {
            strategy: strategy.to_owned(),
            source,
        }
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::UnknownStrategy(name) => {
                let all = Strategy::all();
                let names: Vec<_> = all.iter().map(Strategy::name).collect();
                write!(
                    f,
                    "there is no strategy {name:?}; there are {}",
                    names.join(", ")
                )
            }
            RunError::Gate { strategy, source } => write!(f, "strategy {strategy:?}: {source}"),
            RunError::Scenario { name, source } => write!(f, "scenario {name:?}: {source}"),
        }
    }
}

impl std::error::Error for RunError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            RunError::UnknownStrategy(_) => None,
            RunError::Gate { source, .. } => Some(source),
            RunError::Scenario { source, .. } => Some(&**source),
        }
    }
}
