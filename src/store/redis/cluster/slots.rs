//! Which server of a cluster has which key.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use redis::Value;

const SLOTS: u16 = 16384;

/// Returns the slot of `key`. If there is text between the first braces of the key, the slot is
/// that of this text.
pub(super) fn slot_of(key: &str) -> u16 {
    let between_braces = key
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .map(|(tag, _)| tag);
    let hashed = between_braces.filter(|tag| !tag.is_empty()).unwrap_or(key);
    crc16(hashed.as_bytes()) % SLOTS
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    let mut crc = 0;
    for byte in bytes {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            let carry = crc & 0x8000 != 0;
            crc = (crc << 1) ^ if carry { 0x1021 } else { 0 };
        }
    }
    crc
}

/// The host and the port of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::store::redis) struct Address {
    pub(in crate::store::redis) host: Arc<str>,
    pub(in crate::store::redis) port: u16,
}

impl Address {
    /// Reads `host:port`, as a server writes it into a redirection. If the text has no host, the
    /// host is that of the server that wrote it.
    pub(super) fn read(text: &str, written_by: &Address) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        Address::new(host, port.parse().ok()?, written_by)
    }

    fn new(host: &str, port: u16, written_by: &Address) -> Option<Self> {
        let host = match host {
            "" => written_by.host.clone(),
            // The server does not know the host.
            "?" => return None,
            host => host.into(),
        };
        Some(Address { host, port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// The known primary of each slot.
#[derive(Debug)]
pub(super) struct SlotMap {
    /// For each slot its primary.
    of_slot: Vec<Option<Address>>,
    /// All servers that were named, replicas included.
    servers: Vec<Address>,
}

impl SlotMap {
    pub(super) fn empty() -> Self {
        SlotMap {
            of_slot: vec![None; usize::from(SLOTS)],
            servers: Vec::new(),
        }
    }

    /// Reads the reply to `CLUSTER SLOTS`. Leaves out what it cannot understand.
    ///
    /// Each entry has the first and the last slot of a range, its primary and its replicas. A
    /// server begins with its host and its port.
    pub(super) fn read(reply: &Value, sent_by: &Address) -> Self {
        let mut map = SlotMap::empty();
        let Value::Array(ranges) = reply else {
            return map;
        };
        for range in ranges {
            let Value::Array(range) = range else { continue };
            let [Value::Int(first), Value::Int(last), servers @ ..] = &range[..] else {
                continue;
            };
            let servers: Vec<_> = servers
                .iter()
                .map(|server| read_server(server, sent_by))
                .collect();
            if let Some(Some(primary)) = servers.first() {
                for slot in (*first).max(0)..=(*last).min(i64::from(SLOTS) - 1) {
                    map.set_primary(slot as u16, primary);
                }
            }
            for server in servers.into_iter().flatten() {
                if !map.servers.contains(&server) {
                    map.servers.push(server);
                }
            }
        }
        map
    }

    pub(super) fn is_empty(&self) -> bool {
        self.of_slot.iter().all(Option::is_none)
    }

    pub(super) fn primary(&self, slot: u16) -> Option<&Address> {
        self.of_slot.get(usize::from(slot))?.as_ref()
    }

    pub(super) fn set_primary(&mut self, slot: u16, primary: &Address) {
        if let Some(of_slot) = self.of_slot.get_mut(usize::from(slot)) {
            *of_slot = Some(primary.clone());
        }
    }

    /// Returns the servers that have slots.
    pub(super) fn primaries(&self) -> HashSet<&Address> {
        self.of_slot.iter().flatten().collect()
    }

    pub(super) fn servers(&self) -> &[Address] {
        &self.servers
    }
}

fn read_server(server: &Value, sent_by: &Address) -> Option<Address> {
    let Value::Array(server) = server else {
        return None;
    };
    let [host, Value::Int(port), ..] = &server[..] else {
        return None;
    };
    let host = match host {
        Value::Nil => "",
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        Value::SimpleString(host) => host,
        _ => return None,
    };
    Address::new(host, u16::try_from(*port).ok()?, sent_by)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(host: &str, port: u16) -> Address {
        Address {
            host: host.into(),
            port,
        }
    }

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot_of("foo"), 12182);
        assert_eq!(slot_of("{user1000}.following"), slot_of("user1000"));
        assert_eq!(
            slot_of("foo{}{bar}"),
            crc16(b"foo{}{bar}") % SLOTS,
            "empty braces do not count"
        );
        assert_eq!(slot_of("foo{{bar}}zap"), slot_of("{bar"));
        assert_eq!(slot_of("foo{bar}{zap}"), slot_of("bar"));
    }

    #[test]
    fn redirections_name_a_server_with_or_without_its_host() {
        let by = address("10.0.0.1", 6379);
        assert_eq!(
            Address::read("10.0.0.2:6380", &by),
            Some(address("10.0.0.2", 6380))
        );
        assert_eq!(Address::read("::1:6380", &by), Some(address("::1", 6380)));
        assert_eq!(Address::read(":6380", &by), Some(address("10.0.0.1", 6380)));
        for nothing in [
            "",
            "?:6380",
            "10.0.0.2",
            "10.0.0.2:",
            "10.0.0.2:port",
            "10.0.0.2:65536",
        ] {
            assert_eq!(Address::read(nothing, &by), None, "{nothing}");
        }
        assert_eq!(address("::1", 1).to_string(), "[::1]:1");
    }

    #[test]
    fn slot_maps_leave_out_what_they_do_not_understand() {
        let text = |text: &str| Value::BulkString(text.into());
        let server = |host: Value, port| Value::Array(vec![host, Value::Int(port), text("id")]);
        let range = |first, last, servers: Vec<Value>| {
            Value::Array([vec![Value::Int(first), Value::Int(last)], servers].concat())
        };
        let reply = Value::Array(vec![
            range(0, 99, vec![server(text("a"), 1), server(text("b"), 2)]),
            range(100, 199, vec![server(Value::Nil, 3)]),
            range(200, 299, vec![server(text("?"), 4), server(text("c"), 5)]),
            range(16_383, i64::MAX, vec![server(text("a"), 1)]),
            range(300, 399, vec![server(text("a"), -1)]),
            range(i64::MIN, -1, vec![server(text("d"), 6)]),
            Value::Int(7),
            Value::Array(vec![text("odd")]),
        ]);
        let mut map = SlotMap::read(&reply, &address("seed", 9));
        let primary = |map: &SlotMap, slot| map.primary(slot).map(Address::to_string);
        assert_eq!(primary(&map, 99).as_deref(), Some("a:1"));
        assert_eq!(primary(&map, 100).as_deref(), Some("seed:3"));
        assert_eq!(primary(&map, 16_383).as_deref(), Some("a:1"));
        for unknown in [200, 399, 400, 16_384] {
            assert_eq!(primary(&map, unknown), None, "{unknown}");
        }
        assert_eq!(map.servers().len(), 5, "{:?}", map.servers());
        map.set_primary(400, &address("e", 8));
        assert_eq!(primary(&map, 400).as_deref(), Some("e:8"));
        assert!(SlotMap::read(&Value::Nil, &address("seed", 9)).is_empty());
    }
}
