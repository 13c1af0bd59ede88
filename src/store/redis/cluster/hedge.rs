//! The same command to several servers, each a little after the one before.

use std::future::Future;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

/// How long one server is waited for before the command is sent to the next server as well. This is
/// for commands that any server can execute.
const STAGGER: Duration = Duration::from_millis(50);

/// Runs `tries` until one succeeds. The next one begins when one has failed, or has taken longer
/// than [`STAGGER`]. If all fail, returns the error of the last one. If there are no tries, returns
/// `none`.
pub(super) async fn first<T, E, F>(tries: impl IntoIterator<Item = F>, none: E) -> Result<T, E>
where
    T: Send + 'static,
    E: Send + 'static,
    F: Future<Output = Result<T, E>> + Send + 'static,
{
    let (mut tries, mut running, mut error) = (tries.into_iter().peekable(), JoinSet::new(), none);
    loop {
        if let Some(next) = tries.next() {
            running.spawn(next);
        }
        let ended = match tries.peek() {
            Some(_) => timeout(STAGGER, running.join_next())
                .await
                .unwrap_or_default(),
            None => running.join_next().await,
        };
        match ended {
            Some(Ok(Ok(value))) => return Ok(value),
            Some(Ok(Err(failed))) => error = failed,
            Some(Err(_)) => {}
            None if tries.peek().is_some() => {}
            None => return Err(error),
        }
    }
}
