//! Flags and variables with an empty value, as manifests have them that are made from a template: with kube-proxy, and here, they
//! count as not given, unless an empty value switches off what the flag names.

use std::{env, ffi::OsString};

use clap::{Arg, Command};

/// Whether an empty value switches off what a flag names.
fn is_off_if_empty(flag: &Arg) -> bool {
    let is_address = |it: &str| it.ends_with("-bind-address") || it == "status-socket";
    flag.get_long().is_some_and(is_address)
}

/// The flag without its variable, if that is set but empty.
pub(super) fn without_empty_variable(flag: Arg) -> Arg {
    let is_empty = flag.get_env().and_then(env::var_os).is_some_and(|it| it.is_empty());
    if is_empty && !is_off_if_empty(&flag) { flag.env(None) } else { flag }
}

/// The words of a command line without the flags whose value is empty, as `--cluster-cidr=`.
pub(super) fn without_empty(command: &Command, words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut is_ended = false;
    let all = || command.get_subcommands().chain([command]).flat_map(Command::get_arguments);
    let is_off = |long: &str| all().any(|it| it.get_long() == Some(long) && is_off_if_empty(it));
    let is_given = |it: &OsString| {
        is_ended |= it == "--";
        let long = it.to_str().and_then(|it| it.strip_prefix("--")?.strip_suffix('='));
        is_ended || long.is_none_or(|it| it.contains('=') || is_off(it))
    };
    words.filter(is_given).collect()
}
