//! The sealed key: the name of a key in messages to other processes. With a secret, only processes
//! that know the secret can read it.

use crate::key::Key;

/// The bytes of a nonce.
const NONCE: usize = 8;

/// Seals `key` with a `nonce` that is not used twice.
pub(super) fn of(key: Key, secret: Option<Key>, nonce: u64) -> Vec<u8> {
    let nonce = nonce.to_le_bytes();
    [&nonce[..], &masked(key.bytes(), secret, nonce)].concat()
}

/// Opens a sealed key. Returns `None` if it has the wrong length. With another secret, the key is
/// another one.
pub(super) fn read(token: &[u8], secret: Option<Key>) -> Option<Key> {
    let (nonce, bytes) = token.split_first_chunk::<NONCE>()?;
    Some(Key::of_bytes(masked(
        bytes.try_into().ok()?,
        secret,
        *nonce,
    )))
}

/// Applies the mask that follows from the secret and the nonce. A second time, it removes the mask.
fn masked(bytes: [u8; 16], secret: Option<Key>, nonce: [u8; NONCE]) -> [u8; 16] {
    let Some(secret) = secret else { return bytes };
    let mask = secret.and("token").and(nonce).bytes();
    std::array::from_fn(|index| bytes[index] ^ mask[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_keys_open_with_the_right_secret_only() {
        let (key, secret) = (Key::new("Bearer s3cr3t"), Some(Key::new("only we know")));
        assert_eq!(read(&of(key, None, 7), None), Some(key));
        assert_eq!(read(&of(key, secret, 7), secret), Some(key));
        assert_ne!(read(&of(key, secret, 7), None), Some(key));
        assert_ne!(
            of(key, secret, 7)[NONCE..],
            of(key, secret, 8)[NONCE..],
            "the same key looks like another"
        );
        assert_eq!(read(b"short", secret), None);
    }
}
