//! Explains what would happen to a request that enters now.
//!
//! What a request decides before it asks a store, it decides here, too: a [`Request`] is made that does not enter, and
//! the state of each key is asked what it would do ([`Outlook`](super::key_state::Outlook)).
//!
//! | file | what it has |
//! |---|---|
//! | `found` | what the store and this process know of one key |
//! | `case` | what would happen to a request under one key |
//! | `mod` | the same for a request of several keys |
//! | `text` | what was found, for a person |

mod case;
mod found;
mod text;

use std::time::Instant;

use super::counting;
use super::explanation::{Explanation, Verdict};
use super::part::{NewPart, earliest_deadline};
use super::request::Request;
use super::reservation::Stopped;
use super::wait::bound_of;
use crate::clock;
use crate::error::StoreError;
use crate::join::join_all;
use crate::wait_queue::WaitBound;

use case::{KeyCase, refused};
use found::Found;
use text::{KeyText, RequestText};

/// Explains what would happen to a request of the keys `asked`, at least one.
pub(super) async fn explain(mut asked: Vec<NewPart>) -> Result<Explanation, StoreError> {
    let deadline = earliest_deadline(&asked);
    asked.iter_mut().for_each(NewPart::await_whole_limit);
    let parts: Vec<_> = asked.iter().map(NewPart::as_part).collect();
    let read = asked.iter().enumerate().map(async |(index, asked)| {
        let bound = bound_of(&parts, deadline, clock::now());
        (index, Found::read(asked, bound).await)
    });
    let mut found = join_all(read).await;
    found.sort_by_key(|(index, _)| *index);
    let found: Vec<_> = found.into_iter().map(|(_, found)| found).collect();
    let now = clock::now();
    let bound = bound_of(&parts, deadline, now);
    // It does not enter. It states whether it may.
    let request = Request::new(&parts, bound, None);
    let (decisive, verdict) = match request.check(&parts, now) {
        Err(stopped) => refused_by(&request, stopped)?,
        Ok(()) => verdict(&request, &asked, &found, bound, now)?,
    };
    let keys = asked.iter().zip(&found).map(|(part, found)| KeyText {
        part,
        name: name_of(part, &asked),
        found,
        now,
    });
    let text = RequestText {
        verdict: &verdict,
        keys: keys.collect(),
        decisive,
    };
    let text = text.to_string();
    Ok(Explanation::new(verdict, text))
}

/// Decides about a request of the keys `asked`, and by which of them.
fn verdict(
    request: &Request,
    asked: &[NewPart],
    found: &[Found],
    bound: WaitBound,
    now: Instant,
) -> Result<(usize, Verdict), StoreError> {
    let mut worst = (0, Verdict::Goes);
    for (index, (part, found)) in asked.iter().zip(found).enumerate() {
        let case = KeyCase {
            part,
            found,
            is_only: asked.len() == 1,
            bound,
            now,
        };
        let verdict = case.verdict()?;
        if verdict.severity() > worst.1.severity() {
            worst = (index, verdict);
        }
    }
    if matches!(worst.1, Verdict::Refused { .. }) {
        return Ok(worst);
    }
    if let Err(stopped) = request.check_room() {
        return refused_by(request, stopped);
    }
    let before = request.line.unbooked();
    if worst.1 == Verdict::Goes && before > 0 {
        worst.1 = case::queued(before, bound, now);
    }
    Ok(worst)
}

/// Returns what a request states that does not enter, and the key which stops it.
///
/// # Errors
///
/// That of the store, if the request fails with it.
fn refused_by(request: &Request, stopped: Stopped) -> Result<(usize, Verdict), StoreError> {
    let part = stopped.part;
    let (reason, _) = request.reason_of(stopped)?;
    Ok((part, refused(reason)))
}

/// Returns the name of a key, also if another unit of the same key has it.
fn name_of(key: &NewPart, asked: &[NewPart]) -> Box<str> {
    let mut of_key = asked.iter().filter(|other| other.named == key.named);
    let name = of_key.find_map(|other| {
        let NewPart { core, entry, .. } = other;
        core.states
            .read(entry.key, |state| state.counts.name().map(Box::from))
    });
    name.unwrap_or_else(|| {
        let quota = key.core.quota_id(key.entry.key);
        counting::label_with_route(&key.core, key.named, quota)
    })
}
