use super::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The three moments of a hold, in milliseconds after the start of the test.
#[derive(Debug, PartialEq)]
struct Moments {
    end: u128,
    sure_until: u128,
    stored_until: u128,
}

fn moments(end: u128, sure_until: u128, stored_until: u128) -> Moments {
    Moments {
        end,
        sure_until,
        stored_until,
    }
}

struct World {
    start: Instant,
    hold: Hold,
}

impl World {
    /// The key was put on hold by this process at 0 ms for a second, and the store knows of it.
    fn held() -> Self {
        let start = clock::now();
        let mut hold = Hold::new(start);
        assert!(hold.adopt(HoldState::new(ms(1000), 0), HoldSource::Seen, start));
        assert!(!hold.answered(HoldState::new(ms(1000), 0), start, TimeBounds::at(start)));
        World { start, hold }
    }

    fn adopt(&mut self, held: HoldState, source: HoldSource, at: u64) -> bool {
        self.hold.adopt(held, source, self.start + ms(at))
    }

    /// The reply to a call sent at `sent` arrives 20 ms later.
    fn answered(&mut self, held: HoldState, sent: u64) -> bool {
        let sent = self.start + ms(sent);
        self.hold
            .answered(held, sent, TimeBounds::new(sent, sent + ms(20)))
    }

    fn moments(&self) -> Moments {
        let Hold {
            end,
            evidence:
                HoldEvidence {
                    sure_until,
                    stored_until,
                    ..
                },
            ..
        } = self.hold;
        let [end, sure_until, stored_until] =
            [end, sure_until, stored_until].map(|at| (at - self.start).as_millis());
        Moments {
            end,
            sure_until,
            stored_until,
        }
    }
}

#[test]
fn seen_holds_are_sure_and_published_ones_are_not() {
    for (source, sure_until) in [(HoldSource::Seen, 3100), (HoldSource::Published, 1000)] {
        let mut world = World::held();
        assert!(world.adopt(HoldState::new(ms(3000), 0), source, 100));
        assert_eq!(
            world.moments(),
            moments(3100, sure_until, 1000),
            "{source:?}"
        );
        assert!(
            !world.adopt(HoldState::new(ms(500), 0), source, 200),
            "it is shorter"
        );
        assert_eq!(
            world.moments(),
            moments(3100, sure_until, 1000),
            "{source:?}"
        );
    }
}

#[test]
fn releases_end_holds_from_before_them() {
    for (source, sure_until) in [(HoldSource::Seen, 150), (HoldSource::Published, 100)] {
        let mut world = World::held();
        assert!(world.adopt(HoldState::new(ms(50), 1), source, 100));
        assert_eq!(
            world.moments(),
            moments(150, sure_until, 1000),
            "{source:?}"
        );
        assert!(
            !world.adopt(HoldState::new(ms(9000), 0), source, 110),
            "it is over"
        );
        assert!(
            world.answered(HoldState::new(ms(9000), 0), 99),
            "it was sent before the release"
        );
        assert!(
            !world.answered(HoldState::new(ms(9000), 0), 100),
            "the store has lost the release"
        );
        assert_eq!(
            world.moments(),
            moments(150, sure_until, 1000),
            "{source:?}"
        );
    }
}

#[test]
fn ends_a_round_trip_apart_are_one_end() {
    let mut world = World::held();
    assert!(!world.adopt(HoldState::new(ms(905), 0), HoldSource::Published, 100));
    assert_eq!(world.moments(), moments(1000, 1000, 1000));
    assert!(world.adopt(HoldState::new(ms(906), 0), HoldSource::Published, 100));
    assert_eq!(world.moments(), moments(1006, 1000, 1000));
}

#[test]
fn replies_with_more_releases_replace_the_hold() {
    let mut world = World::held();
    assert!(!world.answered(HoldState::new(ms(100), 1), 200));
    assert_eq!(world.moments(), moments(320, 300, 320));
    assert!(!world.answered(HoldState::new(Duration::ZERO, 2), 230));
    assert_eq!(world.moments(), moments(230, 230, 230), "it is over");
}

#[test]
fn first_message_states_releases_from_before_the_hold() {
    for is_published in [false, true] {
        let start = clock::now();
        let mut world = World {
            start,
            hold: Hold::new(start),
        };
        assert!(world.adopt(HoldState::new(ms(1000), 0), HoldSource::Seen, 0));
        if is_published {
            assert!(!world.adopt(HoldState::new(ms(500), 3), HoldSource::Published, 10));
        } else {
            assert!(!world.answered(HoldState::new(Duration::ZERO, 3), 10));
        }
        assert_eq!(world.moments().end, 1000);
        assert!(world.adopt(HoldState::new(Duration::ZERO, 4), HoldSource::Published, 20));
        assert_eq!(world.moments().end, 20, "it is over");
    }
}

#[test]
fn replies_to_earlier_calls_only_lengthen_the_hold() {
    let mut world = World::held();
    assert!(world.adopt(HoldState::new(ms(2000), 0), HoldSource::Published, 100));
    assert!(!world.answered(HoldState::new(ms(910), 0), 90));
    assert_eq!(world.moments(), moments(2100, 1000, 1020));
    assert!(!world.answered(HoldState::new(ms(3000), 0), 90));
    assert_eq!(world.moments(), moments(3110, 3090, 3110));
}

#[test]
fn replies_shorten_what_was_only_published() {
    let mut world = World::held();
    assert!(world.adopt(HoldState::new(ms(2000), 0), HoldSource::Published, 100));
    assert!(!world.answered(HoldState::new(ms(890), 0), 110));
    assert_eq!(world.moments(), moments(1020, 1000, 1020));
}

#[test]
fn stores_that_lost_a_hold_do_not_end_it() {
    let mut world = World::held();
    assert!(!world.answered(HoldState::default(), 500));
    assert_eq!(world.moments(), moments(1000, 1000, 500));
    let sent = world.hold.for_store(false, world.start + ms(600));
    assert_eq!(sent, HoldState::new(ms(400), 0), "it is sent again");
    world.hold.store_lost_state(world.start + ms(700));
    assert_eq!(world.moments(), moments(1000, 1000, 700));
}

#[test]
fn stores_receive_only_what_is_sure_and_new() {
    let mut world = World::held();
    let at = world.start + ms(100);
    assert_eq!(world.hold.for_store(false, at), HoldState::default());
    assert_eq!(world.hold.for_store(true, at), HoldState::new(ms(900), 0));
    assert!(world.adopt(HoldState::new(ms(2000), 0), HoldSource::Published, 100));
    assert_eq!(
        world.hold.for_store(false, at),
        HoldState::default(),
        "it was only published"
    );
    assert!(world.adopt(HoldState::new(ms(3000), 0), HoldSource::Seen, 100));
    assert_eq!(world.hold.for_store(false, at), HoldState::new(ms(3000), 0));
}

#[test]
fn a_hold_that_an_early_call_lengthens_is_cut_as_the_store_says() {
    let mut world = World::held();
    assert!(world.adopt(HoldState::new(ms(2000), 0), HoldSource::Seen, 100));
    let longer = HoldState {
        cut: true,
        ..HoldState::new(ms(3000), 0)
    };
    assert!(!world.answered(longer, 50), "nothing was released");
    let end = world.hold.end();
    assert!(end >= world.start + ms(3000));
    assert_eq!(world.hold.passage(ms(60_000), end), Passage::Probe);
}

#[test]
fn cut_holds_end_on_probation() {
    let mut world = World::held();
    let cut = HoldState {
        cut: true,
        ..HoldState::new(ms(3000), 0)
    };
    assert!(world.adopt(cut, HoldSource::Seen, 0));
    let (early, end) = (world.start + ms(2999), world.start + ms(3000));
    assert!(
        !world.hold.accepted(None, early),
        "it was sent before the end"
    );
    assert_eq!(world.hold.passage(ms(60_000), end), Passage::Probe);
    assert!(world.hold.accepted(None, end));
    assert_eq!(world.hold.passage(ms(60_000), end), Passage::Open);
}
