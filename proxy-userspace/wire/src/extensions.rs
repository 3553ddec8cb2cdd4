//! Extensions of KPNG's API, which a client requests and a server confirms.
//!
//! Invariant: a server uses an extension only if the client requested it and the server knows it.

use proxy_contract::localv1::Extension;

/// A set of [`Extension`]s: a bit for each, by its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extensions(u32);

impl Extensions {
    /// The extensions of a stream of one node's state.
    pub const LOCAL: Self = Self::of(&[
        Extension::Revisions,
        Extension::TriggerTimes,
        Extension::Nodes,
        Extension::OtherServing,
        Extension::ServiceCidrs,
        Extension::ConflictingAddresses,
        Extension::Pods,
        Extension::Forwarding,
        Extension::Resume,
        Extension::Heartbeats,
    ]);
    /// The extensions of a long poll of one node's state.
    pub const POLL: Self = Self::LOCAL.without(&[Extension::Resume, Extension::Heartbeats]);
    /// The extensions of a stream of the cluster state.
    pub const GLOBAL: Self = Self::of(&[
        Extension::TriggerTimes,
        Extension::OtherProxies,
        Extension::ServiceCidrs,
        Extension::Pods,
        Extension::Resume,
        Extension::Heartbeats,
    ]);

    pub const fn of(extensions: &[Extension]) -> Self {
        let (mut set, mut index) = (0_u32, 0);
        while index < extensions.len() {
            set |= bit(extensions[index]);
            index += 1;
        }
        Self(set)
    }

    /// The other extensions of this set.
    #[must_use]
    pub const fn without(self, extensions: &[Extension]) -> Self {
        Self(self.0 & !Self::of(extensions).0)
    }

    pub const fn has(self, extension: Extension) -> bool {
        self.0 & bit(extension) != 0
    }

    /// The requested extensions that this set contains.
    #[must_use]
    pub fn negotiate(self, requested: impl IntoIterator<Item = Extension>) -> Self {
        Self(self.0 & requested.into_iter().fold(0_u32, |set, it| set | bit(it)))
    }

    /// The extensions of this set, in the order of their numbers.
    pub fn iter(self) -> impl Iterator<Item = Extension> {
        let all = (0..u32::BITS as i32).filter_map(|it| Extension::try_from(it).ok());
        all.filter(move |it| self.has(*it))
    }

    /// The extensions of this set, as the numbers of a message.
    pub fn numbers(self) -> Vec<i32> {
        self.iter().map(Into::into).collect()
    }
}

const fn bit(extension: Extension) -> u32 {
    1 << extension as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_both_sides_know_of_the_extensions_is_used() {
        let sets = [Extensions::LOCAL, Extensions::POLL, Extensions::GLOBAL, Extensions::default()];
        let known = || (0..100).filter_map(|it| Extension::try_from(it).ok());
        for set in sets {
            assert_eq!(set.negotiate(known()), set, "all are requested");
            assert_eq!(set.negotiate([]), Extensions::default(), "none is requested");
            for it in known() {
                let one: Vec<_> = set.negotiate([it]).iter().collect();
                assert_eq!(one, Vec::from_iter(set.iter().find(|own| *own == it)), "{it:?} is requested");
            }
            assert_eq!(set.numbers(), set.iter().map(|it| it as i32).collect::<Vec<_>>());
        }
        let sets = [Extensions::LOCAL, Extensions::GLOBAL, Extensions::POLL];
        for it in [Extension::Resume, Extension::Heartbeats] {
            assert_eq!(sets.map(|set| set.has(it)), [true, true, false], "a poll is no stream");
        }
    }
}
