//! One process: its tasks call without tollgate, and with it.

use std::sync::Arc;

use tollgate::RateLimitLayer;
use tollgate::error::BoxError;
use tower::ServiceBuilder;
use upstream::Upstream;

use crate::args::Args;
use crate::progress::Progress;
use crate::run::{self, Crew, MOST_CALLS};
use crate::seen::Run;
use crate::{MARGIN, report, rules};

/// Runs the fleet without tollgate and with it.
pub(crate) async fn compare(args: &Args) -> Result<String, BoxError> {
    let limit = RateLimitLayer::new(args.quota())?;
    let client = run::client()?;
    println!(
        "{} tasks call a service that allows {}, for {:?} each time.\n",
        args.tasks, args.limit, args.time
    );

    // Without tollgate.
    let upstream = Upstream::start(rules(args.limit));
    let crew = Arc::new(Crew::new(args, 0, &upstream.url())?.at_most(MOST_CALLS));
    let service = ServiceBuilder::new().map_request(crew.stamp()).service(client.clone());
    let mut progress = Progress::start("without tollgate", args.time);
    let outcome = run::fleet(&crew, service, |waiting| progress.tell(upstream.tally(), waiting)).await?;
    progress.finish(upstream.tally());
    let without = Run::new("without tollgate", outcome, upstream.log());

    // With tollgate: one layer more.
    let upstream = Upstream::start(rules(args.limit));
    let crew = Arc::new(Crew::new(args, 0, &upstream.url())?);
    let service = ServiceBuilder::new().layer(limit).map_request(crew.stamp()).service(client);
    let mut progress = Progress::start("with tollgate", args.time);
    let outcome = run::fleet(&crew, service, |waiting| progress.tell(upstream.tally(), waiting)).await?;
    progress.finish(upstream.tally());
    let with = Run { margin: Some(MARGIN), ..Run::new("with tollgate", outcome, upstream.log()) };

    Ok(report::one(args, &rules(args.limit), &[without, with]))
}
