//! The errors of settings.

use std::error::Error as StdError;
use std::fmt;

/// Why a layer, quota or store cannot be built, and what to change.
///
/// Its `Display` and `Debug` are one line that names the setting, its value, what is allowed, and the remedy.
#[derive(Clone, PartialEq, Eq)]
pub struct ConfigError(String);

impl ConfigError {
    /// Makes the error with this text. It must contain no secret, such as a URL with a password.
    pub(crate) fn new(text: impl Into<String>) -> Self {
        ConfigError(text.into())
    }

    /// A `setting` has a `value` that is not `allowed`.
    pub(crate) fn out_of_range(
        setting: &'static str,
        value: impl fmt::Display,
        allowed: &'static str,
    ) -> Self {
        ConfigError(format!("{setting} is {value}, but must be {allowed}"))
    }

    /// Returns the error of a `setting` with a `value` that is not `allowed`, unless `is_allowed`.
    pub(crate) fn unless(
        is_allowed: bool,
        setting: &'static str,
        value: impl fmt::Display,
        allowed: &'static str,
    ) -> Result<(), Self> {
        if is_allowed {
            return Ok(());
        }
        Err(ConfigError::out_of_range(setting, value, allowed))
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for ConfigError {}
