//! Estimates against the quantile of all costs that a model keeps.

use std::collections::HashMap;

use proptest::prelude::*;

use super::Estimates;

/// Returns whether `estimate` is the smallest cost that the part `quantile` of the costs does not
/// exceed.
fn is_quantile(estimate: u32, costs: &[u32], quantile: f64) -> bool {
    let part = |is: &dyn Fn(u32) -> bool| {
        costs.iter().filter(|cost| is(**cost)).count() as f64 / costs.len() as f64
    };
    let not_above = part(&|cost| cost <= estimate);
    let below = part(&|cost| cost < estimate);
    // Floating point numbers are not exact.
    let exact = 1e-9;
    costs.contains(&estimate)
        && not_above >= quantile - exact
        && (below < quantile + exact || estimate == *costs.iter().min().unwrap())
}

proptest! {
    #![proptest_config(histories::config(16))]

    #[test]
    fn estimates_are_quantiles_of_the_last_costs(
        quantile in 0.0..=1.0_f64,
        learned in prop::collection::vec((0..3_u8, any::<u32>().prop_map(|cost| cost % 5000)), 0..600),
    ) {
        let estimates = Estimates::new(quantile);
        let mut model: HashMap<u8, Vec<u32>> = HashMap::new();
        for (name, cost) in learned {
            estimates.learn([name], cost);
            let costs = model.entry(name).or_default();
            costs.push(cost);
            let recent = &costs[costs.len().saturating_sub(Estimates::RECENT)..];
            match estimates.estimate([name]) {
                None => prop_assert!(costs.is_empty()),
                Some(estimate) if costs.len() < Estimates::LEAST => {
                    let largest = *costs.iter().max().unwrap();
                    prop_assert!((largest..=4 * largest).contains(&estimate), "{estimate} of {costs:?}");
                }
                Some(estimate) => {
                    prop_assert!(is_quantile(estimate, recent, quantile), "{estimate} of {recent:?}");
                }
            }
        }
    }

    /// Costs of a distribution that does not change exceed the estimate as often as they should.
    #[test]
    fn later_costs_exceed_the_estimate_as_rarely_as_stated(
        seed in any::<u64>(), quantile in prop::sample::select(vec![0.5, 0.9, 0.95]),
    ) {
        let mut state = seed;
        let mut below = |most: u64| {
            // A linear congruential generator.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            u32::try_from((state >> 33) % most).unwrap()
        };
        let estimates = Estimates::new(quantile);
        let (mut above, mut all) = (0_u32, 0_u32);
        for _ in 0..4000 {
            // Most are small, some are large.
            let cost = below(100) * below(100);
            if let Some(estimate) = estimates.estimate("model") {
                above += u32::from(cost > estimate);
                all += 1;
            }
            estimates.learn("model", cost);
        }
        let part = f64::from(above) / f64::from(all);
        prop_assert!((part - (1.0 - quantile)).abs() < 0.03, "{part}");
    }
}

#[test]
fn names_are_bounded_and_the_oldest_is_forgotten() {
    let estimates = Estimates::new(0.95);
    let learn = |name: usize| {
        (0..Estimates::LEAST).for_each(|_| estimates.learn(name.to_string(), 7));
    };
    (0..Estimates::MOST_NAMES).for_each(learn);
    estimates.learn("0", 7);
    learn(Estimates::MOST_NAMES);
    assert_eq!(estimates.lock().costs.len(), Estimates::MOST_NAMES);
    assert_eq!(estimates.estimate("0"), Some(7));
    assert_eq!(estimates.estimate("1"), None);
    assert_eq!(estimates.estimate("2"), Some(7));
    assert_eq!(
        estimates.estimate(Estimates::MOST_NAMES.to_string()),
        Some(7)
    );
}

#[test]
fn odd_quantiles_are_cut() {
    for (quantile, expected) in [(f64::NAN, 40), (7.0, 40), (1.0, 40), (0.0, 1), (-1.0, 1)] {
        let estimates = Estimates::new(quantile);
        (1..=40).for_each(|cost| estimates.learn("a", cost));
        assert_eq!(estimates.estimate("a"), Some(expected), "{quantile}");
    }
}
