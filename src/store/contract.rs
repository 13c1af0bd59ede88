//! The contract every store keeps, as a suite that any store can run.
