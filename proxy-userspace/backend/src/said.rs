//! What an agent says in the log of things that stay as they are for a while.
//!
//! The one rule: each is said once, and again when it is another.

use std::{collections::BTreeMap, io, mem};

use crate::{
    agent::chain,
    canary::{Answer, Heard},
    ebpf::{Ended, Hooks, Memory, Other},
    node::Error,
    observe::Observer,
};

/// What was said.
#[derive(Debug, Default)]
pub(crate) struct Said {
    /// What the canary did not find in order the last time.
    canary: Vec<Heard>,
    /// Who was not served who should be.
    unreached: Option<String>,
    /// Programs of others at our hooks, each with the hooks that it ran at.
    others: BTreeMap<Other, Vec<&'static str>>,
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

    /// Who is left out by the cgroup, and who else has programs there.
    pub(crate) fn tell_of_cgroup(&mut self, hooks: &Hooks) {
        if self.unreached != hooks.unreached {
            match &hooks.unreached {
                Some(unreached) => tracing::warn!("{unreached}"),
                None => tracing::info!("{} has the pods below it now", hooks.cgroup.display()),
            }
            self.unreached.clone_from(&hooks.unreached);
        }
        let others: BTreeMap<_, _> = hooks.others().into_iter().map(|(it, at)| (it.clone(), at)).collect();
        for (it, at) in others.iter().filter(|(it, at)| self.others.get(it) != Some(at)) {
            tracing::warn!(
                "a program of somebody else runs at our hooks: {it} at {}; whoever comes first leads a socket, and \
                 `check` says what to do",
                at.join(", ")
            );
        }
        for it in self.others.keys().filter(|it| !others.contains_key(it)) {
            tracing::info!("the program of somebody else is gone from our hooks: {it}");
        }
        self.others = others;
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
