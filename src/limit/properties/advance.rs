//! The laws of advance bookings, compared with a brute-force count of every window.

use super::super::advance::{AdvanceBookings, TOLERANCE};
use super::*;

/// What happens to a key, in units of a fiftieth of its first window.
#[derive(Clone, Debug)]
enum Step {
    /// Time advances.
    Wait(u64),
    /// Books `count` permits of `cost` units that are of use in `earliest` or later.
    Book {
        cost: u32,
        count: u32,
        earliest: u64,
        patience: u64,
        life: Micros,
    },
    /// Prefetches up to `most` permits.
    Prefetch { most: u32, life: Micros },
    /// Gives back `units` of the grant with this number, counted from the newest.
    GiveBack { grant: usize, units: u32 },
    /// Holds the key for a time, or releases it.
    Hold(Option<u64>),
    /// Charges units that were used before. The upstream did not count them.
    Charge(u64),
    /// The upstream states what is left of a limit, which may be wrong.
    See { units: u64, refused: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    let life = select(vec![1_000u64, 10_000, 10_000, 40_000]);
    // Most permits are of use from within a few windows on.
    let earliest = prop_oneof![2 => Just(0u64), 4 => 0u64..150, 2 => 0u64..750, 1 => 0u64..20_000];
    prop_oneof![
        4 => prop_oneof![3 => 0u64..30, 1 => 0u64..400].prop_map(Step::Wait),
        12 => (
            prop_oneof![4 => 1u32..4, 1 => 1u32..12],
            prop_oneof![6 => 1u32..4, 1 => 1u32..40],
            earliest,
            select(vec![0u64, 20, 200, 30_000, 30_000]),
            life.clone(),
        ).prop_map(|(cost, count, earliest, patience, life)| {
            Step::Book { cost, count, earliest, patience, life }
        }),
        1 => (1u32..20, life).prop_map(|(most, life)| Step::Prefetch { most, life }),
        4 => (0usize..40, 1u32..6).prop_map(|(grant, units)| Step::GiveBack { grant, units }),
        1 => prop::option::of(0u64..100).prop_map(Step::Hold),
        1 => (0u64..10).prop_map(Step::Charge),
        1 => (0u64..40, 0u32..3).prop_map(|(units, refused)| Step::See { units, refused }),
    ]
}

/// Quotas with windows from 10 ms to two hours.
fn quota() -> impl Strategy<Value = Quota> {
    let window = || select(vec![10u64, 100, 1000, 5000, 60_000, 7_200_000]);
    let one = prop_oneof![
        3 => (1u32..12, window()).prop_map(|(count, window)| Quota::new(count, millis(window))),
        1 => (300u32..900, window()).prop_map(|(count, window)| Quota::new(count, millis(window))),
        2 => (1u32..12, 1u32..12, window()).prop_map(|(capacity, count, window)| {
            Quota::bucket(capacity).refill(count, millis(window))
        }),
        1 => (1u32..12, select(vec![200u64, 1000, 60_000]))
            .prop_map(|(count, window)| Quota::fixed(count, millis(window))),
        1 => (5u32..40, 4u32..10).prop_map(|(count, burst)| Quota::per_second(count).burst(burst)),
    ];
    (one.clone(), prop::option::of(one)).prop_map(|(first, second)| match second {
        Some(second) => first.and(second),
        None => first,
    })
}

/// A grant of which some permits are not given back yet.
#[derive(Clone, Copy, Debug)]
struct Granted {
    booking: Booking,
    cost: u32,
    /// The permits that are not given back.
    left: u32,
    /// When the permits are used, as a share of the time from slot to stamp.
    used_at: u8,
}

impl Granted {
    /// Returns when its permits arrive at the upstream, under a slack of `way`.
    fn arrival(&self, way: Micros) -> Micros {
        let Booking { slot, life, .. } = self.booking;
        slot + (life - 1 + way) * u64::from(self.used_at) / 255
    }
}

/// A ledger, and what it granted.
struct History {
    ledger: Ledger,
    spec: LimitSpec,
    now: Micros,
    /// The unit of time of the steps.
    unit: Micros,
    granted: Vec<Granted>,
    /// Units of charges, which the upstream does not count.
    draws: u32,
}

impl History {
    fn new(quota: Quota) -> Self {
        let spec = terms(quota);
        History {
            ledger: Ledger::new(&spec, START),
            spec,
            now: START,
            unit: micros_up(quota.limits()[0].window()) / 50,
            granted: Vec::new(),
            draws: 0,
        }
    }

    /// The way to the upstream takes no time under fixed windows, because `broken` moves the clock
    /// of the upstream instead.
    fn way(&self) -> Micros {
        let limits = self.spec.quota().limits();
        let is_fixed = |limit: &Limit| matches!(limit, Limit::Fixed { .. });
        if limits.iter().any(is_fixed) {
            0
        } else {
            SLACK
        }
    }

    /// Returns another share of a permit's life in each call.
    fn draw(&mut self) -> u8 {
        self.draws += 1;
        match self.draws % 4 {
            0 => 0,
            1 => 255,
            _ => (self.draws * 89 % 256) as u8,
        }
    }

    fn book(&mut self, order: Order) -> (Vec<Booking>, Result<(), TooLate>) {
        self.ledger.advance(&self.spec, self.now);
        let mut grants = Vec::new();
        let booked = self
            .ledger
            .book(&self.spec, order, |grant| grants.push(grant));
        (grants, booked)
    }

    fn note(&mut self, booking: Booking, cost: u32) {
        let used_at = self.draw();
        self.granted.push(Granted {
            booking,
            cost,
            left: booking.count,
            used_at,
        });
    }

    /// Applies a step. With `is_plain`, permits are of use at once.
    fn apply(&mut self, step: &Step, is_plain: bool) {
        match *step {
            Step::Wait(units) => self.now += units * self.unit,
            Step::Book {
                cost,
                count,
                earliest,
                patience,
                life,
            } => {
                let earliest = if is_plain { 0 } else { earliest };
                let order = Order {
                    cost,
                    count,
                    earliest: self.now + earliest * self.unit,
                    latest: self.now + (earliest + patience) * self.unit,
                    life,
                    borrows: false,
                };
                for booking in self.book(order).0 {
                    assert!(booking.slot >= order.earliest && booking.slot <= order.latest);
                    self.note(booking, cost);
                }
            }
            Step::Prefetch { most, life } => {
                self.ledger.advance(&self.spec, self.now);
                if let Some(booking) = self.ledger.prefetch(&self.spec, most, life) {
                    assert_eq!(booking.slot, self.now);
                    self.note(booking, 1);
                }
            }
            Step::GiveBack { grant, units } => {
                let way = self.way();
                let Some(index) = self.granted.len().checked_sub(grant + 1) else {
                    return;
                };
                let given = &mut self.granted[index];
                // A permit that was used is not given back.
                if given.arrival(way) <= self.now {
                    return;
                }
                let count = units.min(given.left);
                given.left -= count;
                let &mut Granted { booking, cost, .. } = given;
                self.ledger.advance(&self.spec, self.now);
                self.ledger.take_back(UnusedPermits::new(
                    booking.slot,
                    booking.stamp,
                    u64::from(count) * u64::from(cost),
                    0,
                ));
            }
            Step::Hold(span) => {
                self.ledger.advance(&self.spec, self.now);
                match span {
                    Some(span) => {
                        let hold = StoredHold {
                            until: self.now + span * self.unit,
                            ..StoredHold::default()
                        };
                        self.ledger.hold_anew(hold);
                    }
                    None => {
                        self.ledger.release();
                    }
                }
            }
            Step::Charge(units) => {
                self.ledger.advance(&self.spec, self.now);
                self.ledger
                    .charge(&self.spec, Charge::new(Duration::ZERO, units));
            }
            Step::See { units, refused } => {
                self.ledger.advance(&self.spec, self.now);
                let left = UpstreamRemaining {
                    reset_in: Some(Duration::from_micros(20 * self.unit)),
                    steady: true,
                    refused,
                    ..UpstreamRemaining::new(self.spec.quota().limits()[0], units)
                };
                self.ledger.see(&self.spec, &left);
            }
        }
    }

    fn arrivals(&self) -> Vec<Arrival> {
        let way = self.way();
        let used = self.granted.iter().filter(|granted| granted.left > 0);
        used.map(|granted| {
            let units = u64::from(granted.left) * u64::from(granted.cost);
            (granted.arrival(way), units)
        })
        .collect()
    }
}

proptest! {
    #![proptest_config(histories::config(60))]

    /// Whenever each permit is used between its slot and its deadline.
    #[test]
    fn advance_bookings_never_exceed_a_limit(quota in quota(), steps in prop::collection::vec(step(), 1..80)) {
        let mut history = History::new(quota);
        for step in &steps {
            history.apply(step, false);
        }
        let broken = broken(&quota, &history.arrivals());
        prop_assert!(broken.is_none(), "{quota}: {}", broken.unwrap_or_default());
    }

    /// More bookings than the list holds, so that many join.
    #[test]
    fn joined_advance_bookings_never_exceed_a_limit(
        quota in quota(),
        earliest in prop::collection::vec((0u64..2000, 1u32..3), 130..300),
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let mut history = History::new(quota);
        for (earliest, cost) in earliest {
            let life = 10_000;
            history.apply(&Step::Book { cost, count: 1, earliest, patience: 30_000, life }, false);
        }
        for step in &steps {
            history.apply(step, false);
        }
        let broken = broken(&quota, &history.arrivals());
        prop_assert!(broken.is_none(), "{quota}: {}", broken.unwrap_or_default());
    }

    /// A refusal states the first slot, and leaves no trace.
    #[test]
    fn refusals_of_a_later_use_state_the_first_slot(
        quota in quota(),
        steps in prop::collection::vec(step(), 1..40),
        cost in 1u32..4,
        earliest in 0u64..150,
    ) {
        let mut history = History::new(quota);
        steps.iter().for_each(|step| history.apply(step, false));
        let order = Order {
            cost,
            count: 1,
            earliest: history.now + earliest * history.unit,
            latest: 0,
            life: 10_000,
            borrows: false,
        };
        let (grants, refused) = history.book(order);
        prop_assert!(grants.is_empty());
        let slot = refused.unwrap_err().slot;
        if slot == Micros::MAX {
            return Ok(());
        }
        prop_assert!(slot >= order.earliest);
        prop_assert_eq!(history.book(Order { latest: slot - 1, ..order }).1.unwrap_err().slot, slot);
        let (grants, booked) = history.book(Order { latest: slot, ..order });
        prop_assert_eq!((grants[0].slot, booked), (slot, Ok(())));
    }

    /// A permit that is given back before its slot leaves the ledger as if it had not been booked.
    #[test]
    fn erased_advance_bookings_leave_no_trace(
        quota in quota(),
        earliest in prop::collection::vec(2u64..600, 1..40),
        lights in prop::collection::vec((1u32..4, 0u64..300), 1..20),
    ) {
        let (mut with, mut without) = (History::new(quota), History::new(quota));
        for &earliest in &earliest {
            // Later than the first free slot and what is near to it.
            let earliest = with.now + earliest * with.unit + 10 * TOLERANCE;
            let order = Order { cost: 1, count: 1, earliest, latest: Micros::MAX, life: 10_000, borrows: false };
            for booking in with.book(order).0 {
                let back = UnusedPermits::new(booking.slot, booking.stamp, 1, 0);
                with.ledger.take_back(back);
            }
        }
        for (cost, earliest) in lights {
            let order = Order {
                cost,
                count: 1,
                earliest: with.now + earliest * with.unit,
                latest: Micros::MAX,
                life: 10_000,
                borrows: false,
            };
            prop_assert_eq!(with.book(order), without.book(order));
        }
    }

    /// Until the windows that a far booking touches, light requests get the slots that they would
    /// get without it.
    #[test]
    fn far_bookings_delay_only_the_windows_they_touch(
        count in 1u32..12,
        window in select(vec![100u64, 1000, 60_000]),
        far in prop::collection::vec(200u64..2000, 1..20),
        lights in prop::collection::vec((1u32..4, 0u64..40), 1..60),
    ) {
        let quota = Quota::new(count, millis(window));
        let (mut with, mut without) = (History::new(quota), History::new(quota));
        let window = millis(window).as_micros() as u64;
        let life = 10_000;
        let mut touched: Vec<(Micros, Micros)> = Vec::new();
        for earliest in far {
            let earliest = with.now + earliest * with.unit;
            let order = Order { cost: 1, count: 1, earliest, latest: Micros::MAX, life, borrows: false };
            for booking in with.book(order).0 {
                touched.push((booking.slot - window - life - SLACK, booking.stamp + window));
            }
        }
        touched.sort_unstable();
        for (cost, wait) in lights {
            let order = Order { cost, count: 1, earliest: 0, latest: Micros::MAX, life, borrows: false };
            for history in [&mut with, &mut without] {
                history.now += wait * history.unit;
            }
            let slot = |history: &mut History| history.book(order).0.first().map(|grant| grant.slot);
            let (late, plain) = (slot(&mut with), slot(&mut without));
            // From the first slot on that touches a window of a far booking, the two runs differ.
            if plain >= touched.first().map(|&(from, _)| from) {
                let end = touched.iter().scan(plain.unwrap_or(0), |at, &(from, until)| {
                    if from <= *at { *at = (*at).max(until); }
                    Some(*at)
                }).last();
                prop_assert!(late <= end, "{:?} is later than {:?}", late, end);
                break;
            }
            prop_assert_eq!(late, plain);
        }
    }

    /// A ledger that may be forgotten grants the same as a new one.
    #[test]
    fn ledgers_with_advance_bookings_are_kept(quota in quota(), steps in prop::collection::vec(step(), 1..40)) {
        let mut history = History::new(quota);
        steps.iter().for_each(|step| history.apply(step, false));
        let now = history.now.max(history.ledger.fresh_from());
        history.now = now;
        let mut fresh = History { now, ..History::new(quota) };
        let order = order(1, 100, now + 5_000_000, 10_000);
        prop_assert_eq!(history.book(order), fresh.book(order));
    }

    /// An order that is of use at once, or not later than its first free slot, books as without
    /// `earliest`.
    #[test]
    fn natural_slots_are_those_of_the_plain_rule(
        quota in quota(),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let (mut plain, mut other) = (History::new(quota), History::new(quota));
        for step in &steps {
            plain.apply(step, true);
            if let &Step::Book { cost, count, patience, life, .. } = step {
                // The permits are of use from their first free slot on.
                let latest = other.now + patience * other.unit;
                let asked = Order { cost, count, earliest: 0, latest: 0, life, borrows: false };
                let earliest = other.book(asked).1.unwrap_err().slot;
                let order = Order { earliest, latest, ..asked };
                for booking in other.book(order).0 {
                    other.note(booking, cost);
                }
            } else if !matches!(step, Step::GiveBack { .. }) {
                other.apply(step, true);
            }
            if matches!(step, Step::GiveBack { .. }) {
                break;
            }
        }
        let slots = |history: &History| -> Vec<Micros> {
            let each = history.granted.iter();
            each.flat_map(|granted| std::iter::repeat_n(granted.booking.slot, granted.booking.count as usize))
                .collect()
        };
        prop_assert_eq!(slots(&plain), slots(&other));
    }
}

/// One request waits 15 s for another key. Meanwhile, light requests use the whole limit.
#[test]
fn a_plentiful_key_is_not_blocked_by_a_far_booking() {
    for quota in [
        Quota::per_second(10),
        Quota::bucket(10).refill(10, millis(1000)),
        Quota::fixed(10, millis(1000)),
        Quota::per_second(10).and(Quota::bucket(10).refill(20, millis(1000))),
    ] {
        let granted = |far: &[u64]| {
            let mut history = History::new(quota);
            for seconds in far {
                let earliest = history.now + seconds * 1_000_000;
                let order = Order {
                    earliest,
                    ..order(1, 5, Micros::MAX, 10_000)
                };
                let (grants, booked) = history.book(order);
                assert_eq!(booked, Ok(()));
                assert!(grants[0].slot < earliest + 100_000, "{quota}: {grants:?}");
            }
            let (grants, _) = history.book(order(1, 200, START + 14_000_000, 10_000));
            grants.iter().map(|grant| grant.count).sum::<u32>()
        };
        let (with, without) = (granted(&[15, 16, 17, 18]), granted(&[]));
        assert_eq!(with, without, "{quota}");
    }
}

/// A request that is delayed by a far booking goes behind it, and leaves the time before free.
#[test]
fn a_bucket_has_room_before_a_delayed_request() {
    let mut history = History::new(Quota::bucket(4).refill(4, millis(1000)));
    let far = Order {
        earliest: START + 3_000_000,
        ..order(4, 1, Micros::MAX, 10_000)
    };
    let slot = |history: &mut History, order: Order| history.book(order).0[0].slot - START;
    assert_eq!(slot(&mut history, far), 3_000_000);
    let all = order(4, 1, Micros::MAX, 10_000);
    assert_eq!(slot(&mut history, all), 0);
    assert_eq!(slot(&mut history, all), 1_020_000);
    assert_eq!(slot(&mut history, all), 4_020_000, "behind the far booking");
    let one = order(1, 1, Micros::MAX, 10_000);
    assert_eq!(slot(&mut history, one), 1_290_000, "before it");
}

/// A list of joined bookings does not grow, and erases what it surely has.
#[test]
fn advance_bookings_are_bounded() {
    let mut advance = AdvanceBookings::default();
    for number in 0..10_000u64 {
        assert!(advance.add(number * 1000, number * 1000 + 20_000, 1, Micros::MAX));
    }
    assert_eq!(advance.as_slice().len(), 256);
    let units = |advance: &AdvanceBookings| -> u64 {
        advance.as_slice().iter().map(|booking| booking.units).sum()
    };
    assert_eq!(units(&advance), 10_000);
    let unused = UnusedPermits::new(5_000_000, 5_020_000, 1, 0);
    assert_eq!(advance.erase(unused) + advance.erase_joined(unused), 1);
    assert_eq!(units(&advance), 9_999);
}

/// Bookings that would join over many fixed windows are refused instead.
#[test]
fn advance_bookings_join_over_few_fixed_windows() {
    let mut history = History::new(Quota::fixed(5, millis(1000)));
    let mut booked = 0;
    for number in 0..300 {
        let earliest = START + number * 20_000_000;
        let order = Order {
            earliest,
            ..order(1, 1, Micros::MAX, 10_000)
        };
        booked += usize::from(history.book(order).1.is_ok());
    }
    assert!((256..=258).contains(&booked), "{booked}");
    // A request of use at once is not affected.
    assert_eq!(history.book(order(1, 2, Micros::MAX, 10_000)).1, Ok(()));
}
