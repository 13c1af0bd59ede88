//! Draws histories.

use super::dice::Dice;
use super::features::{Feature, Features};
use super::known;
use super::plan::{
    Answer, History, LimiterPlan, OnAway, Part, Patience, Rate, Request, Shares, Step, StorePlan,
    Then, Via,
};

/// Returns whether no history can have both features.
pub(crate) fn cannot_meet(one: Feature, other: Feature) -> bool {
    use Feature::*;
    let pair = |a, b| (one, other) == (a, b) || (one, other) == (b, a);
    // Calls in flight have no shares without the store; a process fails open or has a share; and a layer
    // with both kinds of limits of requests would need two windows.
    let never = pair(FailOpen, FallbackShare) || pair(InFlight, FallbackShare);
    // Only sliding windows can count late, and shares need whole units.
    let by_kind = pair(Bucket, Fixed);
    let known = (known::GUARD_DURING_OUTAGES.stands()
        && (pair(Guard, Outages)
            || pair(Guard, Lossy)
            || pair(Guard, FailOpen)
            || pair(Guard, FallbackShare)))
        || (known::GUARD_WITH_FEW_KEYS.stands() && pair(Guard, FewKeys))
        || (known::EXPLAINED_SHARES.stands() && pair(Explain, Deploys));
    never || by_kind || known
}

/// Returns the features that `feature` needs.
fn needs(feature: Feature) -> &'static [Feature] {
    use Feature::*;
    match feature {
        Deploys => &[Classes, Processes],
        Retry => &[Layer, Refusals],
        Lossy | Outages => &[Late],
        FailOpen | FallbackShare => &[Late, Outages],
        Deaths => &[Late, Processes],
        FewKeys => &[Keys],
        Guard => &[Refusals],
        _ => &[],
    }
}

/// Adds a feature and those that it needs, if all of them can meet.
fn add(features: &mut Features, feature: Feature, is_direct: bool) {
    let mut more = *features;
    let mut open = vec![feature];
    while let Some(feature) = open.pop() {
        more.add(feature);
        open.extend(needs(feature));
    }
    let fits = |one: Feature| more.all().all(|other| !cannot_meet(one, other));
    let is_possible = more.all().all(fits);
    if is_possible && !(is_direct && more.has(Feature::Late)) {
        *features = more;
    }
}

/// Returns all pairs that can meet. Those that need most are the first, because they are rarest.
fn pairs() -> Vec<(Feature, Feature)> {
    let all = || Feature::ALL.iter().copied();
    let pairs = all().flat_map(|one| all().map(move |other| (one, other)));
    let mut pairs: Vec<_> = pairs
        .filter(|(one, other)| one < other && !cannot_meet(*one, *other))
        .collect();
    pairs.sort_by_key(|(one, other)| std::cmp::Reverse(needs(*one).len() + needs(*other).len()));
    pairs
}

/// Returns the number of a history that begins with this pair, another one in each round.
pub(crate) fn number_of(one: Feature, other: Feature, round: u64) -> u64 {
    let pairs = pairs();
    let index = pairs.iter().position(|pair| *pair == (one, other));
    index.unwrap_or(0) as u64 + round * pairs.len() as u64
}

/// Draws features. Each number begins with another pair, so that few histories have all of them.
fn features(dice: &mut Dice, number: u64) -> Features {
    let pairs = pairs();
    let (one, other) = pairs[(number % pairs.len() as u64) as usize];
    let mut features = Features::default();
    // `TOLLGATE_FEATURES` names features that all histories have, to look for one fault.
    let named = std::env::var("TOLLGATE_FEATURES").unwrap_or_default();
    for feature in Feature::ALL {
        if named.split(',').any(|name| name == format!("{feature:?}")) {
            add(&mut features, *feature, false);
        }
    }
    add(&mut features, one, false);
    add(&mut features, other, false);
    let wanted = if dice.chance(70) {
        dice.between(4, 9)
    } else {
        dice.between(2, 3)
    };
    let is_direct = !features.has(Feature::Late) && dice.chance(60);
    for _ in 0..60 {
        if u64::from(features.len()) < wanted {
            add(&mut features, dice.pick(Feature::ALL), is_direct);
        }
    }
    if !is_direct {
        features.add(Feature::Late);
    }
    features
}

/// Draws history `number`.
pub(crate) fn history(dice: &mut Dice, number: u64) -> History {
    let features = features(dice, number);
    of_features(dice, features)
}

/// Draws a history for a Redis and the real clock: it takes some seconds, and nothing of it depends on when the
/// store answers.
pub(crate) fn real_history(dice: &mut Dice) -> History {
    use Feature::*;
    let mut drawn = Features::default();
    drawn.add(Processes);
    for _ in 0..4 {
        let one = dice.pick(&[
            Costs, Keys, Joint, Units, InFlight, Bucket, Classes, Settle, Cancel, Idle, Holds,
            Refusals, Deadlines, GiveBack,
        ]);
        if drawn.all().all(|other| !cannot_meet(one, other)) {
            drawn.add(one);
        }
    }
    let mut history = of_features(dice, drawn);
    history.steps.truncate(40);
    for (pause, step) in &mut history.steps {
        *pause = (*pause).min(150);
        if let Step::Request(request) = step {
            // A layer reads the clock before the upstream does.
            request.via = Via::Acquire;
        }
    }
    for plan in &mut history.limiters {
        plan.max_wait = plan.max_wait.min(4000);
        plan.max_hold = plan.max_hold.min(1500);
    }
    history
}

struct Draw<'a> {
    dice: &'a mut Dice,
    features: Features,
}

/// Draws a history with these features.
fn of_features(dice: &mut Dice, features: Features) -> History {
    let mut draw = Draw { dice, features };
    let limiters = draw.limiters();
    let releases = draw.releases();
    let processes = if draw.has(Feature::Processes) {
        draw.dice.between(2, 4)
    } else {
        1
    };
    let processes = (0..processes)
        .map(|number| number as usize % releases.len())
        .collect();
    let store = draw.store();
    let on_store_error = match features {
        _ if draw.has(Feature::FailOpen) => OnAway::FailOpen,
        _ if draw.has(Feature::FallbackShare) => OnAway::Share(draw.dice.pick(&[25, 50])),
        _ => OnAway::FailClosed,
    };
    let count = if draw.dice.chance(15) {
        draw.dice.between(60, 150)
    } else {
        draw.dice.between(8, 60)
    };
    let calm = draw.dice.chance(50);
    let steps = (0..count).map(|_| draw.step(&limiters, calm)).collect();
    History {
        features,
        dice: draw.dice.next(),
        limiters,
        store,
        on_store_error,
        releases,
        processes,
        steps,
    }
}

impl Draw<'_> {
    fn has(&self, feature: Feature) -> bool {
        self.features.has(feature)
    }

    fn limiters(&mut self) -> Vec<LimiterPlan> {
        let count = if self.has(Feature::Joint) {
            self.dice.between(2, 3)
        } else {
            1
        };
        // A long time of the upstream's count is for all limiters of a request.
        let late = self.has(Feature::Settle)
            && self.dice.chance(25)
            && !self.features.any(&[Feature::Bucket, Feature::Fixed]);
        let late = if late {
            self.dice.pick(&[500, 2000, 5000])
        } else {
            0
        };
        (0..count as usize)
            .map(|number| self.limiter(number, late))
            .collect()
    }

    fn rate(&mut self, number: usize, window: u64) -> Rate {
        let is_divided = self.has(Feature::Classes) && number == 0;
        let count = if is_divided {
            self.dice.count(20, 80)
        } else {
            self.dice.count(1, 24)
        };
        match number {
            0 if self.has(Feature::Bucket) => {
                let low = if is_divided { 20 } else { 3 };
                Rate::Bucket {
                    capacity: self.dice.count(low, 40),
                    count: self.dice.count(low, 40),
                    window,
                }
            }
            0 if self.has(Feature::Fixed) => Rate::Fixed { count, window },
            _ => Rate::Sliding { count, window },
        }
    }

    fn limiter(&mut self, number: usize, late: u64) -> LimiterPlan {
        let is_divided = self.has(Feature::Classes) && number == 0;
        // A small bucket that is refilled in 200 ms is refused: it would lose much of its rate to the slack.
        let is_long = self
            .features
            .any(&[Feature::Late, Feature::Fixed, Feature::Bucket]);
        let windows: &[u64] = if is_long {
            &[1000, 1000, 5000, 60_000]
        } else {
            &[200, 1000, 1000, 3000, 60_000]
        };
        let window = self.dice.pick(windows);
        let mut rates = vec![self.rate(number, window)];
        if let (Rate::Sliding { count, .. }, true) = (rates[0], self.dice.chance(20)) {
            rates.push(Rate::Sliding {
                count: count * 3,
                window: window * 5,
            });
        }
        let longest = window * if rates.len() > 1 { 5 } else { 1 };
        let tokens =
            (self.has(Feature::Units) && (number == 0 || self.dice.chance(50))).then(|| {
                let low = if is_divided { 100 } else { 20 };
                Rate::Sliding {
                    count: self.dice.count(low, 500),
                    window: self.dice.pick(&[window, longest]),
                }
            });
        let max_wait = match self.dice.below(6) {
            0 => 0,
            1 => self.dice.between(1, 200),
            2 => longest / 2,
            _ => longest * 3 + self.dice.between(1000, 20_000),
        };
        LimiterPlan {
            rates,
            tokens,
            in_flight: (self.has(Feature::InFlight) && (number == 0 || self.dice.chance(30)))
                .then(|| self.dice.count(1, 6)),
            keys: match number {
                _ if self.has(Feature::Keys) => self.dice.count(2, 4) as u8,
                // One limiter may count all requests together.
                0 => u8::from(self.dice.chance(50)),
                _ => 1,
            },
            max_wait,
            max_hold: self.dice.pick(&[1500, 5000, 60_000]),
            max_queue: if self.has(Feature::ShortQueue) {
                self.dice.between(1, 4) as usize
            } else {
                1000
            },
            max_keys: if self.has(Feature::FewKeys) {
                self.dice.between(1, 3) as usize
            } else {
                1000
            },
            settles: self.has(Feature::Settle) && (late > 0 || self.dice.chance(80)),
            counted_within: late,
            is_divided,
            lends: self.dice.pick(&[0, 75, 97, 100]),
            guard: (self.has(Feature::Guard) && number == 0)
                .then(|| (self.dice.count(1, 6), self.dice.pick(&[5000, 20_000]))),
        }
    }

    fn releases(&mut self) -> Vec<Shares> {
        if !self.has(Feature::Classes) {
            return vec![vec![]];
        }
        let shares = |web, jobs| vec![("web", web), ("jobs", jobs)];
        let all = [
            shares(50, 30),
            shares(30, 50),
            shares(10, 85),
            shares(20, 20),
        ];
        let first = self.dice.pick(&all);
        if !self.has(Feature::Deploys) {
            return vec![first];
        }
        let other = if self.dice.chance(40) {
            vec![]
        } else {
            self.dice.pick(&all)
        };
        if self.dice.chance(50) {
            vec![first, other]
        } else {
            vec![other, first]
        }
    }

    fn store(&mut self) -> StorePlan {
        let trip = self.has(Feature::Late).then(|| {
            let low = self.dice.between(1, 6);
            (low, low + self.dice.below(5))
        });
        let lost = if self.has(Feature::Lossy) {
            (self.dice.between(0, 10), self.dice.between(1, 10))
        } else {
            (0, 0)
        };
        StorePlan {
            trip,
            lost,
            has_sessions: self.dice.chance(30),
            has_background: self.dice.chance(60),
        }
    }

    fn step(&mut self, limiters: &[LimiterPlan], calm: bool) -> (u64, Step) {
        let pause = match self.dice.below(10) {
            0..=3 => 0,
            4..=6 => self.dice.between(1, 60),
            7 | 8 => self.dice.between(20, 400),
            _ => self.dice.between(200, if calm { 6000 } else { 1500 }),
        };
        (pause, self.event(limiters))
    }

    fn event(&mut self, limiters: &[LimiterPlan]) -> Step {
        let process = self.dice.below(8) as usize;
        let limiter = self.dice.below(limiters.len() as u64) as usize;
        let key = self.dice.below(u64::from(limiters[limiter].keys.max(1))) as u8;
        let mut events: Vec<Feature> = [
            Feature::Explain,
            Feature::Holds,
            Feature::SetQuota,
            Feature::Restarts,
            Feature::Deaths,
            Feature::Stalls,
            Feature::Outages,
        ]
        .into_iter()
        .filter(|feature| self.has(*feature))
        .collect();
        if self.has(Feature::Drain) && self.dice.chance(3) {
            return Step::Drain {
                process,
                within: self.dice.between(0, 5000),
            };
        }
        if events.is_empty() || !self.dice.chance(12 + 4 * events.len() as u64) {
            return Step::Request(self.request(limiters));
        }
        if events.len() > 1 {
            // What ends processes or the store is rare.
            let is_rare = |feature: &Feature| {
                matches!(
                    feature,
                    Feature::Deaths | Feature::Restarts | Feature::Outages
                )
            };
            if self.dice.chance(50) && events.iter().any(|feature| !is_rare(feature)) {
                events.retain(|feature| !is_rare(feature));
            }
        }
        match self.dice.pick(&events) {
            Feature::Explain => Step::Explain(self.request(limiters)),
            Feature::Holds if self.dice.chance(65) => Step::Hold {
                process,
                limiter,
                key,
                span: self.dice.between(1, 4000),
            },
            Feature::Holds => Step::Release {
                process,
                limiter,
                key,
            },
            Feature::SetQuota if self.dice.chance(70) => Step::SetQuota {
                process,
                limiter,
                key,
                percent: self.percent(&limiters[limiter]),
            },
            Feature::SetQuota => Step::UnsetQuota {
                process,
                limiter,
                key,
            },
            Feature::Restarts => match self.dice.below(4) {
                0 => Step::Stop { process },
                1 => Step::EndRuntime { process },
                _ => Step::Start {
                    release: self.release(),
                },
            },
            Feature::Deaths if self.dice.chance(40) => Step::Kill { process },
            Feature::Deaths => Step::Start {
                release: self.release(),
            },
            Feature::Stalls => Step::Stall {
                process,
                span: self.dice.between(5, 3000),
            },
            _ => Step::Away {
                span: self.dice.pick(&[100, 700, 3000, 9000]),
            },
        }
    }

    fn release(&mut self) -> usize {
        if self.has(Feature::Deploys) {
            self.dice.below(2) as usize
        } else {
            0
        }
    }

    fn percent(&mut self, plan: &LimiterPlan) -> u32 {
        let low = if plan.is_divided { 100 } else { 34 };
        self.dice.pick(&[low, 50.max(low), 150, 300])
    }

    fn request(&mut self, limiters: &[LimiterPlan]) -> Request {
        let via = match (self.has(Feature::Layer), self.has(Feature::Retry)) {
            (_, true) if self.dice.chance(50) => Via::Retry,
            (true, _) if self.dice.chance(60) => Via::Layer,
            _ => Via::Acquire,
        };
        let actual =
            limiters[0].settles && (limiters[0].counted_within > 0 || self.dice.chance(75));
        let mut parts = self.parts(limiters);
        if via != Via::Acquire || actual {
            // A settlement and a layer state one cost for all keys.
            let least = |of: fn(&Part) -> u32| parts.iter().map(of).min().unwrap_or(0);
            let (cost, tokens) = (least(|part| part.cost), least(|part| part.tokens));
            parts
                .iter_mut()
                .for_each(|part| (part.cost, part.tokens) = (cost, tokens));
        }
        let patience = match self.dice.below(10) {
            0 | 1 if self.has(Feature::Cancel) => Patience::Time(self.dice.between(0, 4000)),
            2 | 3 if self.has(Feature::Cancel) => Patience::Polls(self.dice.count(0, 4)),
            4 if self.has(Feature::Idle) => Patience::Idle {
                polls: self.dice.count(0, 3),
                rest: self.dice.between(1, 5000),
                waits: self.dice.chance(50),
            },
            _ => Patience::Endless,
        };
        let mut takes = if self.dice.chance(40) {
            1
        } else {
            self.dice.between(1, 900)
        };
        let late = limiters[0].counted_within;
        let actual = actual.then(|| {
            let is_safe = self.features.any(&[
                Feature::Late,
                Feature::Processes,
                Feature::Restarts,
                Feature::Bucket,
                Feature::Fixed,
            ]) || late > 0
                || self.dice.chance(70);
            let percent = self.dice.count(0, if is_safe { 100 } else { 200 });
            let after = self.dice.between(20, if late > 0 { late } else { 3000 });
            takes = takes.min(after - 15).max(1);
            (percent, after)
        });
        let is_back = self.has(Feature::GiveBack) && self.dice.chance(20);
        let answer = match self.dice.below(12) {
            0 | 1 if self.has(Feature::Refusals) => {
                let stated = self.dice.chance(70).then(|| self.dice.between(0, 8));
                Answer::Refused(stated)
            }
            2 | 3 if self.has(Feature::Guard) => Answer::Bad,
            4 => Answer::Nothing,
            _ => Answer::Ok,
        };
        let then = match via {
            Via::Acquire if is_back && late == 0 => Then::GiveBack(self.dice.between(1, 40)),
            Via::Acquire if self.dice.chance(15) => Then::Use {
                after: self.dice.between(1, 30),
                answer,
            },
            _ => Then::Use { after: 0, answer },
        };
        Request {
            process: self.dice.below(8) as usize,
            parts,
            class: self
                .has(Feature::Classes)
                .then(|| {
                    self.dice
                        .pick(&[Some("web"), Some("jobs"), Some("cron"), None])
                })
                .flatten(),
            deadline: (self.has(Feature::Deadlines) && self.dice.chance(30))
                .then(|| self.dice.between(0, 5000)),
            via,
            patience,
            transit: self.dice.pick(&[0, 0, 3, 9]),
            takes,
            then,
            actual,
        }
    }

    fn parts(&mut self, limiters: &[LimiterPlan]) -> Vec<Part> {
        let all = if self.dice.chance(60) {
            limiters.len()
        } else {
            1
        };
        (0..all)
            .map(|limiter| {
                let plan = &limiters[limiter];
                let most = plan.most() / if plan.is_divided { 8 } else { 1 };
                let cost = match self.dice.below(6) {
                    0 if self.has(Feature::Costs) => 0,
                    1 | 2 if self.has(Feature::Costs) => self.dice.count(1, most.clamp(1, 6)),
                    _ => 1,
                };
                let tokens = plan.tokens.map_or(0, |rate| {
                    let most = rate.most() / if plan.is_divided { 10 } else { 2 };
                    self.dice.count(0, most.max(1))
                });
                Part {
                    limiter,
                    key: self.dice.below(u64::from(plan.keys.max(1))) as u8,
                    cost,
                    tokens,
                }
            })
            .collect()
    }
}
