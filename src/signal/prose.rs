//! Reads what a message says in words: that a limit is exceeded, and when to retry.
//!
//! The grammar is small on purpose. A sentence is a refusal if it has a word for a limit of requests
//! and a word for its end, such as `exceeded`. A wait follows a few words, such as `try again in`.
//! What is unclear is not believed.

use super::generic::lines::trim;
use super::parse::number::{Number, digits};
use super::parse::text::Text;
use super::parse::time::{self, Base};

/// The most bytes of a message that are read.
const LONGEST: usize = 1000;

/// The most places of a message where a wait may follow.
const MOST_WAITS: usize = 8;

/// What a message says.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Prose {
    /// Whether a limit is exceeded.
    pub(super) refused: bool,
    /// When to retry, in milliseconds.
    pub(super) retry: Option<u64>,
    /// When the limit resets, in milliseconds.
    pub(super) reset: Option<u64>,
}

/// What a word contributes to the sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WordClass {
    Rate,
    /// A word for a limit of anything.
    Limit,
    /// `limited`, after `rate`.
    Limited,
    /// What a limit of requests counts, and in which time.
    Counted,
    /// What other limits count.
    Other,
    Exceeded,
    Used,
    Throttled,
    Too,
    Many,
    /// The sentence speaks of a refusal that may come.
    If,
    None,
}

impl WordClass {
    fn of(word: &str) -> WordClass {
        match Text::lower(word).as_str() {
            "rate" | "rates" => WordClass::Rate,
            "limit" | "limits" | "quota" | "quotas" | "budget" | "volume" | "threshold" => {
                WordClass::Limit
            }
            "limited" | "limiting" => WordClass::Limited,
            "request" | "requests" | "call" | "calls" | "query" | "queries" | "usage" | "per"
            | "second" | "secondly" | "minute" | "hour" | "hourly" | "day" | "daily" | "month"
            | "monthly" | "credits" | "qps" | "bandwidth" | "frequency" | "concurrent" => {
                WordClass::Counted
            }
            "size" | "body" | "length" | "payload" | "file" | "files" | "storage" | "memory"
            | "upload" | "depth" | "users" | "seats" | "items" | "context" | "characters"
            | "not" | "no" | "invalid" | "unknown" | "missing" | "disabled" => WordClass::Other,
            "exceeded" | "exceeds" | "exceeding" | "reached" | "exhausted" | "hit"
            | "violation" | "banned" | "out" => WordClass::Exceeded,
            "used" => WordClass::Used,
            "throttled" | "throttling" => WordClass::Throttled,
            "too" => WordClass::Too,
            "many" => WordClass::Many,
            "if" | "when" | "unless" | "avoid" | "without" => WordClass::If,
            _ => WordClass::None,
        }
    }
}

/// The words read so far of a sentence, or of a code. The fields say which classes were read.
#[derive(Clone, Copy, Debug, Default)]
struct Sentence {
    rate_limit: bool,
    limit: bool,
    counted: bool,
    other: bool,
    exceeded: bool,
    /// Whether the words say that a limit of requests is exceeded.
    refused: bool,
    /// Whether the rest speaks of what may happen.
    open: bool,
    /// The number of words, from here on, that may say of what there are too many.
    too_many: u8,
    /// The class of the last word.
    last: Option<WordClass>,
    /// The numbers after `limit` and `used`.
    numbers: [Option<u64>; 2],
}

impl Sentence {
    fn add(&mut self, word: &str) {
        if let (number, "") = digits(word) {
            let place = match self.last {
                Some(WordClass::Limit) => 0,
                Some(WordClass::Used) => 1,
                _ => return,
            };
            self.numbers[place] = number.parse().ok();
            if let [Some(limit), Some(used)] = self.numbers {
                self.exceeded |= used >= limit;
            }
        }
        let class = WordClass::of(word);
        match class {
            WordClass::Limit if self.last == Some(WordClass::Rate) => self.rate_limit = true,
            WordClass::Limit => self.limit = true,
            WordClass::Limited if self.last == Some(WordClass::Rate) => self.refused |= !self.open,
            WordClass::Counted => {
                self.counted = true;
                self.refused |= self.too_many > 0 && !self.open;
            }
            WordClass::Other => self.other = true,
            WordClass::Exceeded => self.exceeded = true,
            WordClass::Throttled => self.refused |= !self.open,
            WordClass::Many if self.last == Some(WordClass::Too) => self.too_many = 4,
            WordClass::If => self.open = true,
            WordClass::None if has_start(word, "ratelimit") => self.rate_limit = true,
            _ => {}
        }
        self.too_many = self.too_many.saturating_sub(1);
        self.refused |= !self.open && self.exceeded && (self.rate_limit || self.is_of_requests());
        self.last = Some(class);
    }

    fn is_of_requests(&self) -> bool {
        self.limit && self.counted && !self.other
    }
}

/// Reads a message. The time is linear in its length, of which a bounded part is read.
pub(super) fn read(text: &str, base: &Base) -> Prose {
    let end = (0..=LONGEST.min(text.len()))
        .rev()
        .find(|end| text.is_char_boundary(*end));
    let text = &text[..end.unwrap_or(0)];
    let (mut said, mut sentence) = (Prose::default(), Sentence::default());
    let (mut leads, mut waits) = (Leads::default(), 0..MOST_WAITS);
    let mut rest = text;
    while let Some(start) = rest.find(|letter: char| letter.is_ascii_alphanumeric()) {
        let mut pairs = rest.as_bytes()[..start].windows(2);
        if pairs.any(|pair| b".!?".contains(&pair[0]) && pair[1].is_ascii_whitespace()) {
            said.refused |= sentence.refused;
            (sentence, leads) = (Sentence::default(), Leads::default());
        }
        rest = &rest[start..];
        let length = rest
            .bytes()
            .take_while(|byte| byte.is_ascii_alphanumeric())
            .count();
        let (word, after) = rest.split_at(length);
        rest = after;
        sentence.add(word);
        match leads.add(word).filter(|_| waits.next().is_some()) {
            Some(Lead::Retry) => said.retry = said.retry.max(wait(rest, base)),
            Some(Lead::Reset) => said.reset = said.reset.max(wait(rest, base)),
            None => {}
        }
    }
    said.refused |= sentence.refused;
    said
}

/// What a time after some words means.
#[derive(Clone, Copy, Debug)]
enum Lead {
    Retry,
    Reset,
}

/// The last word of a sentence that speaks of a wait, and the number of words since.
#[derive(Debug, Default)]
struct Leads(Option<(Lead, usize)>);

impl Leads {
    /// The most words between `retry` and `in`: "retry your request in".
    const FARTHEST: usize = 3;

    /// Adds a word. Returns what a time after it means.
    fn add(&mut self, word: &str) -> Option<Lead> {
        let word = Text::lower(word);
        let near = match word.as_str() {
            "again" | "retry" | "retrying" | "available" | "blocked" | "banned" => {
                self.0 = Some((Lead::Retry, 0));
                return None;
            }
            "reset" | "resets" | "replenished" | "renewed" | "refreshed" | "restored"
            | "expires" => {
                self.0 = Some((Lead::Reset, 0));
                return None;
            }
            _ => self.0.map(|(lead, since)| (lead, since + 1)),
        };
        self.0 = near;
        match word.as_str() {
            "wait" => Some(Lead::Retry),
            "until" => Some(Lead::Reset),
            "in" | "after" | "at" | "on" | "for" => near
                .filter(|(_, since)| *since <= Leads::FARTHEST)
                .map(|(lead, _)| lead),
            _ => None,
        }
    }
}

/// Reads the time at the start of the text. A wait of a millisecond or less is that of a bucket that
/// is refilled all the time, which is no advice.
fn wait(text: &str, base: &Base) -> Option<u64> {
    let mut text = without_marks(text);
    for _ in 0..3 {
        let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
        // `wait for at least 5s`
        text = match Text::lower(word).as_str() {
            "for" | "at" | "least" | "about" | "another" | "approximately" | "the" | "next" => {
                without_marks(rest)
            }
            _ => break,
        };
    }
    let found = clock(text)
        .or_else(|| spans(text))
        .or_else(|| number(text, base))
        .or_else(|| moment(text, base));
    found.filter(|wait| *wait > 1)
}

/// Returns the text without the marks that may stand before a time.
fn without_marks(text: &str) -> &str {
    text.trim_start_matches([' ', '\t', ':', '=', '"', '\'', '`', '('])
}

/// `7m12.5s`, `1 minute and 30 seconds`
fn spans(text: &str) -> Option<u64> {
    let (span, rest) = time::span_at_start(text)?;
    let rest = rest
        .strip_prefix("and ")
        .or_else(|| rest.strip_prefix(", "));
    let more = match rest.and_then(time::span_at_start) {
        Some((more, _)) => more,
        None => 0,
    };
    Some(span.saturating_add(more).min(time::LONGEST))
}

/// `04:35:57`, `12.04:35:57`
fn clock(text: &str) -> Option<u64> {
    let number = |text: &str| digits(text).0.parse::<u64>().ok();
    let end =
        text.find(|letter: char| !(letter.is_ascii_digit() || letter == ':' || letter == '.'));
    let text = text[..end.unwrap_or(text.len())].trim_end_matches(['.', ':']);
    let mut parts = text.rsplit(':');
    let (seconds, minutes) = (number(parts.next()?)?, number(parts.next()?)?);
    let (days, hours) = match parts.next()?.split_once('.') {
        Some((days, hours)) => (number(days)?, number(hours)?),
        None => (0, number(text)?),
    };
    let is_clock = parts.next().is_none() && hours < 24 && minutes < 60 && seconds < 60;
    // Only numbers of a clock are small enough to be multiplied.
    if !is_clock {
        return None;
    }
    let all_seconds = days.min(366) * 86_400 + hours * 3600 + minutes * 60 + seconds;
    Some((all_seconds * 1000).min(time::LONGEST))
}

/// `35`, with no other word after it.
fn number(text: &str, base: &Base) -> Option<u64> {
    let (number, rest) = Number::start(text)?;
    let is_full_stop = text[..text.len() - rest.len()].ends_with('.');
    let ends = match trim(rest).bytes().next() {
        Some(next) => is_full_stop || b".,;)\"'!\n\r<}".contains(&next),
        None => true,
    };
    ends.then(|| base.number(number))
}

/// A date in one to six words.
fn moment(text: &str, base: &Base) -> Option<u64> {
    let head = text.get(..40).unwrap_or(text);
    let ends = head
        .match_indices([' ', ',', ')', '"', '\''])
        .map(|(end, _)| end);
    let mut ends = ends.chain([head.len()]).rev();
    ends.find_map(|end| base.moment(head[..end].trim_end_matches(['.', ' ', ','])))
}

/// Returns whether a word begins with `start`, in any case of its letters.
fn has_start(word: &str, start: &str) -> bool {
    let begin = word.get(..start.len());
    begin.is_some_and(|begin| begin.eq_ignore_ascii_case(start))
}

/// Returns whether a code of an error says that a limit is exceeded: `userRateLimitExceeded`,
/// `OVER_QUERY_LIMIT`.
pub(super) fn is_code(code: &str) -> bool {
    let mut sentence = Sentence::default();
    let (mut count, mut start) = (0, 0);
    let mut says_so = false;
    let bytes = code.as_bytes();
    for end in 1..=bytes.len() {
        let (byte, next) = (bytes[end - 1], bytes.get(end));
        // A word ends before a capital after a small letter, before a mark, and at the end.
        let ends_word = next.is_none_or(|next| {
            (next.is_ascii_uppercase() && !byte.is_ascii_uppercase())
                || !next.is_ascii_alphanumeric()
        });
        if ends_word {
            let word = code.get(start..end).unwrap_or_default();
            let word = word.trim_matches(|letter: char| !letter.is_ascii_alphanumeric());
            says_so |= has_start(word, "throttl") || has_start(word, "ratelimit");
            sentence.exceeded |= word.eq_ignore_ascii_case("over");
            sentence.counted |= word.eq_ignore_ascii_case("api");
            sentence.add(word);
            count += usize::from(!word.is_empty());
            start = end;
        }
    }
    says_so |= sentence.rate_limit || sentence.refused;
    says_so && !sentence.other && count <= 8
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(histories::config(256))]

        /// What leads to a wait, before numbers and units of any size.
        #[test]
        fn no_text_makes_the_reader_panic(
            lead in "(try again in|retry after|resets in|banned until|replenished in|daily limit) ",
            text in "([0-9]{0,25}[.:, ]?(s|ms|days|hours and|T|Z|-| GMT)?){0,8}|.{0,40}",
        ) {
            let said = read(&format!("{lead}{text}"), &BASE);
            let waits = said.retry.into_iter().chain(said.reset);
            prop_assert!(waits.into_iter().all(|wait| wait <= time::LONGEST));
        }
    }

    const BASE: Base = Base {
        now: 1_767_225_600_000,
        date: None,
    };

    #[test]
    fn messages_name_their_wait() {
        for (text, retry, reset) in [
            (
                "Please try again in 634ms. Visit https://x.example/4",
                Some(634),
                None,
            ),
            (
                "Try again in 60 seconds. Passed model=x",
                Some(60_000),
                None,
            ),
            ("Retry after 2026-01-01T00:00:30.000Z", Some(30_000), None),
            (
                "retry after Thu, 01 Jan 2026 00:00:30 GMT.",
                Some(30_000),
                None,
            ),
            ("Too Many Requests: retry after 35", Some(35_000), None),
            ("Expected available in 3600 seconds.", Some(3_600_000), None),
            (
                "please wait for at least 2 minutes before",
                Some(120_000),
                None,
            ),
            (
                "Quota will be replenished in 04:35:57.",
                None,
                Some(16_557_000),
            ),
            ("replenished in 1.00:00:02", None, Some(86_402_000)),
            ("Resets in 16 days. To continue", None, Some(1_382_400_000)),
            (
                "IP banned until 1767225660000. Please use",
                None,
                Some(60_000),
            ),
            (
                "retry your request in 1 minute and 30 seconds",
                Some(90_000),
                None,
            ),
            (
                "You are blocked for the next 2 hours",
                Some(7_200_000),
                None,
            ),
            ("Wait. Used in 5 seconds", None, None),
            ("retry-after: 172.793µs, allowed: 44000/minute", None, None),
            ("retry after 3 attempts", None, None),
            ("try again in 9999999999999999999:00:00", None, None),
            ("try again in 0:9999999999999999999:0", None, None),
            ("wait a few minutes, limits reset every minute", None, None),
            ("exceeded with in '20' secs", None, None),
            ("try again in", None, None),
            (
                "try again at 99999999999999999999999999999999999",
                Some(time::LONGEST),
                None,
            ),
        ] {
            let said = read(text, &BASE);
            assert_eq!((said.retry, said.reset), (retry, reset), "{text}");
        }
    }

    #[test]
    fn messages_say_that_a_limit_is_exceeded() {
        for (text, expected) in [
            ("API rate limit exceeded", true),
            ("Max rate limit '100' exceeded with in '20' secs", true),
            ("You have exceeded a secondary rate limit.", true),
            ("You've exceeded your rate-limit for this API.", true),
            ("You are being rate limited", true),
            ("Too many concurrent requests", true),
            ("Daily limit 50, used 50.", true),
            ("Daily limit 50, used 49.", false),
            ("the hourly limit of 1000 credits has been exceeded", true),
            ("Out of call volume quota.", true),
            ("You have reached the limit of users in your plan", false),
            ("Request body size limit exceeded", false),
            ("Storage quota exceeded", false),
            ("If you exceed the rate limit, calls are throttled", false),
            ("too many fields. Requests are fine", false),
            ("Rate limits reset every minute", false),
            ("Forbidden", false),
        ] {
            assert_eq!(read(text, &BASE).refused, expected, "{text}");
        }
    }
}
