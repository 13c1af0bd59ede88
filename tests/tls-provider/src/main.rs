//! A program that uses rustls, and a store behind TLS: whatever provider the program has chosen
//! stays as it is, and where it has chosen none, the store says so.

use rustls::ClientConfig;
use rustls::crypto::CryptoProvider;
use tollgate::store::RedisStore;

const URL: &str = "rediss://:geheim@127.0.0.1/";

/// The key exchanges of the provider of the process, by which one can be told from another.
fn key_exchanges() -> Option<String> {
    CryptoProvider::get_default().map(|provider| format!("{:?}", provider.kx_groups))
}

/// Builds a store, which changes nothing. Returns why it could not be built, if it could not.
fn build() -> Option<String> {
    let before = key_exchanges();
    let error = RedisStore::new(URL).err().map(|error| error.to_string());
    assert_eq!(
        key_exchanges(),
        before,
        "the store changes the provider of the process"
    );
    error
}

fn main() {
    let (aws_lc_rs, ring) = (cfg!(feature = "aws-lc-rs"), cfg!(feature = "ring"));
    println!("features of rustls: aws-lc-rs {aws_lc_rs}, ring {ring}");
    match build() {
        None => {
            assert!(aws_lc_rs != ring, "a store without a provider");
            // rustls takes the one that its features name, unless another crate has named a second
            // one.
            let _ = ClientConfig::builder();
        }
        Some(error) => {
            println!("{error}");
            assert!(aws_lc_rs == ring, "{error}");
            assert!(
                error.contains("rustls::crypto::ring::default_provider().install_default()"),
                "{error}"
            );
            assert!(!error.contains("geheim"), "{error}");
        }
    }
    #[cfg(all(feature = "aws-lc-rs", feature = "ring"))]
    {
        // What the error says.
        rustls::crypto::ring::default_provider()
            .install_default()
            .expect("nobody has installed one");
        assert_eq!(build(), None);
        let _ = ClientConfig::builder();
    }
}
