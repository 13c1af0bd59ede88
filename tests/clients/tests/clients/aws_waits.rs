//! What the AWS SDK does with a request that waits for a permit.

use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_smithy_runtime_api::client::stalled_stream_protection::{
    Builder, StalledStreamProtectionConfig,
};
use clients::aws;
use tollgate::{Quota, RateLimitLayer};
use upstream::Upstream;

use crate::subjects::Aws;

/// Makes two calls, of which the second waits for its permit. Returns whether it succeeds.
async fn waiting_call_succeeds(protection: StalledStreamProtectionConfig) -> bool {
    // The SDK looks at the last second, after the grace period.
    let grace = Duration::from_millis(100);
    let protection = Builder::from(protection).grace_period(grace).build();
    let upstream = Upstream::open().body("{}");
    let limit = RateLimitLayer::new(Quota::new(1, Duration::from_secs(4))).unwrap();
    let config = Aws::config(&upstream.url(), aws::http_client(limit, grace * 100))
        .stalled_stream_protection(protection);
    let client = Client::from_conf(config.build());
    client.list_queues().send().await.unwrap();
    client.list_queues().send().await.is_ok()
}

/// The recipe switches off what would end the wait.
#[tokio::test]
async fn a_wait_is_no_stalled_upload() {
    assert!(waiting_call_succeeds(aws::stalled_stream_protection()).await);
    assert!(!waiting_call_succeeds(StalledStreamProtectionConfig::enabled().build()).await);
}
