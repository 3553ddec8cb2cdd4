//! Rules of kube-proxy beside ours.
//!
//! Invariant: they are only looked for, at a cost that does not depend on their number.

use model::Family;
use nix::errno::Errno;

use crate::{encode::expressions::protocol_family, error::Error};
use netlink::{
    Attribute, Message, Netfilter,
    uapi::{NFT_MSG_GETCHAIN, NFT_MSG_GETTABLE, NFTA_CHAIN_NAME, NFTA_TABLE_NAME},
};

/// Its table in nftables mode.
const TABLE: &str = "kube-proxy";
/// A table and its chain in iptables mode, where `iptables` writes to nftables.
const IPTABLES: (&str, &str) = ("nat", "KUBE-SERVICES");

/// Whether kube-proxy has rules in nftables or in iptables over nftables.
pub(crate) fn has_rules(netfilter: &mut Netfilter) -> Result<bool, Error> {
    let queries = Family::ALL.map(|family| {
        let family = protocol_family(family);
        let (table, chain) = IPTABLES;
        let chain = [Attribute::text(NFTA_TABLE_NAME, table), Attribute::text(NFTA_CHAIN_NAME, chain)];
        [
            Message::nf_tables(NFT_MSG_GETTABLE, family, [Attribute::text(NFTA_TABLE_NAME, TABLE)]),
            Message::nf_tables(NFT_MSG_GETCHAIN, family, chain),
        ]
    });
    let queries = queries.concat();
    let failed = |errno| Error::Read { what: "objects of kube-proxy beside those", errno };
    let missing = netfilter.each(&queries).map_err(failed)?;
    match missing.iter().find(|it| it.errno != Errno::ENOENT) {
        Some(refused) => Err(failed(refused.errno)),
        None => Ok(missing.len() < queries.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        apply::transaction::commit,
        encode::tables::{delete_table, in_table, new_chain, new_table},
        in_netns::in_netns,
    };

    #[test]
    fn rules_of_kube_proxy_are_found_in_either_form_and_family() {
        in_netns(|| {
            let mut netfilter = Netfilter::open().unwrap();
            assert!(!has_rules(&mut netfilter).unwrap());
            for (family, table, chain) in [
                (Family::V4, "nat", "PREROUTING"),
                (Family::V6, "nat", "KUBE-SERVICES"),
                (Family::V4, "kube-proxy", "any"),
            ] {
                let create = [new_table(family, ""), new_chain(family, chain, None)];
                let create = create.map(|it| in_table(table, it));
                let delete = in_table(table, delete_table(family));
                commit(&mut netfilter, create).unwrap();
                assert_eq!(has_rules(&mut netfilter).unwrap(), chain != "PREROUTING", "{table} {chain}");
                commit(&mut netfilter, [delete]).unwrap();
                assert!(!has_rules(&mut netfilter).unwrap());
            }
        });
    }
}
