//! A program whose clock cannot be paused: see `Cargo.toml`.

#[cfg(test)]
mod tests {
    mod without_pause {
        pub(super) fn pause() -> &'static str {
            "Tokio has no such function"
        }
    }

    // If Tokio had its `pause`, this would not compile, and the tests of threads would use the clock of Tokio.
    #[test]
    fn tokio_cannot_pause() {
        use without_pause::*;
        {
            #[allow(unused_imports, reason = "Tokio has no `pause`")]
            use tokio::time::*;
            assert_eq!(pause(), "Tokio has no such function");
        }
    }
}
