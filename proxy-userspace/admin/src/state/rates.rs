//! Rates of the kernel's counters between two readings, as the page and `top` plot them.

use std::{collections::VecDeque, iter};

use datapath::PortCounts;

/// The newest `N` rates per second, the newest one last. Zeros before the first other rate are only counted: most Services are
/// idle.
#[derive(Clone, Debug, Default)]
pub struct History<const N: usize> {
    zeros: usize,
    rates: VecDeque<f32>,
}

impl<const N: usize> History<N> {
    /// Adds a rate; the oldest one of more than `N` is dropped.
    pub fn push(&mut self, rate: f64) {
        self.rates.push_back(rate as f32);
        if self.len() > N && self.zeros > 0 {
            self.zeros -= 1;
        } else if self.len() > N {
            self.rates.pop_front();
        }
        while self.rates.pop_front_if(|it| *it == 0.0).is_some() {
            self.zeros += 1;
        }
        if self.is_zero() {
            self.rates = VecDeque::new();
        }
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = f64> {
        iter::repeat_n(0.0, self.zeros).chain(self.rates.iter().map(|it| f64::from(*it)))
    }

    pub(crate) fn len(&self) -> usize {
        self.zeros + self.rates.len()
    }

    /// Whether no rate differs from zero.
    pub fn is_zero(&self) -> bool {
        self.rates.is_empty()
    }

    /// The newest rate; zero if there is none.
    pub fn now(&self) -> f64 {
        self.rates.back().copied().unwrap_or_default().into()
    }
}

/// Rates per second of a Service or a service port, with those of the newest `N` intervals.
#[derive(Clone, Debug, Default)]
pub struct Rates<const N: usize> {
    /// Of connections that were redirected.
    pub connections: History<N>,
    /// Of connections that found no endpoint, in the last interval.
    pub refused: f64,
    /// Of calls that were denied for another reason, in the last interval.
    pub denied: f64,
    /// Of packets from outside that are forwarded whole, and that this node sends on, receives or serves, in the last interval.
    pub forwarded: f64,
}

impl<const N: usize> Rates<N> {
    /// Adds the rates of an interval of so many seconds. A counter that was reset has the rate zero.
    pub fn add(&mut self, now: PortCounts, before: PortCounts, seconds: f64) {
        self.connections.push(rate(now.connections, before.connections, seconds));
        self.refused = rate(now.no_backend, before.no_backend, seconds);
        self.denied = rate(now.denied, before.denied, seconds);
        self.forwarded = rate(now.forwarding.packets(), before.forwarding.packets(), seconds);
    }
}

/// The increase of a counter per second; zero if it was reset.
pub fn rate(now: u64, before: u64, seconds: f64) -> f64 {
    now.saturating_sub(before) as f64 / seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_is_bounded_and_leading_zeros_are_counted() {
        let mut history = History::<3>::default();
        for (rate, expect) in [
            (0.0, vec![0.0]),
            (0.0, vec![0.0, 0.0]),
            (1.0, vec![0.0, 0.0, 1.0]),
            (0.0, vec![0.0, 1.0, 0.0]),
            (2.0, vec![1.0, 0.0, 2.0]),
            (0.0, vec![0.0, 2.0, 0.0]),
            (0.0, vec![2.0, 0.0, 0.0]),
            (0.0, vec![0.0, 0.0, 0.0]),
        ] {
            history.push(rate);
            assert_eq!(history.iter().collect::<Vec<_>>(), expect);
        }
        assert!(history.is_zero() && history.rates.capacity() == 0);
    }
}
