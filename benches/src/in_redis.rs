//! The cost of one decision in the Redis server, for the scripts of tollgate and of other limiters.
//! The server's own count (`INFO commandstats`) is used, in interleaved rounds, with fifty keys at
//! a time on one connection.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use redis_server::RedisServer;
use tollgate::limiter::Acquire;
use tollgate::store::{
    Charge, Demand, Lease, LeaseRequest, LimitSpec, PeekRequest, RedisStore, Store, StoreError,
    StoreReply, UnusedPermits, Usage,
};
use tollgate::{Key, Limited, Limiter, OnStoreError, Quota, RateLimitLayer};

/// GCRA with a burst, as most libraries run it: one number, `TIME`, `GET`, `SET`. It is not exact:
/// it allows up to twice the limit.
const GCRA: &str = r#"
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local full = tonumber(redis.call('GET', KEYS[1]) or 0)
if full < now then full = now end
local next_full = full + tonumber(ARGV[1])
local wait = next_full - tonumber(ARGV[2]) - now
if wait > 0 then return {0, wait} end
redis.call('SET', KEYS[1], string.format('%.0f', next_full), 'PX', math.ceil((next_full - now) / 1000) + 1000)
return {1, 0}
"#;

/// A list of the last grants: exact, and as long as the limit is large.
const RING: &str = r#"
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local limit, window = tonumber(ARGV[1]), tonumber(ARGV[2])
if redis.call('LLEN', KEYS[1]) >= limit then
  local oldest = tonumber(redis.call('LINDEX', KEYS[1], 0))
  if oldest + window > now then return {0, oldest + window - now} end
  redis.call('LPOP', KEYS[1])
end
redis.call('RPUSH', KEYS[1], string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(window / 1000) + 1000)
return {1, 0}
"#;

const ROUNDS: usize = 9;
const KEYS: usize = 1000;
const AT_ONCE: usize = 50;

/// Decisions a round: each key has two.
const CALLS: usize = 2 * KEYS;

/// A compared limiter. `decide` makes the given number of decisions.
struct Contender {
    name: &'static str,
    decide: Box<dyn Fn(usize)>,
}

/// Prints the table.
pub(crate) fn report() {
    let server = match RedisServer::start() {
        Ok(server) => server,
        Err(error) => {
            println!("In Redis: not measured ({error}).");
            return;
        }
    };
    let contenders = contenders(&server);
    let mut prices = vec![Vec::new(); contenders.len()];
    for _ in 0..=ROUNDS {
        for (contender, prices) in contenders.iter().zip(&mut prices) {
            let () = server.command(&["CONFIG", "RESETSTAT"]);
            (contender.decide)(CALLS);
            prices.push(micros_a_call(&server));
        }
    }
    println!(
        "One decision in Redis, microseconds of the server by its own count, medians of {ROUNDS} rounds:\n"
    );
    println!("| script | us | to GCRA |\n|---|--:|--:|");
    let medians: Vec<f64> = prices
        .iter_mut()
        .map(|prices| median(&mut prices[1..]))
        .collect();
    for (contender, median) in contenders.iter().zip(&medians) {
        println!(
            "| {} | {median:.1} | {:.2} |",
            contender.name,
            median / medians[0]
        );
    }
    largest(&server);
}

// ── the largest calls ────────────────────────────────────────────────────────────────────────────

/// How long one call may keep a server busy; all other callers wait meanwhile.
const LONGEST_CALL: Duration = Duration::from_millis(10);

/// The most permits that a gate requests in one call, and the most that the script grants.
const MOST_ASKED: u32 = 500;
const MOST_PERMITS: u32 = 2000;
/// The most demands of a call of the gate.
const MOST_DEMANDS: u32 = 64;

/// A request that replaces the request of the gate.
#[derive(Clone, Copy)]
enum Instead {
    /// A call with the largest number of charges.
    Charges,
    /// This number of permits, each of which may leave right after the one before.
    Permits(u32),
    /// The most demands, each for one permit that is of use later than that of the one before. They
    /// are between those of the calls before.
    Later,
    /// The same, but a permit that is used now has to count with many of them.
    Reach,
}

/// A store that replaces each call by a large one, and then reports that the response was lost.
struct Large {
    store: RedisStore,
    instead: Instead,
}

impl Store for Large {
    fn lease(&self, ask: LeaseRequest<'_>) -> StoreReply<Lease> {
        let longest = ask.spec.quota().limits()[0].window();
        // One charge in each part of the window, the oldest first, of more units than a permit.
        let age = |part: usize| {
            longest * u32::try_from(Charge::MOST - part).unwrap_or(1) / Charge::MOST as u32
        };
        let charges: Vec<Charge> = (0..Charge::MOST)
            .map(|part| Charge::new(age(part), 1000))
            .collect();
        let (permits, later): (_, Vec<Demand>);
        let mut ask = ask;
        (ask.demands, ask.prefetch) = (&[], 0);
        match self.instead {
            Instead::Charges => ask.charges = &charges,
            Instead::Permits(count) => {
                permits = [Demand::new(1, count)];
                (ask.demands, ask.latest) = (&permits, 1000 * longest);
            }
            Instead::Later | Instead::Reach => {
                let earliest = |demand| match self.instead {
                    Instead::Reach => longest / 2 + longest * demand / 45,
                    _ => longest * 2 + longest * demand / 7,
                };
                later = (0..MOST_DEMANDS)
                    .map(|demand| Demand::new(1, 1).earliest(earliest(demand)))
                    .collect();
                (ask.demands, ask.latest) = (&later, 1000 * longest);
            }
        }
        let StoreReply::Pending(answer) = self.store.lease(ask) else {
            return StoreReply::Ready(Err(StoreError::Lost));
        };
        StoreReply::Pending(Box::pin(async move {
            answer.await?;
            Err(StoreError::Lost)
        }))
    }

    fn give_back(&self, _: Key, _: &Arc<LimitSpec>, _: &[UnusedPermits]) {}

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        self.store.peek(request)
    }
}

/// Prints how long the largest calls keep the server busy.
fn largest(server: &RedisServer) {
    println!(
        "\nThe largest calls, milliseconds of the server by its own count, the longest of {ROUNDS} (to be below \
         {LONGEST_CALL:?}):\n"
    );
    println!(
        "| quota | {} charges | {MOST_ASKED} permits | {MOST_PERMITS} permits | {MOST_DEMANDS} of later use |\n\
         |---|--:|--:|--:|--:|",
        Charge::MOST
    );
    let (second, minute, hour) = (
        Duration::from_secs(1),
        Duration::from_secs(60),
        Duration::from_secs(3600),
    );
    for quota in [
        Quota::new(10, second),
        Quota::new(1000, second),
        Quota::new(5000, hour),
        Quota::per_minute(600).burst(20),
        Quota::per_day(1_000_000).burst(1000),
        Quota::fixed(600, minute),
        Quota::new(10, second)
            .and(Quota::new(300, minute))
            .and(Quota::new(5000, hour)),
    ] {
        let calls = [
            Instead::Charges,
            Instead::Permits(MOST_ASKED),
            Instead::Permits(MOST_PERMITS),
            Instead::Later,
        ];
        let [charges, asked, most, later] = calls.map(|instead| longest_of(server, quota, instead));
        println!("| {quota} | {charges:.2} | {asked:.2} | {most:.2} | {later:.2} |");
    }
}

/// Returns the longest of some calls of new keys, in milliseconds.
fn longest_of(server: &RedisServer, quota: Quota, instead: Instead) -> f64 {
    let store = RedisStore::builder(&server.url())
        .store_timeout(Duration::from_secs(30))
        .build();
    let store = Large {
        store: store.expect("a good URL"),
        instead,
    };
    let layer = RateLimitLayer::builder(quota)
        .store(Arc::new(store))
        .max_wait(Duration::ZERO);
    let limiter = layer.build().expect("a good quota").limiter();
    let runtime = runtime();
    let longest = (0..ROUNDS).map(|round| {
        // The list of advance bookings fills up over the calls for one key.
        let key = match instead {
            Instead::Later | Instead::Reach => Key::new(format!("{quota} later")),
            _ => Key::new(format!("{quota} {round}")),
        };
        let () = server.command(&["CONFIG", "RESETSTAT"]);
        let lost = runtime.block_on(limiter.acquire(key));
        assert!(
            matches!(
                lost,
                Err(Limited::Store {
                    source: StoreError::Lost,
                    ..
                })
            ),
            "the server answers: {lost:?}"
        );
        micros_a_call(server) / 1000.0
    });
    longest.fold(0.0, f64::max)
}

fn contenders(server: &RedisServer) -> Vec<Contender> {
    let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3600));
    // Fewer than fifty, so that nothing is fetched ahead, and more than the decisions for each key.
    let plenty = Quota::new(49, hour);
    vec![
        script(
            server,
            "GCRA with a burst (not exact), grants",
            GCRA,
            &["1", "100000000"],
        ),
        script(server, "GCRA, refuses", GCRA, &["100000000", "100000000"]),
        script(
            server,
            "list of grants (exact), grants",
            RING,
            &["100", "1"],
        ),
        script(
            server,
            "list of grants, refuses",
            RING,
            &["1", "3600000000"],
        ),
        tollgate(server, "tollgate (exact), one window, grants", plenty),
        tollgate(server, "tollgate, refuses", Quota::new(1, hour)),
        tollgate(
            server,
            "tollgate, two windows, grants",
            plenty.and(Quota::new(49, 24 * hour)),
        ),
        tollgate(
            server,
            "tollgate, two windows, refuses",
            Quota::new(1, hour).and(Quota::new(2, 2 * hour)),
        ),
        tollgate(
            server,
            "tollgate, a bucket, grants",
            Quota::bucket(49).refill(49, second),
        ),
        with_set_quota(
            server,
            "tollgate, a set quota, grants",
            plenty,
            Quota::new(49, 2 * hour),
        ),
        joint(server, "tollgate, two keys, grants", &[plenty, plenty]),
        joint(
            server,
            "tollgate, two keys, refuses",
            &[plenty, Quota::new(1, hour)],
        ),
        joint(server, "tollgate, four keys, grants", &[plenty; 4]),
        {
            let name = "tollgate, two keys with 64 advance bookings in reach";
            let quota = Quota::new(50, hour);
            let store = store(server, name);
            for_each_key(Large {
                store,
                instead: Instead::Reach,
            });
            joint(server, name, &[quota, quota])
        },
    ]
}

/// Returns a store whose keys no other contender has.
fn store(server: &RedisServer, name: &str) -> RedisStore {
    let prefix = name.replace(|other: char| !other.is_ascii_alphanumeric(), "-");
    RedisStore::builder(&server.url())
        .prefix(prefix)
        .store_timeout(Duration::from_secs(5))
        .build()
        .expect("a good URL")
}

/// Returns a limiter that calls the store for each request. A process that fails open does; others
/// cache a refusal for a while.
fn limiter(store: Arc<dyn Store>, quota: Quota) -> Limiter {
    let layer = RateLimitLayer::builder(quota)
        .on_store_error(OnStoreError::FailOpen)
        .store(store)
        .max_wait(Duration::ZERO);
    layer.build().expect("a good quota").limiter()
}

fn script(
    server: &RedisServer,
    name: &'static str,
    text: &str,
    arguments: &'static [&str],
) -> Contender {
    let redis = std::cell::RefCell::new(server.connect().expect("the server is there"));
    let script = redis::Script::new(text);
    script
        .prepare_invoke()
        .load(&mut *redis.borrow_mut())
        .expect("the server takes a script");
    let hash = script.get_hash().to_owned();
    let decide = move |calls| {
        for batch in (0..calls).collect::<Vec<_>>().chunks(AT_ONCE) {
            let mut pipeline = redis::pipe();
            for number in batch {
                pipeline
                    .cmd("EVALSHA")
                    .arg(&hash)
                    .arg(1)
                    .arg(format!("{name} {}", number % KEYS))
                    .arg(arguments);
            }
            let _: Vec<(i64, i64)> = pipeline
                .query(&mut *redis.borrow_mut())
                .expect("the server answers");
        }
    };
    Contender {
        name,
        decide: Box::new(decide),
    }
}

fn tollgate(server: &RedisServer, name: &'static str, quota: Quota) -> Contender {
    let limiter = limiter(Arc::new(store(server, name)), quota);
    decides(name, move |number| limiter.acquire(key(number, 0)))
}

/// The same, after a quota was set for each key.
fn with_set_quota(server: &RedisServer, name: &'static str, own: Quota, set: Quota) -> Contender {
    let limiter = limiter(Arc::new(store(server, name)), own);
    runtime().block_on(async {
        for number in 0..KEYS {
            let set = limiter.set_quota(key(number, 0), set);
            set.await.expect("the server answers");
        }
    });
    decides(name, move |number| limiter.acquire(key(number, 0)))
}

/// Requests of several keys, with a quota each.
fn joint(server: &RedisServer, name: &'static str, quotas: &[Quota]) -> Contender {
    let store = Arc::new(store(server, name));
    let limiters: Vec<Limiter> = quotas
        .iter()
        .map(|quota| limiter(store.clone(), *quota))
        .collect();
    decides(name, move |number| {
        let parts = limiters.iter().enumerate();
        let mut parts = parts.map(|(part, limiter)| limiter.acquire(key(number, part)));
        let first = parts.next().expect("a quota");
        parts.fold(first, Acquire::and)
    })
}

/// Returns the key of part `part` of decision `number`.
fn key(number: usize, part: usize) -> Key {
    Key::new((number % KEYS).to_le_bytes()).and(part.to_le_bytes())
}

/// Calls a store for two keys of each decision, once. The outcome does not matter.
fn for_each_key(store: Large) {
    let limiter = limiter(Arc::new(store), Quota::new(50, Duration::from_secs(3600)));
    let runtime = runtime();
    for number in 0..KEYS {
        for part in 0..2 {
            let _ = runtime.block_on(limiter.acquire(key(number, part)));
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime")
}

fn decides(name: &'static str, acquire: impl Fn(usize) -> Acquire + 'static) -> Contender {
    let runtime = runtime();
    let decide = move |calls| {
        runtime.block_on(async {
            for batch in (0..calls).collect::<Vec<_>>().chunks(AT_ONCE) {
                join_all(batch.iter().map(|number| acquire(*number))).await;
            }
        });
    };
    Contender {
        name,
        decide: Box::new(decide),
    }
}

fn micros_a_call(server: &RedisServer) -> f64 {
    let stats: String = server.command(&["INFO", "commandstats"]);
    let line = stats
        .lines()
        .find(|line| line.starts_with("cmdstat_evalsha:"));
    let price = line.and_then(|line| {
        line.split("usec_per_call=")
            .nth(1)?
            .split(',')
            .next()?
            .parse()
            .ok()
    });
    price.expect("the server counts its calls")
}

fn median(prices: &mut [f64]) -> f64 {
    prices.sort_by(f64::total_cmp);
    prices[prices.len() / 2]
}
