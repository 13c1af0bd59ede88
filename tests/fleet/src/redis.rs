//! What the store cost: the calls that Redis counted.

use redis_server::RedisServer;

/// How many script calls the server has answered since it started.
pub fn store_calls(server: &RedisServer) -> u64 {
    let stats: String = server.command(&["INFO", "commandstats"]);
    let calls = |line: &str| -> Option<u64> {
        let (command, figures) = line.strip_prefix("cmdstat_")?.split_once(':')?;
        let scripts = ["eval", "evalsha", "eval_ro", "evalsha_ro", "fcall", "fcall_ro"];
        let calls = figures.split(',').find_map(|figure| figure.strip_prefix("calls="))?;
        scripts.contains(&command).then(|| calls.parse().ok())?
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
        assert_eq!(store_calls(&server), 3);
    }
}
