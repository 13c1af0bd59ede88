//! Bodies of many servers, each with what the request has used: `vectors.json`.

use serde_json::{Value, json};

use super::{Spent, SpentReader};
use crate::Signal;

fn counts(spent: Spent) -> Value {
    json!(spent.iter().collect::<std::collections::BTreeMap<_, _>>())
}

#[test]
fn every_body_states_what_it_is_known_to_state() {
    let file: Value = serde_json::from_str(include_str!("vectors.json")).unwrap();
    let vectors = file["vectors"].as_array().unwrap();
    for vector in vectors {
        let body = vector["body"].as_str().unwrap().as_bytes();
        let expected = &vector["spent"];
        let response = http::Response::new(());
        let whole = Signal::read_with_body(&response, body).spent();
        assert_eq!(counts(whole), *expected, "{}", vector["id"]);
        for size in 1..20 {
            let mut reader = SpentReader::new();
            body.chunks(size).for_each(|chunk| reader.read(chunk));
            assert_eq!(counts(reader.spent()), *expected, "{}", vector["id"]);
        }
    }
    assert_eq!(vectors.len(), 19);
}
