//! Stale conntrack entries: what of a change they depend on is recorded while it is applied, and they are deleted after it.

use datapath::FrontendAddress;
use model::{Family, Protocol};
use netlink::flow_cleanup::{FlowPass, FlowRules, delete_stale_flows};

use super::Datapath;
use crate::{
    error::Error,
    plan::{
        compile::PortImage,
        layout::{Changed, Update},
    },
};

impl Datapath {
    /// Deletes the conntrack entries that have become stale since the last call; returns whether a second pass is due in a
    /// moment.
    ///
    /// # Errors
    ///
    /// Entries that remain expire, or are deleted by the next call.
    pub fn finish_generation(&mut self) -> Result<bool, Error> {
        if !self.has_new_flow_rules {
            return Ok(false);
        }
        self.delete_stale_flows()?;
        self.has_new_flow_rules = false;
        Ok(true)
    }

    /// Deletes the entries that the pass before could not see: of packets that were on their way through the old rules, and
    /// are listed only once they have left.
    ///
    /// # Errors
    ///
    /// Entries that remain expire, or are deleted by the next call.
    pub fn finish_generation_again(&mut self) -> Result<(), Error> {
        self.delete_stale_flows()?;
        // Rules that came since have a second pass of their own.
        if !self.has_new_flow_rules {
            self.flow_rules = FlowRules::default();
        }
        Ok(())
    }

    fn delete_stale_flows(&self) -> Result<(), Error> {
        let own = self.host.node_port_addresses(&self.options.config.node_port_addresses);
        let passes = delete_stale_flows(&self.flow_rules, &own).map_err(Error::Flows)?;
        for FlowPass { is_ipv6, took, deleted } in passes {
            (self.options.on_flow_pass.0)(if is_ipv6 { Family::V6 } else { Family::V4 }, took, deleted);
        }
        let deleted: usize = passes.iter().map(|it| it.deleted).sum();
        if deleted > 0 {
            tracing::info!(deleted, "stale conntrack entries deleted");
        }
        Ok(())
    }

    /// Records where flows to these frontends may lead, whether they have changed or not.
    pub(super) fn record_all_flow_rules(&mut self, is_affected: impl Fn(&FrontendAddress) -> bool) {
        for port in self.layout.ports().filter(|it| it.identity.protocol != Protocol::Tcp) {
            for it in port.frontends.iter().map(|it| it.address).filter(&is_affected) {
                self.flow_rules.allow(it.protocol.number(), it.address, port.allowed());
                self.has_new_flow_rules = true;
            }
        }
    }

    /// Records where flows to changed frontends may lead from now on.
    pub(super) fn record_flow_rules(&mut self, update: &Update) {
        // A cleanup lists all flows of the host, so unchanged ports are skipped; but rules that exist already must be updated.
        let is_fresh = self.flow_rules.is_empty();
        let keeps_flows = |port: &PortImage, Changed { before, after }: &Changed| {
            let same = |it: &&PortImage| it.identity == port.identity;
            let [before, after] = [before, after].map(|image| image.ports.iter().find(same));
            before.zip(after).is_some_and(|(before, after)| after.keeps_flows_of(before))
        };
        let is_affected = |port: &&PortImage, changed: &Changed| {
            port.identity.protocol != Protocol::Tcp && !(is_fresh && keeps_flows(port, changed))
        };
        // An address that moves from one Service to another is withdrawn first.
        for changed in &update.services {
            for port in changed.before.ports.iter().filter(|it| is_affected(it, changed)) {
                for FrontendAddress { address, protocol } in port.frontends.iter().map(|it| it.address) {
                    self.flow_rules.withdraw(protocol.number(), address);
                    self.has_new_flow_rules = true;
                }
            }
        }
        for changed in &update.services {
            for port in changed.after.ports.iter().filter(|it| is_affected(it, changed)) {
                for FrontendAddress { address, protocol } in port.frontends.iter().map(|it| it.address) {
                    self.flow_rules.allow(protocol.number(), address, port.allowed());
                    self.has_new_flow_rules = true;
                }
            }
        }
    }
}
