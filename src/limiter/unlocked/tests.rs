use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use super::*;
use crate::clock;

const LIFE: Duration = Duration::from_millis(10);

/// Returns permits whose slot, stamp and incarnation are all `name`.
fn permits(name: u64, count: u32, until: Instant) -> Reservation {
    Reservation {
        at: until,
        until,
        cost: 1,
        count,
        slot: name,
        stamp: name,
        incarnation: name,
        lender: None,
        probe: None,
        is_at_once: true,
    }
}

/// Returns permits of `count` units, and a place to which they were offered.
fn offered(count: u32, now: Instant) -> (Prefetched, UnlockedPermits) {
    let mut prefetched = Prefetched::default();
    prefetched.fill(&permits(7, count, now + LIFE));
    let unlocked = UnlockedPermits::new();
    unlocked.offer(&mut prefetched);
    (prefetched, unlocked)
}

#[test]
fn units_are_either_offered_or_collected() {
    let now = clock::now();
    let (mut prefetched, unlocked) = offered(10, now);
    assert_eq!(prefetched.units(now), 0);
    assert!(unlocked.spend(3, Moment::of(now)));
    assert!(!unlocked.spend(8, Moment::of(now)), "seven are left");
    let permit = unlocked
        .take(1, CountedAs::Request, Moment::of(now))
        .unwrap();
    assert_eq!(
        (permit.cost, permit.slot, permit.stamp, permit.incarnation),
        (1, 7, 7, 7)
    );
    unlocked.collect(&mut prefetched);
    assert_eq!(prefetched.units(now), 6);
    assert!(!unlocked.spend(1, Moment::of(now)));
    assert!(
        unlocked
            .take(1, CountedAs::Request, Moment::of(now))
            .is_none()
    );
}

#[test]
fn permits_expire_at_most_one_step_early() {
    let now = clock::now();
    let (_, unlocked) = offered(10, now);
    let step = Duration::from_nanos(1 << STEP_BITS);
    let last = now + LIFE - step;
    let in_time = Moment::of(last - Duration::from_nanos(1));
    let permit = unlocked.take(1, CountedAs::Request, in_time).unwrap();
    assert!(permit.until > last && permit.until <= now + LIFE);
    assert!(!unlocked.spend(1, Moment::of(now + LIFE)));
}

#[test]
fn more_units_than_the_word_holds_stay_behind() {
    let now = clock::now();
    let (mut prefetched, unlocked) = offered(100_000, now);
    assert_eq!(prefetched.units(now), 100_000 - 65_535);
    unlocked.collect(&mut prefetched);
    assert_eq!(prefetched.units(now), 100_000);
}

#[test]
fn nothing_is_offered_after_nine_years() {
    let now = clock::now();
    let later = now + Duration::from_secs(10 * 365 * 86_400);
    let mut prefetched = Prefetched::default();
    prefetched.fill(&permits(7, 5, later + LIFE));
    let unlocked = UnlockedPermits::new();
    unlocked.offer(&mut prefetched);
    assert_eq!(prefetched.units(later), 5);
    assert!(!unlocked.spend(1, Moment::of(later)));
}

#[test]
fn threads_take_each_unit_once_and_of_one_offer() {
    const OFFERS: u64 = 20_000;
    const UNITS_EACH: u32 = 7;
    let now = clock::now();
    let unlocked = UnlockedPermits::new();
    let state = Mutex::new(Prefetched::default());
    let ended = AtomicBool::new(false);
    let (unlocked, ended) = (&unlocked, &ended);
    let taken: u64 = thread::scope(|scope| {
        let take = move || {
            let mut taken = 0;
            loop {
                let was_last = ended.load(Ordering::Acquire);
                while let Some(permit) = unlocked.take(1, CountedAs::Request, Moment::of(now)) {
                    assert_eq!(permit.slot, permit.stamp);
                    assert_eq!(permit.slot, permit.incarnation);
                    taken += 1;
                }
                if was_last {
                    return taken;
                }
            }
        };
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(take)).collect();
        for name in 1..=OFFERS {
            let mut prefetched = state.lock().unwrap();
            unlocked.collect(&mut prefetched);
            // As the limiter does, what is left is returned before other permits replace it.
            let left = prefetched.clear().map_or(0, |unused| unused.units);
            let count = UNITS_EACH + u32::try_from(left).unwrap();
            prefetched.fill(&permits(name, count, now + LIFE));
            unlocked.offer(&mut prefetched);
        }
        ended.store(true, Ordering::Release);
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    });
    // If the threads were slow, more units were left than the word holds.
    let left = u64::from(state.into_inner().unwrap().units(now));
    assert_eq!(taken + left, OFFERS * u64::from(UNITS_EACH));
}
