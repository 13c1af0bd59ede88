//! What requests are charged, and what is learned from their responses.

use std::sync::Arc;

use http::Method;

use super::prompt::Prompt;
use super::{CountsBy, Llm};
use crate::cost::Cost;
use crate::estimates::{Estimates, TypicalCost};
use crate::key::RequestRef;
use crate::layer::body::AtEnd;
use crate::limiter::Settlement;
use crate::signal::Spent;

/// The units that quotas for these APIs have.
pub(super) const TOTAL: &str = "tokens";
const INPUT: &str = "input_tokens";
pub(super) const OUTPUT: &str = "output_tokens";

/// Charges requests their tokens, and learns from responses.
pub(super) struct Meter {
    llm: Llm,
    /// Those of the units that are limited. A unit may be there twice.
    units: Vec<&'static str>,
    /// The tokens of 10,000 units of size of a prompt, by model.
    ratios: Estimates,
    /// The tokens of prompts that could not be seen, by path.
    unseen: Estimates,
    /// The tokens of answers, by model.
    answers: Estimates,
}

/// How many tokens a request is expected to take.
struct Asked {
    /// The model, or the path if the request names no model.
    name: String,
    /// The size of the prompt, if it was seen.
    size: Option<u64>,
    prompt: u32,
    /// The answer.
    answer: u32,
    /// The cost in the extensions of the request, which replaces the estimate.
    own: Option<Cost>,
}

/// What all sizes and ratios are in proportion to.
const SCALE: u64 = 10_000;

/// What a prompt takes besides its texts, in tokens: the frames of its messages.
const FRAME: u32 = 16;

/// Prompts below this estimate teach nothing: most of them is frame.
const LEAST_TAUGHT: u64 = 64;

/// Of the answers, and of the ratios, this part is not above its estimate. What a few take more is charged later, and it is
/// less than what the others did not take.
const QUANTILE: f64 = 0.95;

impl Meter {
    pub(super) fn new(llm: Llm, units: Vec<&'static str>) -> Self {
        let [ratios, unseen, answers] = [(); 3].map(|()| Estimates::new(QUANTILE));
        Meter {
            llm,
            units,
            ratios,
            unseen,
            answers,
        }
    }

    /// Returns whether `unit` is one of these APIs.
    pub(super) fn charges(unit: &str) -> bool {
        [TOTAL, INPUT, OUTPUT].contains(&unit)
    }

    /// Returns what `request` is charged before it is sent.
    pub(super) fn estimate(&self, request: &RequestRef<'_>) -> Cost {
        match self.ask(request) {
            Some(asked) => self.cost(|unit| Some(self.expected(&asked, unit))),
            None => self.nothing(),
        }
    }

    /// Returns the cost of a request that takes no tokens.
    pub(super) fn nothing(&self) -> Cost {
        self.cost(|_| Some(0))
    }

    /// Returns what is done at the end of the response to `request`.
    pub(super) fn begin(self: &Arc<Self>, request: &RequestRef<'_>) -> AtEnd {
        let (meter, asked) = (self.clone(), self.ask(request));
        Box::new(move |spent, settlement| {
            if let Some(asked) = asked {
                meter.end(&asked, &spent, settlement);
            }
        })
    }

    /// Returns the cost that states each limited unit for which `count` returns a number.
    fn cost(&self, count: impl Fn(&'static str) -> Option<u32>) -> Cost {
        let units = self.units.iter();
        units.fold(Cost::NOTHING_STATED, |cost, unit| match count(unit) {
            Some(count) => cost.and(unit, count),
            None => cost,
        })
    }

    /// Expects what `request` takes. Returns `None` if it asks no model.
    fn ask(&self, request: &RequestRef<'_>) -> Option<Asked> {
        if [Method::GET, Method::HEAD, Method::DELETE].contains(request.method()) {
            return None;
        }
        let body = request.body();
        let seen = body.and_then(|body| Prompt::read(&body, &|text| self.size(text)));
        let first = self.llm.first_estimate;
        let size = seen.as_ref().map(|prompt| prompt.size);
        let max_tokens = seen.as_ref().and_then(|prompt| prompt.max_tokens);
        let model = seen.and_then(|prompt| prompt.model);
        let name = model.unwrap_or_else(|| request.path().to_owned());
        let prompt = match size {
            Some(size) => self.tokens(size, &name),
            None => self.unseen.estimate(&name).unwrap_or(first),
        };
        let usual = self.answers.estimate(&name);
        let answer = match (self.llm.counts, max_tokens) {
            (CountsBy::Produced, Some(most)) => usual.unwrap_or(most).min(most),
            (CountsBy::Produced, None) => usual.unwrap_or(first),
            (_, Some(most)) => most,
            (_, None) => usual.unwrap_or(0).max(first),
        };
        Some(Asked {
            name,
            size,
            prompt,
            answer,
            own: request.extension::<Cost>().copied(),
        })
    }

    /// Returns the size of a text of a prompt.
    fn size(&self, text: &str) -> u64 {
        match &self.llm.tokenizer {
            Some(tokenizer) => tokenizer(text).into(),
            None => text.len() as u64,
        }
    }

    /// Returns how many tokens a prompt of this size is expected to have.
    fn tokens(&self, size: u64, model: &str) -> u32 {
        // Prompts of one model differ little.
        let ratio = match self.ratios.typical(model) {
            Some(TypicalCost::Quantile(ratio)) => u64::from(ratio),
            Some(TypicalCost::LargestOfFew(ratio)) => u64::from(ratio).max(self.first_ratio()),
            None => self.first_ratio(),
        };
        let tokens = size.saturating_mul(ratio).div_ceil(SCALE);
        u32::try_from(tokens)
            .unwrap_or(u32::MAX)
            .saturating_add(FRAME)
    }

    /// Returns the ratio before any response.
    fn first_ratio(&self) -> u64 {
        match self.llm.tokenizer {
            Some(_) => SCALE,
            None => SCALE.div_ceil(3),
        }
    }

    /// Returns how many of a unit a request is expected to take.
    fn expected(&self, asked: &Asked, unit: &str) -> u32 {
        let &Asked {
            prompt,
            answer,
            own,
            ..
        } = asked;
        if let Some(own) = own {
            return own.under(Some(unit));
        }
        match (unit, self.llm.counts) {
            (INPUT, _) => prompt,
            (OUTPUT, _) => answer,
            (_, CountsBy::Larger) => prompt.max(answer),
            (_, CountsBy::Both | CountsBy::Produced) => prompt.saturating_add(answer),
        }
    }

    /// Learns from a response, and states what its request took.
    fn end(&self, asked: &Asked, spent: &Spent, settlement: Option<Settlement>) {
        self.learn(asked, spent);
        let Some(settlement) = settlement else { return };
        settlement.settle(self.cost(|unit| {
            let taken = taken(spent, unit)?;
            Some(match self.llm.gives_back {
                true => taken,
                // What the server has reserved stays reserved.
                false => taken.max(self.expected(asked, unit)),
            })
        }));
    }

    fn learn(&self, asked: &Asked, spent: &Spent) {
        if let Some(tokens) = spent.count(OUTPUT) {
            self.answers.learn(&asked.name, tokens);
        }
        let cached = spent.count("cache_read_input_tokens").unwrap_or(0);
        let Some(tokens) = taken(spent, INPUT).map(|tokens| tokens.saturating_add(cached)) else {
            return;
        };
        match asked.size {
            None => self.unseen.learn(&asked.name, tokens),
            // A token has a byte at least. The others are of images, or of what the server has stored.
            Some(size) if u64::from(tokens) > size.saturating_add(FRAME.into()) => {}
            Some(size) if size.saturating_mul(self.first_ratio()) >= LEAST_TAUGHT * SCALE => {
                let ratio = (u64::from(tokens) * SCALE).div_ceil(size);
                let ratio = u32::try_from(ratio).unwrap_or(u32::MAX);
                self.ratios.learn(&asked.name, ratio);
            }
            Some(_) => {}
        }
    }
}

/// Returns how many of a unit a request took, if the response states that. Tokens that are written to a cache count, and
/// those that are read from one do not.
fn taken(spent: &Spent, unit: &str) -> Option<u32> {
    let written = spent.count("cache_creation_input_tokens").unwrap_or(0);
    let input = spent
        .count(INPUT)
        .map(|input| input.saturating_add(written));
    let output = spent.count(OUTPUT);
    match unit {
        INPUT => input,
        OUTPUT => output,
        _ => {
            let parts = input
                .zip(output)
                .map(|(input, output)| input.saturating_add(output));
            // A total may have tokens that are no part of the answer, such as thoughts, or those of a cache.
            match spent.count("cache_read_input_tokens") {
                Some(1..) => parts.or(spent.count(TOTAL)),
                _ => parts.max(spent.count(TOTAL)),
            }
        }
    }
}
