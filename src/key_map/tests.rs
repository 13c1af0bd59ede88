//! The map keeps its bounds, forgets in order, and gives back memory.

use super::*;

/// State with the moments from which it is idle (`None`: in use) and useless.
struct Until(Option<u32>, u32);

impl Evict for Until {
    type Now = u32;

    fn idle_from(&self) -> Option<u32> {
        self.0
    }

    fn worthless_from(&self) -> Option<u32> {
        self.0.map(|idle| idle.max(self.1))
    }
}

fn key(number: u32) -> Key {
    Key::new(number.to_le_bytes())
}

fn enter(keyed: &KeyMap<Until>, number: u32, now: u32, state: Until) -> Result<Vec<Key>, Full> {
    let mut gone = Vec::new();
    keyed
        .enter(key(number), now, || state, |key, _| gone.push(key), |_| ())
        .map(|()| gone)
}

fn len(keyed: &KeyMap<Until>) -> usize {
    let len = keyed
        .shards
        .iter()
        .map(|shard| lock(shard).table.len())
        .sum();
    assert_eq!(keyed.len.load(Ordering::Relaxed), len, "the count is right");
    len
}

fn room(keyed: &KeyMap<Until>) -> usize {
    keyed
        .shards
        .iter()
        .map(|shard| lock(shard).table.capacity())
        .sum()
}

#[test]
fn worthless_keys_are_forgotten_and_keys_in_use_never() {
    let keyed = KeyMap::new(100_000);
    let mut gone = 0;
    for number in 0..100_000 {
        let until = if number % 100 == 0 {
            None
        } else {
            Some(number + 1000)
        };
        gone += enter(&keyed, number, number, Until(until, 0))
            .unwrap()
            .len();
    }
    let left = len(&keyed);
    assert_eq!(left + gone, 100_000);
    assert!(
        left < 1000 + 1000 + 1000,
        "a thousand in use, a thousand alive, and {left} in all"
    );
    for number in (0..100_000).step_by(100) {
        assert!(
            keyed.find(key(number), |_| ()).is_some(),
            "{number} is in use"
        );
    }
}

#[test]
fn full_map_refuses_new_keys_until_one_is_idle() {
    let keyed = KeyMap::new(3);
    for number in 0..3 {
        enter(&keyed, number, 0, Until(Some(100 + number), 0)).unwrap();
    }
    assert!(enter(&keyed, 9, 0, Until(None, 0)).is_err());
    assert!(
        enter(&keyed, 1, 0, Until(None, 0)).is_ok(),
        "a known key is not new"
    );
    assert!(enter(&keyed, 9, 99, Until(None, 0)).is_err());
    assert!(enter(&keyed, 9, 100, Until(None, 0)).is_ok());
    assert!(keyed.find(key(0), |_| ()).is_none());
    assert_eq!(len(&keyed), 3);
}

#[test]
fn max_keys_fit_at_once_and_not_one_more() {
    let keyed = KeyMap::new(20_000);
    for number in 0..20_000 {
        assert!(enter(&keyed, number, 0, Until(None, 0)).is_ok(), "{number}");
    }
    assert!(enter(&keyed, 20_000, 0, Until(None, 0)).is_err());
    assert_eq!(len(&keyed), 20_000);
}

/// Idle state stays while there is room; then the oldest state goes first, nearly.
#[test]
fn full_map_evicts_the_oldest_idle_state_first() {
    const MAX: u32 = 10_000;
    let keyed = KeyMap::new(MAX as usize);
    let idle = |number| Until(Some(number), number + 1_000_000);
    for number in 0..MAX {
        assert_eq!(
            enter(&keyed, number, number, idle(number)).unwrap(),
            [],
            "there is room"
        );
    }
    let mut gone = Vec::new();
    for number in MAX..MAX + MAX / 4 {
        let forgotten = enter(&keyed, number, number, idle(number)).unwrap();
        assert_eq!(forgotten.len(), 1, "one makes room for one");
        gone.extend(forgotten);
    }
    assert_eq!(len(&keyed), MAX as usize);
    let old = (0..MAX / 2)
        .filter(|number| gone.contains(&key(*number)))
        .count();
    assert!(
        old * 10 > gone.len() * 9,
        "{old} of {} were of the older half",
        gone.len()
    );
}

#[test]
fn concurrent_threads_keep_the_key_count() {
    const MAX: usize = 1000;
    let keyed = KeyMap::new(MAX);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let keyed = &keyed;
            scope.spawn(move || {
                for number in 0..20_000u32 {
                    // Two threads add each key at about the same time.
                    let key = number * 2 + thread % 2;
                    let _ = enter(keyed, key, number, Until(Some(number + 100), number + 1000));
                }
            });
        }
    });
    assert!(len(&keyed) <= MAX, "{} keys", len(&keyed));
}

#[test]
fn memory_is_given_back_when_most_keys_are_gone() {
    let keyed = KeyMap::new(100_000);
    for number in 0..100_000 {
        enter(&keyed, number, 0, Until(Some(10), 0)).unwrap();
    }
    assert!(room(&keyed) >= 100_000);
    for number in 0..200_000 {
        enter(&keyed, number, 100 + number, Until(Some(100 + number), 0)).unwrap();
    }
    assert!(len(&keyed) < 2_000, "{} keys", len(&keyed));
    assert!(room(&keyed) < 10_000, "room for {}", room(&keyed));
}

/// However long this continues, the fullest shard bounds the memory of every shard.
#[test]
fn short_lived_keys_do_not_grow_the_map() {
    let keyed = KeyMap::new(100_000);
    let mut most = (0, 0);
    for number in 0..400_000 {
        enter(&keyed, number, number, Until(Some(number + 200), 0)).unwrap();
        if number % 10_000 == 0 {
            most = most.max((len(&keyed), room(&keyed)));
        }
    }
    assert!(most.0 < 500, "{} keys, of which 200 are of use", most.0);
    assert!(
        room(&keyed) <= 14 * keyed.shards.len(),
        "room for {}",
        room(&keyed)
    );
}

/// A function of the user makes part of a state.
#[test]
fn a_state_that_panics_takes_no_room() {
    let keyed = KeyMap::new(1);
    let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let make = || -> Until { panic!("the user's function") };
        let _ = keyed.enter(key(1), 0, make, |_, _| (), |_| ());
    }));
    assert!(made.is_err());
    assert!(enter(&keyed, 2, 0, Until(None, 0)).is_ok());
    assert_eq!(len(&keyed), 1);
}
