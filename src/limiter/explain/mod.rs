//! Explains what would happen to a request that enters now.
//!
//! | file | what it has |
//! |---|---|
//! | `found` | what the store and this process know of one key |
//! | `case` | what would happen to a request under one key |
//! | `mod` | the same for a request of several keys |

mod case;
mod found;

use super::counting;
use super::explanation::{Explanation, ExplanationText, Verdict};
use super::key_state::KeyState;
use super::part::{NewPart, earliest_deadline, shortest_wait};
use super::reservation::WaitBound;
use crate::clock;
use crate::error::{Reason, StoreError};
use crate::join::join_all;

use case::{KeyCase, refused};
use found::Found;

/// Explains what would happen to a request of the keys `asked`, at least one.
pub(super) async fn explain(mut asked: Vec<NewPart>) -> Result<Explanation, StoreError> {
    let deadline = earliest_deadline(&asked);
    asked.iter_mut().for_each(NewPart::await_whole_limit);
    let max_wait = shortest_wait(asked.iter().map(|asked| &asked.core));
    let read = asked.iter().enumerate().map(async |(index, asked)| {
        let bound = WaitBound::new(deadline, clock::now(), max_wait);
        (index, Found::read(asked, bound).await)
    });
    let mut found = join_all(read).await;
    found.sort_by_key(|(index, _)| *index);
    let now = clock::now();
    let bound = WaitBound::new(deadline, now, max_wait);
    let mut verdicts = Vec::new();
    for (index, found) in &found {
        let part = asked[*index].as_part();
        let mut before = asked[..*index].iter();
        verdicts.push(if before.any(|other| other.as_part().is_same(&part)) {
            refused(Reason::SameKey)
        } else {
            let asked = &asked[*index];
            let case = KeyCase {
                core: &asked.core,
                cost: asked.entry.cost,
                largest: found.largest_cost().unwrap_or_else(|| asked.largest_cost()),
                found,
                max_wait,
                bound,
                now,
            };
            case.verdict()?
        });
    }
    let worst = verdicts.iter().enumerate();
    // Of equal ones, the first.
    let worst = worst.rev().max_by_key(|(_, verdict)| verdict.severity());
    let (decisive, mut verdict) = worst.map_or((0, Verdict::Goes), |(index, verdict)| {
        (index, verdict.clone())
    });
    let parts: Vec<_> = asked.iter().map(NewPart::as_part).collect();
    let joint = &asked[0].core.joint;
    let before = joint.waiting_unbooked(&parts);
    let is_refused = matches!(verdict, Verdict::Refused { .. });
    let awaited = &asked[joint.awaited(&parts)];
    let full = (awaited.core).full_queue(awaited.entry.key, awaited.entry.cost);
    if let Some(max_queue) = full.filter(|_| asked.len() > 1 && !is_refused) {
        verdict = refused(Reason::QueueFull(max_queue));
    } else if verdict == Verdict::Goes && asked.len() > 1 && before > 0 {
        verdict = case::queued(before, bound, max_wait, now);
    }
    let keys = asked.iter().zip(found).map(|(key, (_, found))| {
        let name = name_of(key, &asked);
        found.told(key, name, now)
    });
    let told = ExplanationText {
        verdict: &verdict,
        keys: keys.collect(),
        decisive,
    };
    let text = told.to_string();
    Ok(Explanation::new(verdict, text))
}

/// Returns the name of a key, also if another unit of the same key has it.
fn name_of(key: &NewPart, asked: &[NewPart]) -> Box<str> {
    let mut of_key = asked.iter().filter(|other| other.named == key.named);
    let name = of_key.find_map(|other| {
        let name = |state: &mut KeyState| state.counts.name().map(Box::from);
        other.core.states.find(other.entry.key, name).flatten()
    });
    name.unwrap_or_else(|| {
        let quota = |state: &mut KeyState| state.limits.quota_id();
        let quota = key.core.states.find(key.entry.key, quota).flatten();
        counting::label_with_route(&key.core, key.named, quota)
    })
}
