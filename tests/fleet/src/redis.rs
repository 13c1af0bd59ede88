//! What the store costs: the calls that Redis counted, and the keys that never expire.

use redis_server::RedisServer;

/// Returns how many script calls the server has answered since it started. Failed calls do not
/// count: the first call by hash fails until the script is loaded, and is repeated.
pub fn store_calls(server: &RedisServer) -> u64 {
    let stats: String = server.command(&["INFO", "commandstats"]);
    let calls = |line: &str| -> Option<u64> {
        let (command, figures) = line.strip_prefix("cmdstat_")?.split_once(':')?;
        let scripts = [
            "eval",
            "evalsha",
            "eval_ro",
            "evalsha_ro",
            "fcall",
            "fcall_ro",
        ];
        let figure = |name: &str| -> Option<u64> {
            figures
                .split(',')
                .find_map(|figure| figure.strip_prefix(name))?
                .parse()
                .ok()
        };
        let answered =
            figure("calls=")?.saturating_sub(figure("failed_calls=").unwrap_or_default());
        scripts.contains(&command).then_some(answered)
    };
    stats.lines().filter_map(calls).sum()
}

/// Returns how many keys are in the server, and how many of them have no time to live.
///
/// # Panics
///
/// If the server does not answer.
pub fn keys_for_ever(server: &RedisServer) -> (usize, usize) {
    let keys: Vec<Vec<u8>> = server.command(&["KEYS", "*"]);
    let mut redis = server.connect().expect("the server answers");
    let mut life = |key: &Vec<u8>| -> i64 {
        redis::cmd("PTTL")
            .arg(key.as_slice())
            .query(&mut redis)
            .expect("the server answers")
    };
    // For a key that expired meanwhile, the server returns -2.
    (
        keys.len(),
        keys.iter().filter(|key| life(key) == -1).count(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_without_a_time_to_live_is_found() {
        let server = RedisServer::start().unwrap();
        let () = server.command(&["SET", "a", "1", "EX", "100"]);
        assert_eq!(keys_for_ever(&server), (1, 0));
        let () = server.command(&["SET", "b", "1"]);
        assert_eq!(keys_for_ever(&server), (2, 1));
    }

    #[test]
    fn scripts_are_counted_and_nothing_else() {
        let server = RedisServer::start().unwrap();
        assert_eq!(store_calls(&server), 0);
        for _ in 0..3 {
            let () = server.command(&["EVAL", "redis.call('SET', 'a', '1')", "0"]);
        }
        let () = server.command(&["SET", "a", "1"]);
        let mut redis = server.connect().unwrap();
        let unknown = redis::cmd("EVALSHA")
            .arg("0".repeat(40))
            .arg(0)
            .exec(&mut redis);
        assert!(unknown.is_err());
        assert_eq!(store_calls(&server), 3);
    }
}
