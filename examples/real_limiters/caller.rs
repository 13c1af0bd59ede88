//! A process of a run: its callers, behind one layer.

use std::time::Duration;

use real_limiters::{Call, Limit, ServerKind, closed_loops};
use reqwest::Url;
use tollgate::error::BoxError;

use crate::case::Case;
use crate::common::{Options, Usage, client};
use crate::layer::LayerName;

/// Returns the words with which `process` of a run is started.
pub(crate) fn words(case: &Case, process: u32, url: &str, redis: &str) -> Vec<String> {
    let words = [
        ("--role", "caller".to_owned()),
        ("--server", case.kind.name().to_owned()),
        ("--layer", case.layer.name().to_owned()),
        ("--count", case.limit.count.to_string()),
        ("--window", case.limit.window.as_secs().to_string()),
        ("--callers", case.callers_of(process).to_string()),
        ("--seconds", case.span.as_secs_f64().to_string()),
        ("--url", url.to_owned()),
        ("--redis", redis.to_owned()),
    ];
    words
        .into_iter()
        .flat_map(|(name, value)| [name.to_owned(), value])
        .collect()
}

/// Makes the calls, and prints each of them at the end.
pub(crate) async fn work(mut options: Options) -> Result<(), BoxError> {
    let (server, layer) = (options.text("--server", ""), options.text("--layer", ""));
    let kind = ServerKind::named(&server).ok_or_else(|| Usage::new("--server names no server"))?;
    let layer = LayerName::named(&layer).ok_or_else(|| Usage::new("--layer names no layer"))?;
    let limit = Limit {
        count: options.number("--count", 1, 1..=1_000_000)?,
        window: Duration::from_secs(options.number("--window", 1, 1..=86_400)?.into()),
    };
    let callers = options.number("--callers", 1, 1..=10_000)?;
    let span = options.seconds("--seconds", 1.0)?;
    let url: Url = options.text("--url", "").parse()?;
    let redis = options.text("--redis", "");
    options.finish()?;

    let service = layer.around(client()?, kind, limit, &redis).await?;
    let calls = closed_loops(service, &url, callers as usize, span, layer.pause()).await?;
    for call in calls {
        println!("{}", line(&call));
    }
    Ok(())
}

fn line(call: &Call) -> String {
    format!(
        "{} {} {}",
        call.began,
        call.took.as_micros(),
        u8::from(call.accepted)
    )
}

/// Reads a line of a process.
pub(crate) fn read(text: &str) -> Result<Call, BoxError> {
    let mut numbers = text.split(' ').map(str::parse::<u64>);
    let mut number = || {
        numbers
            .next()
            .ok_or("a line of a caller has three numbers")?
            .map_err(BoxError::from)
    };
    Ok(Call {
        began: number()?,
        took: Duration::from_micros(number()?),
        accepted: number()? == 1,
    })
}
