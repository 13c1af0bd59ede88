//! Decimal numbers without binary floating point: `7.66` is exact.

/// The largest count: 2^53 - 1. Above it, JSON and JavaScript are not exact.
pub(in crate::signal) const LARGEST: u64 = (1 << 53) - 1;

/// `[+-]? (digits [. digits*] | . digits)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::signal) struct Number {
    pub(in crate::signal) negative: bool,
    pub(in crate::signal) whole: u128,
    /// The first 18 digits after the point, as a count of 10^-18.
    fraction: u64,
    /// Whether a later digit is not 0.
    more: bool,
}

const FRACTION: u128 = 1_000_000_000_000_000_000;

impl Number {
    /// Parses the whole text, which may be in quotes.
    pub(in crate::signal) fn read(text: &str) -> Option<Number> {
        match Number::start(unquoted(text))? {
            (number, "") => Some(number),
            _ => None,
        }
    }

    /// Parses the number at the start of the text. Returns the rest, too.
    pub(in crate::signal) fn start(text: &str) -> Option<(Number, &str)> {
        let (negative, text) = match text.as_bytes().first()? {
            b'-' => (true, &text[1..]),
            b'+' => (false, &text[1..]),
            _ => (false, text),
        };
        let (whole, rest) = digits(text);
        let (fraction, rest) = match rest.strip_prefix('.') {
            Some(after) => digits(after),
            None => ("", rest),
        };
        if whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let mut number = Number {
            negative,
            whole: 0,
            fraction: 0,
            more: false,
        };
        for digit in whole.bytes() {
            number.whole = number
                .whole
                .saturating_mul(10)
                .saturating_add(u128::from(digit - b'0'));
        }
        let mut worth = FRACTION as u64 / 10;
        for digit in fraction.bytes() {
            number.fraction += u64::from(digit - b'0') * worth;
            number.more |= worth == 0 && digit != b'0';
            worth /= 10;
        }
        number.negative &= number.whole > 0 || number.fraction > 0 || number.more;
        Some((number, rest))
    }

    /// Returns the number of parts, with `parts` parts to one, rounded up; at most 10^20 parts. Only
    /// for numbers that are not negative.
    pub(in crate::signal) fn times_up(&self, parts: u128) -> u128 {
        let fraction = u128::from(self.fraction) * parts;
        let more = !fraction.is_multiple_of(FRACTION) || self.more;
        self.whole
            .saturating_mul(parts)
            .saturating_add(fraction / FRACTION + u128::from(more))
    }

    /// Returns the number of parts as a count, rounded up; a negative number means 0.
    pub(in crate::signal) fn count_up(&self, parts: u128) -> u64 {
        match self.negative {
            true => 0,
            false => cut(self.times_up(parts)),
        }
    }

    /// Returns `1 / number` in parts of one, rounded up.
    pub(in crate::signal) fn inverse_up(&self, parts: u128) -> Option<u128> {
        let divisor = self
            .whole
            .checked_mul(FRACTION)?
            .checked_add(u128::from(self.fraction))?;
        parts
            .checked_mul(FRACTION)?
            .checked_add(divisor.checked_sub(1)?)?
            .checked_div(divisor)
    }

    /// Returns a count of what is left or allowed, rounded down.
    pub(in crate::signal) fn count(&self) -> Count {
        match self.negative {
            true => Count::Negative,
            false => Count::Of(cut(self.whole)),
        }
    }
}

/// Cuts a count to the largest.
fn cut(count: u128) -> u64 {
    u64::try_from(count).unwrap_or(LARGEST).min(LARGEST)
}

/// A count. The meaning of a negative count depends on the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::signal) enum Count {
    Negative,
    Of(u64),
}

impl Count {
    pub(in crate::signal) fn read(text: &str) -> Option<Count> {
        Some(Number::read(text)?.count())
    }

    pub(in crate::signal) fn known(self) -> Option<u64> {
        match self {
            Count::Of(count) => Some(count),
            Count::Negative => None,
        }
    }

    /// Returns the count as what is left of a limit. A negative count is 0 if the limit is known.
    pub(in crate::signal) fn left_of(self, limit: Option<u64>) -> Option<u64> {
        match self {
            Count::Of(count) => Some(count),
            Count::Negative => limit.map(|_| 0),
        }
    }
}

/// Parses a count of digits only.
pub(in crate::signal) fn plain(text: &str) -> Option<u64> {
    match digits(text) {
        ("", _) => None,
        (_, "") => Count::read(text)?.known(),
        _ => None,
    }
}

/// Returns the digits at the start of the text, and the rest.
pub(in crate::signal) fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

/// Returns the text without one pair of quotes around it.
pub(in crate::signal) fn unquoted(text: &str) -> &str {
    text.strip_prefix('"')
        .and_then(|text| text.strip_suffix('"'))
        .unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_digits_with_a_sign_and_point() {
        for (text, expected) in [
            ("7", Some(Count::Of(7))),
            ("+7.", Some(Count::Of(7))),
            (".9", Some(Count::Of(0))),
            ("\"12.9\"", Some(Count::Of(12))),
            ("-0.0", Some(Count::Of(0))),
            ("-0.5", Some(Count::Negative)),
            ("9007199254740992", Some(Count::Of(LARGEST))),
            (
                "99999999999999999999999999999999999999999999",
                Some(Count::Of(LARGEST)),
            ),
            ("", None),
            (".", None),
            ("-", None),
            ("\"", None),
            ("1e3", None),
            ("0x10", None),
            ("1,000", None),
            ("NaN", None),
            ("²", None),
            ("--1", None),
        ] {
            assert_eq!(Count::read(text), expected, "{text:?}");
        }
    }

    #[test]
    fn a_number_is_multiplied_exactly_and_rounded_up() {
        let thousand = |text| Number::read(text).unwrap().times_up(1000);
        assert_eq!(thousand("7.66"), 7660);
        assert_eq!(thousand("0.0001"), 1);
        assert_eq!(thousand("1.0000000000000000000000001"), 1001);
        assert_eq!(
            Number::read("0.0167").unwrap().inverse_up(1000),
            Some(59_881)
        );
        assert_eq!(Number::read("0").unwrap().inverse_up(1000), None);
    }
}
