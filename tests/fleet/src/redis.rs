//! What the store cost: the calls that Redis counted.

use redis_server::RedisServer;

/// How many script calls the server has answered since it started; those that failed, as all do at first that know a
/// script by its hash, are made again and do not count.
pub fn store_calls(server: &RedisServer) -> u64 {
    let stats: String = server.command(&["INFO", "commandstats"]);
    let calls = |line: &str| -> Option<u64> {
        let (command, figures) = line.strip_prefix("cmdstat_")?.split_once(':')?;
        let scripts = ["eval", "evalsha", "eval_ro", "evalsha_ro", "fcall", "fcall_ro"];
        let figure = |name: &str| -> Option<u64> {
            figures.split(',').find_map(|figure| figure.strip_prefix(name))?.parse().ok()
        };
        let answered = figure("calls=")?.saturating_sub(figure("failed_calls=").unwrap_or_default());
        scripts.contains(&command).then_some(answered)
    };
    stats.lines().filter_map(calls).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_counted_and_nothing_else() {
        let server = RedisServer::start().unwrap();
        assert_eq!(store_calls(&server), 0);
        for _ in 0..3 {
            let () = server.command(&["EVAL", "redis.call('SET', 'a', '1')", "0"]);
        }
        let () = server.command(&["SET", "a", "1"]);
        let mut redis = server.connect().unwrap();
        let unknown = redis::cmd("EVALSHA").arg("0".repeat(40)).arg(0).exec(&mut redis);
        assert!(unknown.is_err());
        assert_eq!(store_calls(&server), 3);
    }
}
