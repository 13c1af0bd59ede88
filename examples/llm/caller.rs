//! A process of the fleet: tasks that send prompts of very different length.

use std::time::Duration;

use reqwest::StatusCode;
use reqwest_middleware::ClientWithMiddleware;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tollgate::error::BoxError;

use crate::api::MAX_TOKENS;
use crate::server::ANSWER;

/// Sends prompts until `time` is over, and prints a line for each that was answered: the time until
/// the answer began, in milliseconds, and how often the server refused.
pub(crate) async fn call_all(
    client: &ClientWithMiddleware,
    url: &str,
    first: u32,
    tasks: u32,
    time: Duration,
) -> Result<(), BoxError> {
    let end = Instant::now() + time;
    let mut running = JoinSet::new();
    for number in first..first + tasks {
        let (client, url) = (client.clone(), url.to_owned());
        running.spawn(async move {
            let mut prompts = Prompts::new(number);
            while Instant::now() < end {
                let prompt = prompts.next();
                let asked = prompt.ask(&client, &url);
                match timeout_at(end, asked).await {
                    Ok(answered) => {
                        let (waited, refused) = answered?;
                        println!("{} {refused}", waited.as_millis());
                    }
                    Err(_) => break,
                }
            }
            Ok::<_, BoxError>(())
        });
    }
    while let Some(done) = running.join_next().await {
        done??;
    }
    Ok(())
}

/// A prompt, and the answer that it will get, in tokens.
#[derive(Clone, Copy, Debug)]
struct Prompt {
    length: u32,
    answer: u32,
}

impl Prompt {
    /// Sends the prompt until it is answered, and reads the answer. Returns how long it took until the
    /// answer began, and how often the server refused.
    async fn ask(
        self,
        client: &ClientWithMiddleware,
        url: &str,
    ) -> Result<(Duration, u32), BoxError> {
        let asked = Instant::now();
        let mut refused = 0;
        let mut response = loop {
            let words = "word ".repeat(self.length as usize);
            let body = json!({"model": "example", "max_tokens": MAX_TOKENS, "stream": true,
                "messages": [{"role": "user", "content": words}]});
            let request = client.post(url).header(ANSWER, self.answer);
            let response = request.body(body.to_string()).send().await?;
            if response.status() != StatusCode::TOO_MANY_REQUESTS {
                break response.error_for_status()?;
            }
            // The next attempt waits until the hold of the 429 is over.
            refused += 1;
        };
        let waited = asked.elapsed();
        while response.chunk().await?.is_some() {}
        Ok((waited, refused))
    }
}

/// Prompts of 50 to 8000 tokens, most of them short, with answers of 50 to 1500. The same ones for
/// the same task in each run.
struct Prompts(u64);

impl Prompts {
    fn new(task: u32) -> Self {
        Prompts(u64::from(task) + 1)
    }

    fn next(&mut self) -> Prompt {
        Prompt {
            length: self.between(50.0, 8000.0),
            answer: self.between(50.0, f64::from(MAX_TOKENS)),
        }
    }

    /// Returns a number whose logarithm is uniformly distributed.
    fn between(&mut self, least: f64, most: f64) -> u32 {
        // A linear congruential generator.
        let state = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = state.wrapping_add(1_442_695_040_888_963_407);
        let part = (self.0 >> 33) as f64 / f64::from(1_u32 << 31);
        (least * (most / least).powf(part)).round() as u32
    }
}
