//! Whether rustls has a provider of cryptography.
//!
//! rustls uses the provider that the process has installed, else the only provider that its crate
//! features name. It panics if they name none or two. The program chooses the provider. Tollgate
//! neither installs one nor turns on a feature that names one, because both would change what other
//! code in the program does. It only checks.

use std::any::TypeId;

use rustls::crypto::CryptoProvider;

/// Returns whether a connection can be made with TLS.
pub(super) fn has_provider() -> bool {
    CryptoProvider::get_default().is_some() || named_by_features() == 1
}

/// Stand-ins for the modules of rustls that its features leave out.
#[allow(dead_code, reason = "they are used where rustls does not have them")]
mod left_out {
    pub(super) mod ring {
        pub(crate) fn default_provider() {}
    }

    pub(super) mod aws_lc_rs {
        pub(crate) fn default_provider() {}
    }
}

#[allow(
    unused_imports,
    reason = "they are used where rustls does not have them"
)]
use left_out::{aws_lc_rs, ring};

/// Returns how many providers the features of rustls name. A crate cannot read the features of
/// another crate, but it can see whether a name exists there. If the glob import below has a name,
/// that name hides the stand-in of the same name.
fn named_by_features() -> usize {
    #[allow(unused_imports, reason = "rustls may have neither")]
    use rustls::crypto::*;

    [
        is_provider(ring::default_provider),
        is_provider(aws_lc_rs::default_provider),
    ]
    .into_iter()
    .filter(|named| *named)
    .count()
}

fn is_provider<T: 'static>(_: fn() -> T) -> bool {
    TypeId::of::<T>() == TypeId::of::<CryptoProvider>()
}
