//! How a key is named to the other processes when it is held: with a secret, only they can read it.

use crate::key::Key;

const NONCE: usize = 8;

/// Names `key` under a `nonce` that is not used twice.
pub(super) fn of(key: Key, secret: Option<Key>, nonce: u64) -> Vec<u8> {
    let nonce = nonce.to_le_bytes();
    [&nonce[..], &masked(key.bytes(), secret, nonce)].concat()
}

/// Whose key it is.
pub(super) fn read(token: &[u8], secret: Option<Key>) -> Option<Key> {
    let (nonce, bytes) = token.split_first_chunk::<NONCE>()?;
    Some(Key::of_bytes(masked(bytes.try_into().ok()?, secret, *nonce)))
}

/// Adds what follows from the secret and the nonce; twice, it takes it away.
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
