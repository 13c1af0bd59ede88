//! Decodes base64, with and without padding, as binary metadata of gRPC needs it.

/// The longest text that is decoded, in bytes. A longer one is ignored.
const LONGEST: usize = 16 * 1024;

/// Decodes the first value in `text`, which may be a list. `None` if it is not base64, or too long.
pub(super) fn decode(text: &[u8]) -> Option<Vec<u8>> {
    let first = text.split(|byte| *byte == b',').next()?.trim_ascii();
    let padding = first.iter().rev().take_while(|byte| **byte == b'=').count();
    let digits = &first[..first.len() - padding];
    let is_whole = match padding {
        0 => digits.len() % 4 != 1,
        1 | 2 => first.len() % 4 == 0,
        _ => false,
    };
    if !is_whole || digits.len() > LONGEST {
        return None;
    }
    let mut bytes = Vec::with_capacity(digits.len() / 4 * 3 + 2);
    for group in digits.chunks(4) {
        let mut bits = 0;
        for digit in group {
            bits = bits << 6 | u32::from(value(*digit)?);
        }
        // A group of n digits has n - 1 bytes. The bits that are left over are ignored.
        let bits = bits << (6 * (4 - group.len()));
        let [_, group_bytes @ ..] = bits.to_be_bytes();
        bytes.extend_from_slice(&group_bytes[..group.len() - 1]);
    }
    Some(bytes)
}

/// Returns the value of a digit. Both alphabets are known.
fn value(digit: u8) -> Option<u8> {
    match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' | b'-' => Some(62),
        b'/' | b'_' => Some(63),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::decode;

    /// The vectors of RFC 4648, section 10, and what is not base64.
    #[test]
    fn text_is_decoded_with_and_without_padding() {
        for (text, bytes) in [
            ("", Some("")),
            ("Zg==", Some("f")),
            ("Zg", Some("f")),
            ("Zm8=", Some("fo")),
            ("Zm8", Some("fo")),
            ("Zm9v", Some("foo")),
            ("Zm9vYg==", Some("foob")),
            ("Zm9vYmE=", Some("fooba")),
            ("Zm9vYmFy", Some("foobar")),
            (" Zm9v ,Zg==", Some("foo")),
            ("Z", None),
            ("Zm9vY", None),
            ("Zg=", None),
            ("Zm8==", None),
            ("Zg===", None),
            ("=", None),
            ("Zm=v", None),
            ("Zm 9v", None),
            ("Zm9v\n!", None),
        ] {
            let decoded = decode(text.as_bytes());
            assert_eq!(decoded.as_deref(), bytes.map(str::as_bytes), "{text:?}");
        }
        assert_eq!(decode(b"-_-_"), decode(b"+/+/"));
        assert_eq!(
            decode(&[b'A'; 16 * 1024]).map(|bytes| bytes.len()),
            Some(12 * 1024)
        );
        assert_eq!(decode(&[b'A'; 16 * 1024 + 4]), None);
    }
}
