//! What one decision costs the Redis server, beside the scripts that others run: by the server's own count
//! (`INFO commandstats`), in interleaved rounds, fifty keys at a time on one connection.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use redis_server::RedisServer;
use tollgate::store::RedisStore;
use tollgate::{Key, Limiter, OnStoreError, Quota, RateLimitLayer};

/// GCRA with a burst, as most libraries run it: one number, `TIME`, `GET`, `SET`. Not exact: up to twice the limit.
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

/// The moments of the last grants in a list: exact, and as long as the limit is large.
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

/// Decisions a round, so that each key has its turn twice.
const CALLS: usize = 2 * KEYS;

/// One of those compared: makes so many decisions.
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
    let medians: Vec<f64> = prices.iter_mut().map(|prices| median(&mut prices[1..])).collect();
    for (contender, median) in contenders.iter().zip(&medians) {
        println!("| {} | {median:.1} | {:.2} |", contender.name, median / medians[0]);
    }
}

fn contenders(server: &RedisServer) -> Vec<Contender> {
    let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3600));
    // Fewer than fifty, so that nothing is fetched ahead; more than each key is asked for.
    let plenty = Quota::new(49, hour);
    vec![
        script(server, "GCRA with a burst (not exact), grants", GCRA, &["1", "100000000"]),
        script(server, "GCRA, refuses", GCRA, &["100000000", "100000000"]),
        script(server, "list of grants (exact), grants", RING, &["100", "1"]),
        script(server, "list of grants, refuses", RING, &["1", "3600000000"]),
        tollgate(server, "tollgate (exact), one window, grants", plenty),
        tollgate(server, "tollgate, refuses", Quota::new(1, hour)),
        tollgate(server, "tollgate, two windows, grants", plenty.and(Quota::new(49, 24 * hour))),
        tollgate(server, "tollgate, two windows, refuses", Quota::new(1, hour).and(Quota::new(2, 2 * hour))),
        tollgate(server, "tollgate, a bucket, grants", Quota::bucket(49).refill(49, second)),
    ]
}

fn script(server: &RedisServer, name: &'static str, text: &str, arguments: &'static [&str]) -> Contender {
    let redis = std::cell::RefCell::new(server.connect().expect("the server is there"));
    let script = redis::Script::new(text);
    script.prepare_invoke().load(&mut *redis.borrow_mut()).expect("the server takes a script");
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
            let _: Vec<(i64, i64)> = pipeline.query(&mut *redis.borrow_mut()).expect("the server answers");
        }
    };
    Contender { name, decide: Box::new(decide) }
}

fn tollgate(server: &RedisServer, name: &'static str, quota: Quota) -> Contender {
    let prefix = name.replace(|other: char| !other.is_ascii_alphanumeric(), "-");
    let store =
        RedisStore::builder(&server.url()).prefix(prefix).store_timeout(Duration::from_secs(5)).build();
    // A process that would let requests pass while the store is away asks for each of them; others keep a refusal for a while.
    let layer = RateLimitLayer::builder(quota).on_store_error(OnStoreError::FailOpen);
    let layer = layer.store(Arc::new(store.expect("a good URL")));
    let limiter: Limiter = layer.max_wait(Duration::ZERO).build().expect("a good quota").limiter();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let decide = move |calls| {
        runtime.block_on(async {
            for batch in (0..calls).collect::<Vec<_>>().chunks(AT_ONCE) {
                let key = |number: &usize| Key::new((number % KEYS).to_le_bytes());
                join_all(batch.iter().map(|number| limiter.acquire(key(number)))).await;
            }
        });
    };
    Contender { name, decide: Box::new(decide) }
}

fn micros_a_call(server: &RedisServer) -> f64 {
    let stats: String = server.command(&["INFO", "commandstats"]);
    let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:"));
    let price = line.and_then(|line| line.split("usec_per_call=").nth(1)?.split(',').next()?.parse().ok());
    price.expect("the server counts its calls")
}

fn median(prices: &mut [f64]) -> f64 {
    prices.sort_by(f64::total_cmp);
    prices[prices.len() / 2]
}
