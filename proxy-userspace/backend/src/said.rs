//! What an agent says in the log of things that stay as they are for a while.
//!
//! The one rule: each is said once, and again when it is another.

use std::{io, mem};

use crate::{
    agent::chain,
    canary::{Answer, Heard},
    ebpf::{Ended, Memory},
    node::Error,
    observe::Observer,
};

/// What was said.
#[derive(Debug, Default)]
pub(crate) struct Said {
    /// What the canary did not find in order the last time.
    canary: Vec<Heard>,
    not_here: bool,
    not_everywhere: bool,
    /// How many datagrams had been refused the last time.
    refused: Option<u64>,
}

impl Said {
    /// What the canary found.
    pub(crate) fn tell_of_canary(&mut self, heard: &[Heard]) {
        let wrong: Vec<_> = heard.iter().filter(|it| it.answer != Answer::Acts).cloned().collect();
        // What it says of ports and time is new every time.
        let is_known = |it: &Heard| {
            let same = |known: &Heard| mem::discriminant(&known.answer) == mem::discriminant(&it.answer);
            self.canary.iter().any(|known| known.hook == it.hook && same(known))
        };
        for it in wrong.iter().filter(|it| !is_known(it)) {
            match it.answer {
                Answer::Fails(_) => tracing::error!("the canary says: {it}"),
                _ => tracing::info!("the canary says: {it}"),
            }
        }
        if wrong.is_empty() && !self.canary.is_empty() {
            tracing::info!("the canary says: all hooks act");
        }
        self.canary = wrong;
    }

    /// What became of flows whose endpoint had gone.
    pub(crate) fn tell_of(&mut self, ended: &io::Result<Ended>) {
        match ended {
            Ok(ended) => {
                if ended.sockets != 0 {
                    tracing::info!(
                        "ended {} UDP sockets whose endpoint does not serve any more",
                        ended.sockets
                    );
                }
                if !ended.everywhere && !mem::replace(&mut self.not_everywhere, true) {
                    tracing::info!(
                        "connected UDP sockets of some pods stay with an endpoint that does not serve any more, as not \
                         every network namespace can be seen and entered: CAP_SYS_ADMIN, CAP_SYS_PTRACE and the host's \
                         process ids (hostPID) would do"
                    );
                }
            }
            Err(error) => {
                if !mem::replace(&mut self.not_here, true) {
                    tracing::warn!(
                        "connected UDP sockets stay with an endpoint that does not serve any more: {error}"
                    );
                }
            }
        }
    }

    /// How much UDP sockets remember, and whether more was asked for than there is room for.
    pub(crate) fn tell_of_memory(&mut self, memory: Result<Option<Memory>, Error>, observer: &dyn Observer) {
        match memory {
            Ok(None) => {}
            Ok(Some(memory)) => {
                observer.memory(memory);
                let memory = memory.udp;
                // What was refused before this process is old news.
                let before = self.refused.replace(memory.refused).unwrap_or(memory.refused);
                if memory.refused > before {
                    tracing::warn!(
                        "{} datagrams to Services were not sent, for want of room to remember where from the answer \
                         comes: raise --udp-addresses and run `cleanup` once",
                        memory.refused - before
                    );
                }
            }
            Err(error) => tracing::warn!("what sockets remember cannot be looked at: {}", chain(&error)),
        }
    }
}
