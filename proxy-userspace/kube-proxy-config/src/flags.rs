//! The flags of kube-proxy 1.36 on Linux (`AddFlags` in its `cmd/kube-proxy/app/options.go`, and those of its logs), without
//! those that klog keeps for programs of old.
//!
//! Invariant: a flag that `run` does not take has a reason, in words for users who have set it.

use std::sync::LazyLock;

use crate::FIELDS;

#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// The long name.
    pub name: &'static str,
    /// Why `run` does not take it; `None` if it does.
    pub reason: Option<&'static str>,
}

/// Why a command does not take a flag of kube-proxy; `None` if kube-proxy has no such flag, or the command needs it.
pub fn reason(name: &str) -> Option<&'static str> {
    let flag = FLAGS.iter().find(|it| it.name == name)?;
    // A command without the flag does not need the field of the file either.
    let id = name.replace('-', "_");
    let of_field = || Some(FIELDS.iter().find(|it| it.flag == Some(&*id))?.reason);
    flag.reason.or_else(of_field)
}

/// All of them, from lines of `flags.txt`: a name, with the reason if it has one.
pub static FLAGS: LazyLock<Vec<Flag>> = LazyLock::new(|| {
    let flag = |line: &'static str| match line.split_once(": ") {
        Some((name, reason)) => Flag { name, reason: Some(reason) },
        None => Flag { name: line, reason: None },
    };
    include_str!("flags.txt").lines().map(flag).collect()
});
