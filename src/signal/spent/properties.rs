//! Random bodies against a model that parses them whole, with `serde_json`.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Map, Value};

use super::{NAMES, SpentReader};

/// The keys of counts in `usage`, with their units.
const OF_USAGE: [(&str, &str); 11] = [
    ("total_tokens", "tokens"),
    ("totalTokens", "tokens"),
    ("prompt_tokens", "input_tokens"),
    ("input_tokens", "input_tokens"),
    ("inputTokens", "input_tokens"),
    ("completion_tokens", "output_tokens"),
    ("output_tokens", "output_tokens"),
    ("outputTokens", "output_tokens"),
    ("cache_creation_input_tokens", "cache_creation_input_tokens"),
    ("cache_read_input_tokens", "cache_read_input_tokens"),
    ("cacheReadInputTokens", "cache_read_input_tokens"),
];

/// The other counts.
const OTHERS: [(&str, &str); 5] = [
    ("/usageMetadata/totalTokenCount", "tokens"),
    ("/usageMetadata/promptTokenCount", "input_tokens"),
    ("/usageMetadata/candidatesTokenCount", "output_tokens"),
    ("/extensions/cost/actualQueryCost", "points"),
    ("/data/rateLimit/cost", "points"),
];

/// Returns the places of counts in a document: the JSON pointer, and the unit.
fn places() -> Vec<(String, &'static str)> {
    let of_usage = ["", "/response", "/message"]
        .iter()
        .flat_map(|around| OF_USAGE.map(|(key, unit)| (format!("{around}/usage/{key}"), unit)));
    let others = OTHERS.map(|(pointer, unit)| (pointer.to_owned(), unit));
    of_usage.chain(others).collect()
}

/// Returns the counts of a document by the model.
fn model(document: &Value) -> BTreeMap<&'static str, u32> {
    let count = |(pointer, unit): (String, &'static str)| {
        let count = document.pointer(&pointer)?.as_u64()?;
        Some((unit, u32::try_from(count).unwrap_or(u32::MAX)))
    };
    places().into_iter().filter_map(count).collect()
}

fn counts(reader: &SpentReader) -> BTreeMap<&'static str, u32> {
    reader.spent().iter().collect()
}

/// Reads the body in chunks that end at the cuts, which are per mille of the body.
fn read(body: &[u8], cuts: &[usize]) -> SpentReader {
    let mut cuts: Vec<_> = cuts.iter().map(|cut| cut * body.len() / 1000).collect();
    cuts.sort_unstable();
    let mut reader = SpentReader::new();
    let mut start = 0;
    for end in cuts.into_iter().chain([body.len()]) {
        reader.read(&body[start..end]);
        start = end;
    }
    reader
}

fn key() -> impl Strategy<Value = String> {
    let places = places().into_iter();
    let known: Vec<String> = places
        .flat_map(|(pointer, _)| {
            pointer[1..]
                .split('/')
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .collect();
    prop_oneof![4 => prop::sample::select(known), 1 => "[a-z\"\\\\ {:]{0,40}"]
}

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        3 => any::<u32>().prop_map(Value::from),
        1 => any::<u64>().prop_map(Value::from),
        1 => any::<i64>().prop_map(Value::from),
        1 => ".{0,12}".prop_map(Value::from),
        1 => Just(Value::from("\"usage\":{\"total_tokens\":1}\\")),
        1 => any::<bool>().prop_map(Value::from),
        1 => Just(Value::Null),
    ]
}

fn value() -> impl Strategy<Value = Value> {
    scalar().prop_recursive(5, 60, 6, |inner| {
        prop_oneof![
            1 => prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            4 => prop::collection::btree_map(key(), inner, 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

/// A document that states one unit for sure, with random values around it.
fn document() -> impl Strategy<Value = Value> {
    let members = prop::collection::btree_map(key(), value(), 0..5);
    let stated = (prop::sample::select(places()), any::<u32>());
    (members, prop::option::of(stated)).prop_map(|(members, stated)| {
        let mut document = Value::Object(members.into_iter().collect());
        if let Some(((pointer, _), count)) = stated {
            let mut place = &mut document;
            for key in pointer[1..].split('/') {
                if !place.is_object() {
                    *place = Value::Object(Map::new());
                }
                place = &mut place[key];
            }
            *place = count.into();
        }
        document
    })
}

/// Two places of one unit in one document: the model and the reader may take either.
fn is_ambiguous(document: &Value) -> bool {
    let is_stated = |pointer: &str| document.pointer(pointer).is_some_and(Value::is_number);
    let stated = places()
        .into_iter()
        .filter(|(pointer, _)| is_stated(pointer));
    let mut units: Vec<_> = stated.map(|(_, unit)| unit).collect();
    let all = units.len();
    units.sort_unstable();
    units.dedup();
    units.len() < all
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0..1000_usize, 0..12)
}

proptest! {
    #![proptest_config(histories::config(125))]

    #[test]
    fn documents_are_read_as_a_parser_reads_them(
        document in document(), cuts in cuts(), is_pretty in any::<bool>(),
    ) {
        prop_assume!(!is_ambiguous(&document));
        let body = match is_pretty {
            true => serde_json::to_vec_pretty(&document),
            false => serde_json::to_vec(&document),
        };
        let body = body.unwrap();
        prop_assert_eq!(counts(&read(&body, &cuts)), model(&document));
    }

    /// The last event that states a unit counts.
    #[test]
    fn later_events_replace_earlier_counts(
        documents in prop::collection::vec(document(), 0..6),
        cuts in cuts(),
        end in prop::sample::select(vec!["\n", "\r\n", "\r"]),
        is_pretty in any::<bool>(),
    ) {
        prop_assume!(!documents.iter().any(is_ambiguous));
        let mut body = format!(": hello{end}{end}");
        let mut expected = BTreeMap::new();
        for document in &documents {
            let text = match is_pretty {
                true => serde_json::to_string_pretty(document).unwrap(),
                false => document.to_string(),
            };
            body += &format!("event: some{end}");
            text.lines().for_each(|line| body += &format!("data: {line}{end}"));
            body += end;
            expected.extend(model(document));
        }
        body += &format!("data: [DONE]{end}{end}");
        prop_assert_eq!(counts(&read(body.as_bytes(), &cuts)), expected);
    }

    /// Any bytes are read without a panic, and the bounds of chunks change nothing.
    #[test]
    fn bounds_of_chunks_change_nothing(
        pieces in prop::collection::vec(
            prop_oneof![
                prop::collection::vec(any::<u8>(), 0..8),
                prop::sample::select(vec![
                    "data: ", "data:{", "{", "}", "[", "]", "\n", "\r", "\"usage\":", "\"", "\\",
                    "\"total_tokens\"", ":", "12", "1.5", ",", "{\"usage\":{\"total_tokens\":", " ",
                ]).prop_map(|text| text.as_bytes().to_vec()),
            ],
            0..60,
        ),
        cuts in cuts(),
    ) {
        let body = pieces.concat();
        let whole = counts(&read(&body, &[]));
        prop_assert_eq!(&whole, &counts(&read(&body, &cuts)));
        prop_assert!(whole.keys().all(|unit| NAMES.contains(unit)));
    }
}

#[test]
fn readers_are_small_and_nesting_is_no_danger() {
    assert!(
        size_of::<SpentReader>() <= 160,
        "{}",
        size_of::<SpentReader>()
    );
    let mut reader = SpentReader::new();
    for bytes in [b"[{\"usage\":", b"}]}]}]}]}]"] {
        (0..100_000).for_each(|_| reader.read(bytes));
    }
    reader.read(b"{\"usage\":{\"total_tokens\":5}}");
    assert!(reader.spent().iter().next().is_none() || reader.spent().count("tokens") == Some(5));
}
