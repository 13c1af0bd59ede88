//! The slow path: a request gets its permit at once, or a future that waits for it, or an error.

use std::task::Poll;
use std::time::Instant;

use super::around;
use super::counting;
use super::own_quota;
use super::part::PartRef;
use super::request::Request;
use super::suspect::Suspect;
use super::taken::Taken;
use super::wait::Wait;
use crate::admission::Admission;
use crate::clock;
use crate::key::Label;
use crate::stats::{Gate, Outcome};
use crate::wait_queue::WaitBound;

/// Returns how long a request that enters at `now` can wait: as long as all of its limiters allow.
pub(super) fn bound_of(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    now: Instant,
) -> WaitBound {
    let max_wait = parts.iter().map(|part| part.core.settings.max_wait).min();
    let least_wait = parts.iter().map(|part| part.core.settings.least_wait).min();
    let bound = WaitBound::new(
        deadline,
        now,
        max_wait.unwrap_or_default(),
        least_wait.unwrap_or_default(),
    );
    let is_nested = parts.iter().any(|part| around::is_nested(part.core));
    bound.nested_if(is_nested, now)
}

/// Enters a request for which no permits are at hand, a `suspect` if a key of it is under suspicion. `label` returns the name of its first key. The parts of a request
/// have the deadline in common.
#[cold]
pub(crate) fn slow(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    suspect: Option<Box<Suspect>>,
    label: &dyn Fn() -> Label,
) -> Admission<Taken, Box<Wait>> {
    let now = clock::now();
    let mut request = Request::new(parts, bound_of(parts, deadline, now), suspect);
    let entered = match request.check(parts, now) {
        Err(stopped) => Poll::Ready(Err(stopped)),
        Ok(()) => {
            for PartRef { core, entry } in parts {
                own_quota::choose(core, entry.key, entry.quota, now);
            }
            request.enter(now)
        }
    };
    let PartRef { core, entry } = &parts[0];
    match entered {
        Poll::Ready(Ok(leaving)) => {
            let mut taken = leaving.taken;
            if let Some((part, cause)) = &leaving.uncounted {
                request.report_uncounted(*part, cause, &label());
                core.count(entry.key, Outcome::Uncounted);
            } else {
                counting::passed(core, entry.key, taken.units());
                taken.first_is_counted();
            }
            taken.count_units();
            Admission::Go(taken)
        }
        Poll::Ready(Err(stopped)) => {
            let limited = request.error_of(stopped, &label(), None, now);
            core.refused(entry.key, &limited);
            Admission::No(limited)
        }
        Poll::Pending => Admission::Wait(Wait::begin(request, now, label())),
    }
}
