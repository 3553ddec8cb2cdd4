//! Changes of our tables by others, of which the kernel notifies.

use std::{io, sync::Arc};

use netlink::{
    Batch, ChangeFlag, MulticastListener, Netfilter,
    uapi::{NFNL_SUBSYS_NFTABLES, NFNLGRP_NFTABLES, NFTA_TABLE_NAME},
};

use crate::{
    apply::transaction::commit_batch,
    encode::tables::{TABLE, generation},
    error::Error,
};

/// From so many entries on, nothing listens while a transaction is written.
pub(super) const UNNOTICED: usize = 10_000;

/// Notices changes of our tables by others than the socket that writes them.
#[derive(Debug)]
pub(super) struct Notices {
    pub(super) changed: Arc<ChangeFlag>,
    /// What sets it; `None` while this process writes very much.
    listener: Option<MulticastListener>,
}

impl Notices {
    /// Listens for what other sockets change than the one that writes.
    pub(super) fn start(writer: &Netfilter) -> io::Result<Self> {
        let changed = Arc::new(ChangeFlag::default());
        let listener = Some(listen(&changed, writer.port())?);
        Ok(Self { changed, listener })
    }

    pub(super) fn commit(
        &mut self,
        netfilter: &mut Netfilter,
        batch: Batch,
        entries: usize,
    ) -> Result<(), Error> {
        if entries < UNNOTICED { commit_batch(netfilter, batch) } else { self.commit_many(netfilter, batch) }
    }

    /// Commits a transaction with very many entries. Nothing listens meanwhile: the kernel makes a notification for each entry,
    /// which takes as long as the rest of the transaction.
    pub(super) fn commit_many(&mut self, netfilter: &mut Netfilter, batch: Batch) -> Result<(), Error> {
        let before = generation(netfilter);
        self.listener = None;
        let result = commit_batch(netfilter, batch);
        self.listener = listen(&self.changed, netfilter.port())
            .inspect_err(|error| {
                tracing::error!(table = TABLE, %error, "external changes go unnoticed until the next restart");
            })
            .ok();
        // Another process that has committed something meanwhile may have changed our tables.
        let expected = before.map(|it| it.wrapping_add(u32::from(result.is_ok())));
        if expected.is_none() || expected != generation(netfilter) {
            self.changed.set();
        }
        result
    }
}

fn listen(changed: &Arc<ChangeFlag>, port: u32) -> io::Result<MulticastListener> {
    MulticastListener::start(NFNLGRP_NFTABLES, Arc::clone(changed), move |header, attributes| {
        header.message_type >> 8 == NFNL_SUBSYS_NFTABLES
            && header.port_number != port
            && netlink::find(attributes, NFTA_TABLE_NAME).is_some_and(|it| netlink::text(it) == TABLE)
    })
}
