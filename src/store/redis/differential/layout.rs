//! The layout: Lua reads each record that Rust packs, field by field with the formats of
//! `lua/layout.lua`, and Rust reads the records of Lua.

use super::super::layout::{
    HOLD_MESSAGE, IN_FLIGHT_MESSAGE, NEVER, QUOTA_MESSAGE, REMAINING_MESSAGE,
};
use super::super::registers;
use super::*;
use crate::quota::Limit;
use crate::store::{Change, Claim, LimitUsage, Recipients, RegisterRequest, SetQuota, StoreEvent};

/// Returns a format of `lua/layout.lua`, with the numbers of a limit in place of its bytes.
fn format_of(name: &str) -> String {
    let limit = literal("LIMIT").trim_matches(['<', '\'']);
    literal(name).trim_matches('\'').replace("c16", limit)
}

/// Lua that packs and unpacks.
struct Lua(redis::Connection);

impl Lua {
    /// Returns the size of a format.
    fn size(&mut self, format: &str) -> u64 {
        let script = redis::Script::new("return struct.size(ARGV[1])");
        script.arg(format).invoke(&mut self.0).expect("a size")
    }

    /// Returns the numbers of records of these formats, one after the other, which fill `bytes`.
    fn unpack(&mut self, bytes: &[u8], formats: &[&str]) -> Vec<i64> {
        let script = redis::Script::new(
            "local numbers, pos = {}, 1
            for i = 2, #ARGV do
              local values = { struct.unpack(ARGV[i], ARGV[1], pos) }
              for k = 1, #values - 1 do numbers[#numbers + 1] = string.format('%.0f', values[k]) end
              pos = values[#values]
            end
            assert(pos == #ARGV[1] + 1, 'the formats fill all bytes')
            return numbers",
        );
        let mut invocation = script.arg(bytes);
        for name in formats {
            invocation.arg(format_of(name));
        }
        invocation.invoke(&mut self.0).expect("numbers")
    }

    /// Packs numbers.
    fn pack(&mut self, name: &str, numbers: &[u64]) -> Vec<u8> {
        let script = redis::Script::new(
            "local numbers = {}
            for i = 2, #ARGV do numbers[i - 1] = tonumber(ARGV[i]) end
            return struct.pack(ARGV[1], unpack(numbers))",
        );
        let mut invocation = script.arg(format_of(name));
        for number in numbers {
            invocation.arg(number);
        }
        invocation.invoke(&mut self.0).expect("bytes")
    }
}

fn with_lua(check: impl FnOnce(&mut Lua)) {
    let server = RedisServer::start().expect("a server of our own");
    check(&mut Lua(server.connect().expect("a connection")));
}

#[test]
fn sizes_are_those_of_their_formats() {
    with_lua(|lua| {
        // Without `server_time.lua` and what follows, it is the layout.
        let constants = script::IN_FLIGHT.lines().filter_map(script::constant);
        let mut count = 0;
        for (name, size) in
            constants.filter_map(|(name, size)| Some((name.strip_suffix("_SIZE")?, size)))
        {
            let size: u64 = size.parse().expect("a size");
            if name == "RECORD" {
                for record in [
                    "WINDOW_RECORD",
                    "BUCKET_RECORD",
                    "FIXED_RECORD",
                    "EXTERNAL_RECORD",
                ] {
                    assert_eq!(lua.size(&format_of(record)), size, "{record}");
                }
                for record in ["ADVANCE_RECORD", "QUOTA_RECORD"] {
                    assert!(lua.size(&format_of(record)) <= size, "{record}");
                }
            } else {
                assert_eq!(lua.size(&format_of(name)), size, "{name}");
            }
            count += 1;
        }
        assert_eq!(count, 17);
        let segment = format_of("SEGMENT");
        let reply_with_segment = format_of("REPLY") + segment.trim_start_matches('<');
        assert_eq!(reply_with_segment, format_of("REPLY_WITH_SEGMENT"));
    });
}

#[test]
fn calls_about_rates_are_read_field_by_field() {
    let bucket = Quota::bucket(40).refill(3, millis(7));
    let quota = Quota::new(30, millis(5))
        .and(bucket)
        .and(Quota::fixed(20, millis(6)));
    let spec = Arc::new(LimitSpec::new(
        quota,
        Duration::from_micros(11),
        Duration::from_micros(12),
    ));
    let later = Demand::new(31, 32).earliest(Duration::from_micros(35));
    let demands = [later, Demand::new(33, 34)];
    let returns = [UnusedPermits {
        slot: 41,
        stamp: 42,
        units: 43,
        incarnation: 2,
    }];
    let charges = [Charge::new(Duration::from_micros(51), 52)];
    let memory = ClientSession {
        incarnation: 2,
        writes: 3,
        seen: 4,
        since: Duration::from_micros(5),
        trip: Duration::from_micros(6),
        granted: 10,
    };
    let left = UpstreamRemaining {
        reset_in: Some(Duration::from_micros(62)),
        steady: true,
        urgent: true,
        ago: Duration::from_micros(63),
        refused: 64,
        valid_for: Duration::from_micros(65),
        forget: true,
        ..UpstreamRemaining::new(quota.limits()[0], 61)
    };
    let request = LeaseRequest {
        latest: Duration::from_micros(13),
        validity: Duration::from_micros(14),
        prefetch: 15,
        prefetch_validity: Duration::from_micros(16),
        returns: &returns,
        charges: &charges,
        session: memory,
        hold: HoldState {
            remaining: Duration::from_micros(17),
            releases: 18,
            cut: true,
        },
        remaining: Some(left),
        ..lease_request(&spec, &demands)
    };
    let mut call = codec::lease(&request, 0);
    codec::set_server_time(&mut call, Duration::ZERO, 8);
    let formats = [
        &["CALL"][..],
        &["LIMIT"; 3],
        &["CALL_DEMAND"; 2],
        &["CALL_RETURN", "CALL_CHARGE", "CALL_REMAINING"],
    ];
    with_lua(|lua| {
        let numbers = lua.unpack(&call, &formats.concat());
        let (head, lists) = numbers.split_at(29);
        let first = [1, 1, 1];
        let memory = [2, 3, 4, 5, 24, 8, 0, 10];
        let spans = [11, 12, 13, 14, 15, 16, 17, 18, 1];
        let counts = [3, 2, 1, 1, 1];
        let quota_and_part = [0, 0, 0, 254];
        assert_eq!(
            head,
            [&first[..], &memory, &spans, &counts, &quota_and_part].concat()
        );
        let limits = [1, 30, 5000, 0, 2, 3, 7000, 40, 3, 20, 6000, 0];
        let demands = [31, 32, 35, 33, 34, 0];
        let returns_and_charges = [41, 42, 43, 51, 52];
        let remaining = [1, 30, 5000, 0, 61, 62, 3, 63, 64, 65, 1];
        assert_eq!(
            lists,
            [&limits[..], &demands, &returns_and_charges, &remaining].concat()
        );
    });
}

#[test]
fn quota_versions_are_read_field_by_field() {
    let quota = Quota::new(30, millis(5)).and(Quota::in_flight(34));
    let spec = LimitSpec::new(quota, millis(1), millis(2));
    let left = UpstreamRemaining::new(quota.limits()[0], 61);
    let versioned = spec
        .clone()
        .with_quota_version(31, Duration::from_micros(33));
    let versioned = Arc::new(versioned);
    let request = LeaseRequest {
        remaining: Some(left),
        ..lease_request(&versioned, &[])
    };
    let lease = codec::lease(&request, 9);
    let life = Duration::from_micros(35);
    let changes = [
        (ChangeKind::Set, &Arc::new(spec)),
        (ChangeKind::End, &versioned),
        (ChangeKind::Learn, &versioned),
    ]
    .map(|(kind, spec)| codec::change(spec, Change::Quota { kind, life }, 9));
    with_lua(|lua| {
        let formats = ["CALL", "LIMIT", "CALL_REMAINING"];
        let numbers = lua.unpack(&lease, &formats);
        assert_eq!(numbers[1], 1);
        assert_eq!(numbers[24..29], [1, 31, 33, 34, 254]);
        let formats = ["CALL", "LIMIT"];
        for (call, expected) in changes.iter().zip([[6, 0], [7, 31], [8, 31]]) {
            let numbers = lua.unpack(call, &formats);
            assert_eq!(numbers[1], expected[0]);
            assert_eq!(numbers[24..29], [0, expected[1], 35, 34, 254]);
        }
    });
}

#[test]
fn claims_and_register_calls_are_read_field_by_field() {
    let memory = ClientSession {
        incarnation: 2,
        writes: 3,
        seen: 4,
        ..ClientSession::default()
    };
    let life = Duration::from_micros(17);
    let claim = Claim {
        holder: 11,
        limit: 13,
        in_use: 14,
        wanted: 15,
        granted_seen: 16,
        ttl: life,
        ..Claim::NONE
    };
    let (value, tell) = (Some(Vec::new()), Recipients::None);
    let change = RegisterRequest {
        key: Key::ALL,
        kind: 1,
        version: 2,
        value,
        ttl: life,
        notify: tell,
    };
    with_lua(|lua| {
        let numbers = lua.unpack(&codec::claim(&claim, 12, 10, memory, 0), &["CLAIM_CALL"]);
        assert_eq!(
            numbers,
            [1, 1, 1, 2, 3, 4, 0, 0, 0, 0, 10, 11, 12, 13, 14, 15, 16, 17]
        );
        let of_class = Claim {
            class: 18,
            share: 19,
            ..claim
        };
        let call = codec::claim(&of_class, 12, 10, memory, 0);
        let numbers = lua.unpack(&call, &["CLAIM_CALL", "CLASS"]);
        assert_eq!(numbers[17..], [17, 18, 19]);
        let call = registers::call(&change, None);
        let Some(script::Argument::Is(call)) = call.first() else {
            panic!("the call is first")
        };
        assert_eq!(lua.unpack(call, &["REGISTER_CALL"]), [1, 1, 2, 17]);
    });
}

#[test]
fn replies_about_rates_are_read_field_by_field() {
    with_lua(|lua| {
        // Format; refused, shared and cut; incarnation to hold; releases; the limit that refused;
        // another; prefetched; segments.
        let reply = [
            1,
            1 + 4 + 8,
            3,
            4,
            5,
            6,
            7,
            8,
            9,
            10,
            1,
            11,
            12,
            0,
            2,
            13,
            14,
            15,
            16,
            17,
            18,
            1,
            21,
            22,
            23,
            24,
            25,
        ];
        let lease = codec::read_lease(&lua.pack("REPLY_WITH_SEGMENT", &reply)).unwrap();
        let micros = Duration::from_micros;
        assert_eq!((lease.incarnation, lease.writes, lease.now), (3, 4, 5));
        assert_eq!(
            (lease.session_ttl, lease.free, lease.external_usage),
            (micros(6), 8, true)
        );
        assert_eq!(
            lease.hold,
            HoldState {
                remaining: micros(9),
                releases: 10,
                cut: true
            }
        );
        let limit = Limit::Sliding {
            count: 11,
            window: micros(12),
        };
        assert_eq!(
            lease.refused,
            Some(Refusal {
                wait: Some(micros(7)),
                limit: Some(limit)
            })
        );
        assert_eq!(
            lease.foreign,
            Some(Limit::Bucket {
                count: 13,
                window: micros(14),
                capacity: 15
            })
        );
        let grant = Grant {
            cost: 21,
            count: 22,
            wait: micros(23),
            validity: micros(24),
            slot: 28,
            stamp: 53,
        };
        assert_eq!(lease.grants.to_vec(), [grant]);
        let ahead = Grant {
            cost: 1,
            count: 16,
            wait: micros(0),
            validity: micros(17),
            slot: 5,
            stamp: 23,
        };
        assert_eq!(lease.prefetched, Some(ahead));
        let told = lua.pack("QUOTA_PART", &[31, 32, 33, 34, 2]);
        let limits = [[1, 35, 36, 0], [2, 37, 38, 39]];
        let limits = limits.map(|limit| lua.pack("LIMIT", &limit));
        let quota = Quota::new(35, micros(36))
            .and(Quota::bucket(39).refill(37, micros(38)))
            .and(Quota::in_flight(34));
        let set = SetQuota::new(31, Some(quota), micros(32), micros(33));
        let part = [&told[..], &limits.concat()].concat();
        let plain = lua.pack("REPLY", &[&[1, 32], &reply[2..21], &[0]].concat());
        let lease = codec::read_lease(&[&plain[..], &part].concat()).unwrap();
        assert_eq!(lease.set_quota.as_deref(), Some(&set));
        let message = [&[QUOTA_MESSAGE][..], &part, b"token"].concat();
        let (event, token) = codec::read_event(&message).unwrap();
        assert!(matches!(event, StoreEvent::SetQuota(quota) if *quota == set));
        assert_eq!(token, b"token");
        let peek = lua.pack("PEEK_REPLY", &[1, 32, 3, 4, 5, 6, 1, 12, 0]);
        let over = lua.pack("QUOTA_PART", &[30, 32, 33, 0, 0]);
        let usage = codec::read_peek(&[peek, over].concat()).unwrap();
        let over = SetQuota::new(30, None, micros(32), micros(33));
        assert_eq!(usage.set_quota.as_deref(), Some(&over));
        let garbled = lua.pack("QUOTA_PART", &[30, 32, 33, 0, 2]);
        let garbled = [&plain[..], &garbled, &limits.concat()].concat();
        assert!(codec::read_lease(&garbled).is_err());

        let unsure = lua.pack("UNSURE_REPLY", &[1, 3, 5]);
        assert_eq!(codec::read_unsure(&unsure), Some(5));

        let head = lua.pack("PEEK_REPLY", &[1, 0, 3, 4, 5, 6, 1, 12, 2]);
        let limit = lua.pack("PEEK_LIMIT", &[3, 7, 8, 0, 9, 10, 11, 13]);
        let never = lua.pack("PEEK_LIMIT", &[3, 7, 8, 0, 9, 10, 11, NEVER]);
        let usage = codec::read_peek(&[head, limit, never].concat()).unwrap();
        assert_eq!((usage.free, usage.next_slot), (3, micros(4)));
        assert_eq!(usage.recovering, micros(12));
        assert_eq!(
            usage.hold,
            HoldState {
                remaining: micros(5),
                releases: 6,
                cut: true
            }
        );
        let limit = Limit::Fixed {
            count: 7,
            window: micros(8),
        };
        let known = LimitUsage {
            reserved: 11,
            wait: micros(13),
            ..LimitUsage::new(limit, 9, 10)
        };
        let never = LimitUsage {
            wait: Duration::MAX,
            ..known
        };
        assert_eq!(usage.limits, [known, never]);
    });
}

#[test]
fn claim_replies_and_messages_are_read_field_by_field() {
    with_lua(|lua| {
        let micros = Duration::from_micros;
        let reply =
            codec::read_claim_reply(&lua.pack("CLAIM_REPLY", &[1, 2, 3, 4, 5, 6, 7, 1, 8, 9]))
                .unwrap();
        let state = codec::HolderState {
            incarnation: 4,
            changes: 5,
            number: 6,
            granted: 7,
            others_wait: true,
        };
        assert_eq!(
            (reply.state, reply.publish_failed, reply.now),
            (state, true, 3)
        );
        assert_eq!(
            (reply.first_expiry, reply.recovering),
            (Some(micros(8)), micros(9))
        );
        assert_eq!(
            codec::read_peek_in_flight(&lua.pack("CLAIM_PEEK_REPLY", &[1, 0, 3, 4])).unwrap(),
            (3, 4)
        );

        let message = lua.pack(
            "IN_FLIGHT_MESSAGE_FIELDS",
            &[u64::from(IN_FLIGHT_MESSAGE), 3, 4, 5, 6, 7, 1],
        );
        assert_eq!(codec::read_holder_message(&message).unwrap(), (3, state));
        for cut in [false, true] {
            let fields = [u64::from(HOLD_MESSAGE), 3, 4, u64::from(cut)];
            let message = lua.pack("HOLD_MESSAGE_FIELDS", &fields);
            let (event, rest) = codec::read_event(&message).unwrap();
            let held = HoldState {
                remaining: micros(3),
                releases: 4,
                cut,
            };
            assert!(matches!(event, StoreEvent::Hold(other) if other == held) && rest.is_empty());
        }
        let message = lua.pack(
            "REMAINING_MESSAGE_FIELDS",
            &[u64::from(REMAINING_MESSAGE), 3],
        );
        assert!(matches!(
            codec::read_event(&message).unwrap(),
            (StoreEvent::RemainingFell { writes: 3 }, [])
        ));

        let register = registers::read(&lua.pack("REGISTER_REPLY", &[1, 1, 3, 4]), 9).unwrap();
        assert_eq!(
            (register.kind, register.changed, register.version),
            (9, true, 3)
        );
        assert_eq!((register.age, register.value), (micros(4), Vec::new()));
    });
}
