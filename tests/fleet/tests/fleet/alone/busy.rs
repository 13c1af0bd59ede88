//! Slots far apart, on a machine whose cores are busy with other things.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use fleet::Options;
use upstream::Rule;

use super::*;

/// The life of a permit, for one slot a second.
const LIFE: Duration = ms(20);

/// Three busy loops for each core, which run until this is dropped.
struct Busy {
    stops: Arc<AtomicBool>,
    loops: Vec<thread::JoinHandle<()>>,
}

impl Busy {
    fn start() -> Busy {
        let stops = Arc::new(AtomicBool::new(false));
        let cores = thread::available_parallelism().unwrap().get();
        let spin = |stops: Arc<AtomicBool>| {
            move || {
                while !stops.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
        };
        let loops = (0..3 * cores)
            .map(|_| thread::spawn(spin(stops.clone())))
            .collect();
        Busy { stops, loops }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
        self.loops.drain(..).for_each(|spins| drop(spins.join()));
    }
}

/// By then all processes wait for a slot.
const ALL_WAIT: Duration = ms(3000);

/// On a calm machine only: `./.ci/run`.
mod calm {
    use super::*;

    /// A permit lives for a fiftieth of the time between two slots, which is enough to wake up in. Each
    /// process has fetched what it needs from the store before its slot.
    #[test]
    fn one_a_second_is_used_on_a_busy_machine() {
        let _turn = turn();
        let look = || {
            let site = Site::new();
            let options = Options {
                quota: "1/1s".into(),
                store_timeout: ms(2000),
                span: usual_or(ms(16_000), ms(24_000)),
                max_wait: ms(60_000),
                ..Options::default()
            };
            let mut fleet = site.start(10, &options);
            let start = Instant::now();
            fleet.go();
            let busy_from = wait_until(start, ALL_WAIT);
            let busy = Busy::start();
            let reports = fleet.finish();
            drop(busy);
            assert_all_ended(&reports);
            let log = site.upstream.log();
            assert_never_over(&log, &"1/1s".parse().unwrap());
            let busy = part(&log, busy_from, start + options.span);
            let used = |window| 100.0 * busy.used(Rule::new(1, window)).unwrap_or_default();
            let (of_slots, of_limit) = (used(ms(1000) + SLACK + LIFE), used(ms(1000)));
            println!(
                "{} calls: {of_slots:.1} % of the slots, {of_limit:.1} % of the limit",
                busy.len()
            );
            of_slots >= 89.0
        };
        // A thread that wakes 20 ms late loses its slot, one of about thirteen.
        assert!((0..3).any(|_| look()), "three times in a row");
    }
}
