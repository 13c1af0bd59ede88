//! Whether a host can be used as it is written. Most can, and need no parsing.

/// Returns whether `text` is a host without port and user, and without upper case: neither of the
/// two functions that read hosts has anything to do then.
///
/// It looks at eight bytes at a time.
#[inline]
pub(crate) fn is_plain_host(text: &[u8]) -> bool {
    let (words, rest) = text.as_chunks::<8>();
    let mut marks = 0;
    for word in words {
        marks |= special_bytes(u64::from_ne_bytes(*word));
    }
    // The last eight bytes overlap those before them. Shorter texts are few.
    marks |= match text.last_chunk::<8>() {
        Some(last) => special_bytes(u64::from_ne_bytes(*last)),
        None => rest
            .iter()
            .fold(0, |marks, &byte| marks | special_bytes(u64::from(byte))),
    };
    marks == 0
}

/// Marks the bytes of `word` that are `:`, `@`, `[` or upper-case letters, each in its highest bit.
#[inline]
fn special_bytes(word: u64) -> u64 {
    const EACH: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x80 * EACH;
    // No sum of bytes below 0x80 carries into the next byte.
    let low = word & !HIGH;
    // `@`, the letters and `[` are next to one another.
    let from_at = low + (0x80 - b'@' as u64) * EACH;
    let above_bracket = low + (0x80 - b'[' as u64 - 1) * EACH;
    let colon = low ^ (b':' as u64 * EACH);
    let not_colon = colon + 0x7f * EACH;
    ((from_at & !above_bracket) | !not_colon) & !word & HIGH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_hosts_have_no_port_user_or_upper_case() {
        let is_special = |byte: u8| matches!(byte, b':' | b'@' | b'[') || byte.is_ascii_uppercase();
        for len in 0..=20 {
            assert!(is_plain_host(&vec![b'a'; len]), "{len} bytes");
            for (at, byte) in (0..len).flat_map(|at| (0..=255).map(move |byte| (at, byte))) {
                for around in [b'a', b'-', 0x7f, 0xff] {
                    let mut text = vec![around; len];
                    text[at] = byte;
                    assert_eq!(
                        is_plain_host(&text),
                        !is_special(byte),
                        "{byte:#x} at {at} of {len}"
                    );
                }
            }
        }
    }
}
