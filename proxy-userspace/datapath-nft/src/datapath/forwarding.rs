//! What packets need that other nodes forward to this one, beside the chains and elements of Services.

use model::Family;

use super::Datapath;
use crate::{apply::transaction::can_duplicate, encode::elements::Elements, plan::watch::Watch};

impl Datapath {
    /// The families in which a Service is, or was, forwarded.
    pub fn forwarded_families(&self) -> Vec<Family> {
        self.forwarded_families.iter().copied().collect()
    }

    /// The families in which connections that the packet path does not know get a second chance.
    pub fn second_chance(&self) -> Vec<Family> {
        let capable = self.second_chance.iter().flatten();
        capable.copied().filter(|it| self.forwarded_families.contains(it)).collect()
    }

    /// The elements that packets need which other nodes forward: none until a Service is forwarded. They stay, for connections that
    /// outlast its forwarding.
    pub(super) fn forwarding_elements(&mut self) -> Elements {
        let forwarded = Family::ALL.into_iter().filter(|it| self.layout.is_forwarded(*it));
        self.forwarded_families.extend(forwarded);
        let families = self.forwarded_families.clone();
        if families.is_empty() {
            return Elements::new();
        }
        let netfilter = &mut self.netfilter;
        let capable = self.second_chance.get_or_insert_with(|| {
            let is_capable = |it: &Family| {
                let is_capable = can_duplicate(netfilter, *it);
                if !is_capable {
                    tracing::warn!(
                        family = %it,
                        "connections that move to this node are not sent on to the node that knows them: the kernel lacks \
                         nft_dup_ipv4 or nft_dup_ipv6"
                    );
                }
                is_capable
            };
            Family::ALL.into_iter().filter(is_capable).collect()
        });
        let capable = families.into_iter().filter(|it| capable.contains(it));
        capable.map(|it| Watch::SecondChance.element(it)).collect()
    }
}
