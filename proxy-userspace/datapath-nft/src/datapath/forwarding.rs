//! What packets need that other nodes forward to this one, beside the chains and elements of Services.

use model::Family;

use super::Datapath;
use crate::{
    apply::transaction::can_duplicate,
    encode::{elements::Elements, tables::FAMILIES},
    plan::watch::Watch,
};

impl Datapath {
    /// The elements that packets need which other nodes forward: none while no Service is forwarded.
    pub(super) fn forwarding_elements(&mut self) -> Elements {
        let families: Vec<_> = FAMILIES.into_iter().filter(|it| self.layout.is_forwarded(*it)).collect();
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
            FAMILIES.into_iter().filter(is_capable).collect()
        });
        let capable = families.into_iter().filter(|it| capable.contains(it));
        capable.map(|it| Watch::SecondChance.element(it)).collect()
    }
}
