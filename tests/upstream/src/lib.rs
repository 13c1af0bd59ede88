//! An HTTP server on loopback that enforces a limit and logs every arrival.
