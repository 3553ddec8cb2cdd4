//! The choice among the backends of a set: at random or by open connections, fewer to new ones, none to ejected ones.

use crate::{
    counters::{BackendAge, CounterIndex, NO_COUNTER},
    health::Client,
    random::scale,
    tables::{Frontend, FrontendOptions},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The position of the first backend in the family's array.
    pub offset: u32,
    pub count: u32,
    /// The largest share of the backends that is avoided, in percent.
    pub max_ejected: u8,
    pub options: FrontendOptions,
    pub client: Client,
    pub random: u32,
}

impl Choice {
    #[inline(always)]
    pub const fn of(frontend: &Frontend, client: Client, random: u32) -> Self {
        let &Frontend { backend_offset: offset, backend_count: count, health, options, .. } = frontend;
        Self { offset, count, max_ejected: health.max_ejected, options, client, random }
    }
}

/// What a choice knows of backends, each by the counter of its connections.
pub trait BackendStates {
    /// The monotonic clock in nanoseconds.
    fn now(&self) -> u64;
    /// Until when a client avoids a backend, in nanoseconds of that clock; 0 if it does not.
    fn ejected_until(&self, client: Client, backend: CounterIndex) -> u64;
    /// A connection goes to this backend, see [`FailureRecord::try_again`](crate::health::FailureRecord::try_again).
    fn try_again(&self, client: Client, backend: CounterIndex, now: u64);
    /// How many connections to a backend were counted and not yet closed, and its age.
    fn load(&self, backend: CounterIndex) -> (u64, BackendAge);
    /// 0. The verifier does not know, and follows no value that it is added to.
    fn zero(&self) -> u32;
    /// The backend that comes first is ejected, and another one is looked for.
    #[inline(always)]
    fn on_avoided(&self) {}
}

pub const NO_POSITION: u32 = u32::MAX;

/// How many backends are considered when one is ejected.
const SAMPLE_BITS: u32 = 4;

/// The position of a backend that is not ejected for the client, if there is one.
///
/// `first` is the counter of the backend that is preferred, or [`NO_COUNTER`] to choose one by the options. The result is
/// [`NO_POSITION`] if that was given, and is to be used.
///
/// Instead of an ejected backend another one is selected at random, out of the whole set, or of a sample that is spread
/// evenly over a large one: those that fail together are often neighbors, being on one node. No more than the policy
/// allows, and never all, count as ejected.
#[inline(always)]
pub fn choose(
    counter_at: impl Fn(u32) -> Option<CounterIndex>,
    states: &impl BackendStates,
    choice: Choice,
    first: CounterIndex,
) -> u32 {
    let Choice { offset, count, max_ejected, client, random, .. } = choice;
    let counter_of = |at| counter_at(offset + at).unwrap_or(NO_COUNTER);
    let mut at = scale(random, count);
    let (mut position, mut counter) = (NO_POSITION, first);
    if first == NO_COUNTER {
        if choice.options.is_balanced() {
            at = balanced(counter_of, states, &choice);
        }
        position = offset + at;
        counter = counter_of(at);
    }
    let until = states.ejected_until(client, counter);
    if until == 0 {
        return position;
    }
    let now = states.now();
    let size = count.min(1 << SAMPLE_BITS);
    let allowed = size * u32::from(max_ejected);
    if until > now && allowed >= 100 {
        states.on_avoided();
        // Rounded up, so that the sample goes round once. A few come twice.
        let stride = (count + (1 << SAMPLE_BITS) - 1) >> SAMPLE_BITS;
        let zero = states.zero();
        let (mut random, mut good, mut ejected) = (random, zero, zero);
        for number in 0..1 << SAMPLE_BITS {
            if number >= size {
                break;
            }
            at += stride;
            if at >= count {
                at -= count;
            }
            let candidate = counter_of(at);
            ejected += 100;
            if states.ejected_until(client, candidate) <= now || ejected > allowed {
                ejected -= 100;
                good += 1;
                // Each of n good ones is selected with the probability 1/n (reservoir sampling).
                random = next(random);
                if scale(random, good) == 0 {
                    position = offset + at;
                    counter = candidate;
                }
            }
            // Or else the verifier would follow each sequence of outcomes to the end.
            for it in [&mut at, &mut good, &mut ejected, &mut random, &mut position, &mut counter] {
                *it = it.wrapping_add(zero);
            }
        }
    }
    states.try_again(client, counter, now);
    position
}

/// How many backends are drawn for a connection, if they are new.
const DRAWS: u32 = 4;

/// Which backend of a set gets the next connection, by the options of its frontend.
///
/// *Least connections*: of two random ones the one with fewer connections for its share (the power of two choices;
/// Mitzenmacher, 2001). *Slow start*: a new one is drawn again unless chance, as likely as its share is large, keeps it.
#[inline(always)]
fn balanced(
    counter_of: impl Fn(u32) -> CounterIndex,
    states: &impl BackendStates,
    &Choice { count, options, mut random, .. }: &Choice,
) -> u32 {
    let mut at = scale(random, count);
    let slow_start = options.slow_start();
    // The clock of [`BackendAge`].
    let now = (states.now() / 1_000_000_000) as u32;
    let load = |at| {
        let (open, age) = states.load(counter_of(at));
        (open, age.share(now, slow_start))
    };
    if options.least_connections() {
        if count > 1 {
            random = next(random);
            let mut other = at + 1 + scale(random, count - 1);
            if other >= count {
                other -= count;
            }
            let ((open, share), (other_open, other_share)) = (load(at), load(other));
            if (open + 1) * u64::from(other_share) > (other_open + 1) * u64::from(share) {
                at = other;
            }
        }
        return at;
    }
    for _ in 1..DRAWS {
        random = next(random);
        if scale(random, slow_start) < load(at).1 {
            break;
        }
        random = next(random);
        at = scale(random, count);
    }
    at
}

/// A linear congruential generator that is good enough for a few draws (Numerical Recipes, 1992).
#[inline(always)]
const fn next(random: u32) -> u32 {
    random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{cell::RefCell, collections::HashMap};

    use super::*;
    use crate::{health::client, random::mix};

    const SECOND: u64 = 1_000_000_000;
    pub(crate) const CLIENT: u64 = 5;

    #[derive(Default)]
    pub(crate) struct States {
        pub(crate) now: u64,
        /// Until when each backend is avoided.
        pub(crate) ejected: HashMap<CounterIndex, u64>,
        pub(crate) tried: RefCell<Vec<CounterIndex>>,
        /// Open connections, and the second in which the backend came into its Service.
        loads: HashMap<CounterIndex, (u64, u32)>,
    }

    impl BackendStates for States {
        fn now(&self) -> u64 {
            self.now
        }

        fn ejected_until(&self, at: Client, backend: CounterIndex) -> u64 {
            assert_eq!(at, client(CLIENT));
            self.ejected.get(&backend).copied().unwrap_or(0)
        }

        fn try_again(&self, at: Client, backend: CounterIndex, now: u64) {
            assert!(!self.ejected.is_empty(), "none is ejected");
            if (1..=now).contains(&self.ejected_until(at, backend)) {
                self.tried.borrow_mut().push(backend);
            }
        }

        fn load(&self, backend: CounterIndex) -> (u64, BackendAge) {
            assert!(!self.loads.is_empty(), "chosen at random");
            let (open, began) = self.loads.get(&backend).copied().unwrap_or_default();
            (open, BackendAge { began, correction: 0 })
        }

        fn zero(&self) -> u32 {
            0
        }
    }

    impl States {
        /// The backend that a connection to a set of `count` gets.
        fn connect(&self, count: u32, options: FrontendOptions, number: u64) -> u32 {
            let (max_ejected, client, random) = (100, client(CLIENT), mix(number, 3));
            let choice = Choice { offset: 100, count, max_ejected, options, client, random };
            choose(Some, self, choice, NO_COUNTER)
        }

        /// How many of 10,000 connections each of `count` backends gets.
        fn shares(&self, count: u32, options: FrontendOptions) -> Vec<u32> {
            let mut shares = vec![0; count as usize];
            for number in 0..10_000 {
                shares[self.connect(count, options, number) as usize - 100] += 1;
            }
            shares
        }
    }

    fn options(least_connections: bool, slow_start: u16) -> FrontendOptions {
        FrontendOptions::new(false, least_connections, slow_start)
    }

    #[test]
    fn the_backend_with_fewer_connections_is_chosen() {
        let mut states = States::default();
        states.loads.extend([(100, (5, 0)), (101, (3, 0)), (102, (4, 0))]);
        let shares = states.shares(3, options(true, 0));
        // The most loaded one gets none, the other two by how often both are drawn.
        assert_eq!(shares[0], 0);
        assert!(shares[1].abs_diff(6_667) < 300 && shares[2].abs_diff(3_333) < 300, "{shares:?}");
        assert_eq!(states.shares(1, options(true, 0)), [10_000]);
    }

    #[test]
    fn the_share_of_a_new_backend_grows() {
        let mut states = States::default();
        states.loads.insert(100, (0, 1_000));
        let at_full_share = 10_000 / 4;
        for (age, part) in [(0, 0.1), (2, 0.1), (5, 0.25), (10, 0.5), (15, 0.75), (20, 1.0), (100, 1.0)] {
            states.now = (1_000 + age) * SECOND;
            let shares = states.shares(4, options(false, 20));
            let expect = f64::from(at_full_share) * part / (0.75 + part / 4.0);
            assert!((f64::from(shares[0]) - expect).abs() < 150.0, "after {age} s {shares:?}, not {expect}");
            let others = &shares[1..];
            assert!(others.iter().max().unwrap() - others.iter().min().unwrap() < 300, "{shares:?}");
        }
    }

    #[test]
    fn where_all_backends_are_new_all_have_the_same_share() {
        let mut states = States { now: 1_000 * SECOND, ..States::default() };
        states.loads.extend((100..104).map(|it| (it, (0, 999))));
        for options in [options(false, 60), options(true, 60)] {
            let shares = states.shares(4, options);
            assert!(shares.iter().all(|it| it.abs_diff(2_500) < 300), "{shares:?}");
        }
    }

    /// By its share: as if it had so many more connections.
    #[test]
    fn a_new_backend_without_connections_is_not_flooded() {
        let mut states = States { now: 1_002 * SECOND, ..States::default() };
        states.loads.extend([(100, (0, 1_000)), (101, (20, 0)), (102, (20, 0))]);
        let mut number = 0;
        let mut open_at = |states: &mut States| {
            for _ in 0..100 {
                number += 1;
                let backend = states.connect(3, options(true, 20), number);
                // One connection of the others ends for each that begins.
                if backend == 100 {
                    states.loads.get_mut(&100).unwrap().0 += 1;
                }
            }
            states.loads[&100].0
        };
        assert_eq!(open_at(&mut states), 2);
        states.now = 1_010 * SECOND;
        assert_eq!(open_at(&mut states), 10);
        states.now = 1_020 * SECOND;
        // A tie may go to either.
        assert_eq!(open_at(&mut states), 21);
    }
}
