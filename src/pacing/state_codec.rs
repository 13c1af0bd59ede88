//! The state of a pace as numbers, so that processes can share it.

use std::time::{Duration, Instant};

use crate::clock;

/// Writes or reads the state of a pace. [`Pace::share`](super::Pace::share) passes each part,
/// always in the same order.
///
/// The same code writes and reads: each method either writes its argument, or overwrites it with
/// what it reads.
#[derive(Debug)]
pub struct StateCodec<'a> {
    /// The moment from which written moments count.
    origin: Instant,
    now: Instant,
    side: Side<'a>,
    /// Whether other processes read what is written.
    is_for_others: bool,
}

#[derive(Debug)]
enum Side<'a> {
    Write(Vec<f64>),
    Read { left: &'a [u8], sound: bool },
}

/// The size of a number, in bytes.
const SIZE: usize = 8;

impl StateCodec<'_> {
    /// Returns everything that `share` passes, as bytes. Moments count from `now`.
    pub fn write(now: Instant, share: impl FnOnce(&mut StateCodec<'_>)) -> Vec<u8> {
        StateCodec::write_for(true, now, share)
    }

    /// The same, for a process that returns to this state later: see [`restore`](Self::restore).
    pub(crate) fn save(now: Instant, share: impl FnOnce(&mut StateCodec<'_>)) -> Vec<u8> {
        StateCodec::write_for(false, now, share)
    }

    fn write_for(
        is_for_others: bool,
        now: Instant,
        share: impl FnOnce(&mut StateCodec<'_>),
    ) -> Vec<u8> {
        let mut codec = StateCodec {
            origin: now,
            now,
            side: Side::Write(Vec::new()),
            is_for_others,
        };
        share(&mut codec);
        match codec.side {
            Side::Write(written) => written.into_iter().flat_map(f64::to_le_bytes).collect(),
            Side::Read { .. } => Vec::new(),
        }
    }

    /// Returns to what [`save`](Self::save) has written at `saved_at`.
    pub(crate) fn restore(
        saved: &[u8],
        saved_at: Instant,
        share: impl FnOnce(&mut StateCodec<'_>),
    ) {
        share(&mut StateCodec {
            is_for_others: false,
            ..StateCodec::reader(saved, saved_at, saved_at)
        });
    }

    fn reader(written: &[u8], origin: Instant, now: Instant) -> StateCodec<'_> {
        StateCodec {
            origin,
            now,
            side: Side::Read {
                left: written,
                sound: true,
            },
            is_for_others: true,
        }
    }

    /// Returns whether other processes read what is written.
    pub(crate) fn is_for_others(&self) -> bool {
        self.is_for_others
    }

    /// Overwrites everything that `share` passes with what was written. Moments count from `now`.
    /// Returns false if the size is wrong or a number is invalid; then some parts may have been
    /// overwritten.
    pub fn read(written: &[u8], now: Instant, share: impl FnOnce(&mut StateCodec<'_>)) -> bool {
        StateCodec::read_from(written, now, now, share)
    }

    /// Reads as [`read`](Self::read) does, but moments count from `origin`.
    pub(crate) fn read_from(
        written: &[u8],
        origin: Instant,
        now: Instant,
        share: impl FnOnce(&mut StateCodec<'_>),
    ) -> bool {
        let mut codec = StateCodec::reader(written, origin, now);
        share(&mut codec);
        matches!(
            codec.side,
            Side::Read {
                left: [],
                sound: true
            }
        )
    }

    /// Passes a number. A number that is not finite, or above 1e30, is invalid.
    pub fn number(&mut self, number: &mut f64) {
        if let Some(read) = self.pass(*number) {
            match is_sane(read) {
                true => *number = read,
                false => self.spoil(),
            }
        }
    }

    /// Passes a number that may be absent. An invalid number counts as absent.
    pub fn optional_number(&mut self, number: &mut Option<f64>) {
        if let Some(read) = self.pass(number.unwrap_or(f64::NAN)) {
            *number = Some(read).filter(|read| is_sane(*read));
        }
    }

    /// Passes a count, up to 2^53.
    pub fn count(&mut self, count: &mut u64) {
        let mut number = *count as f64;
        self.number(&mut number);
        *count = number as u64;
    }

    /// Passes a count that fits 32 bits.
    pub fn small_count(&mut self, count: &mut u32) {
        let mut number = u64::from(*count);
        self.count(&mut number);
        *count = u32::try_from(number).unwrap_or(u32::MAX);
    }

    /// Passes a flag.
    pub fn flag(&mut self, flag: &mut bool) {
        let mut number = f64::from(u8::from(*flag));
        self.number(&mut number);
        *flag = number != 0.0;
    }

    /// Passes a moment that may be absent.
    pub fn moment(&mut self, moment: &mut Option<Instant>) {
        let mut ahead = moment.map(|moment| match moment.checked_duration_since(self.origin) {
            Some(ahead) => ahead.as_secs_f64(),
            None => -self.origin.duration_since(moment).as_secs_f64(),
        });
        self.optional_number(&mut ahead);
        if let Side::Read { .. } = self.side {
            *moment = ahead.and_then(|ahead| {
                let span = Duration::try_from_secs_f64(ahead.abs()).ok()?;
                if ahead < 0.0 {
                    self.origin.checked_sub(span)
                } else {
                    self.origin.checked_add(span)
                }
            });
        }
    }

    /// Passes a moment that may be absent and that lies at most `most` ahead. A later moment is an
    /// error of the process that wrote it, and is moved forward so that no request waits for it.
    pub(crate) fn near(&mut self, moment: &mut Option<Instant>, most: Duration) {
        self.moment(moment);
        if let Side::Read { .. } = self.side {
            *moment = moment.map(|moment| moment.min(clock::after(self.now, most)));
        }
    }

    /// Passes a moment and a number of that moment, which may be absent.
    pub(crate) fn number_at(&mut self, both: &mut Option<(Instant, f64)>) {
        let (mut at, mut number) = both.unzip();
        self.moment(&mut at);
        self.optional_number(&mut number);
        *both = at.zip(number);
    }

    fn spoil(&mut self) {
        if let Side::Read { sound, .. } = &mut self.side {
            *sound = false;
        }
    }

    /// Writes the number, or returns the one that is read.
    fn pass(&mut self, number: f64) -> Option<f64> {
        match &mut self.side {
            Side::Write(written) => {
                written.push(number);
                None
            }
            Side::Read { left, sound } => match left.split_first_chunk::<SIZE>() {
                Some((bytes, rest)) => {
                    *left = rest;
                    Some(f64::from_le_bytes(*bytes))
                }
                None => {
                    *sound = false;
                    None
                }
            },
        }
    }
}

/// Reports whether the number is valid.
fn is_sane(number: f64) -> bool {
    number.abs() <= 1e30
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codec_reads_exactly_what_was_written() {
        let now = clock::now();
        let (mut number, mut none, mut count, mut flag) = (-0.5, None, 1_u64 << 53, true);
        let (mut past, mut future) = (
            now.checked_sub(Duration::from_secs(5)),
            Some(now + Duration::from_secs(7)),
        );
        let written = StateCodec::write(now, |codec| {
            codec.number(&mut number);
            codec.optional_number(&mut none);
            codec.count(&mut count);
            codec.flag(&mut flag);
            codec.moment(&mut past);
            codec.moment(&mut future);
        });
        let later = now + Duration::from_secs(100);
        let mut read = (0.0, Some(1.0), 0, false, None, None);
        let share = |codec: &mut StateCodec<'_>,
                     read: &mut (
            f64,
            Option<f64>,
            u64,
            bool,
            Option<Instant>,
            Option<Instant>,
        )| {
            codec.number(&mut read.0);
            codec.optional_number(&mut read.1);
            codec.count(&mut read.2);
            codec.flag(&mut read.3);
            codec.moment(&mut read.4);
            codec.moment(&mut read.5);
        };
        assert!(StateCodec::read(&written, later, |codec| share(
            codec, &mut read
        )));
        let after = |seconds| Some(now + Duration::from_secs(seconds));
        assert_eq!(read, (-0.5, None, 1 << 53, true, after(95), after(107)));

        assert!(
            !StateCodec::read(&written[1..], later, |codec| share(codec, &mut read)),
            "too short"
        );
        let longer = [&written[..], &[0]].concat();
        assert!(
            !StateCodec::read(&longer, later, |codec| share(codec, &mut read)),
            "too long"
        );
        let nan = StateCodec::write(now, |codec| codec.optional_number(&mut none));
        assert!(
            !StateCodec::read(&nan, later, |codec| codec.number(&mut number)) && number == -0.5
        );
    }
}
