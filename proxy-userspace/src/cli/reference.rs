//! The generated part of `docs/flags.md`: our flags, and the fate of kube-proxy's flags and fields. `cargo xtask docs` has the
//! test write it.

use std::{env, fmt::Write as _, fs};

use clap::{Arg, Command, builder::PossibleValue};
use kube_proxy_config::FIELDS;

use super::command;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/flags.md");
const BEGIN: &str = "<!-- Generated: cargo xtask docs -->\n";
/// The environment variable with which the page is written instead of compared.
const UPDATE: &str = "KUBE_PROXY_EBPF_UPDATE_DOCUMENTS";
/// The commands that keep running.
const SERVING: [&str; 3] = ["run", "brain", "agent"];
/// Flags of kube-proxy that have another name here.
const RENAMED: [(&str, &str); 2] =
    [("iptables-masquerade-bit", "nft-masquerade-bit"), ("logging-format", "log-format")];

/// Names in backquotes.
fn quoted<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    names.into_iter().map(|it| format!("`{it}`")).collect::<Vec<_>>().join(", ")
}

/// A line for a flag: its name with an unusual variable, its help, its values and its default.
fn line(flag: &Arg) -> Option<String> {
    let long = flag.get_long().filter(|it| !matches!(*it, "help" | "version"))?;
    let usual = format!("KUBE_PROXY_EBPF_{}", long.to_uppercase().replace('-', "_"));
    let mut line = format!("- `--{long}`");
    let _ = match flag.get_env() {
        None => write!(line, "¹"),
        Some(it) if it == &*usual => Ok(()),
        Some(it) => write!(line, " (`{}`)", it.display()),
    };
    let _ = write!(line, ": {}", flag.get_help().unwrap());
    if flag.get_action().takes_values() {
        let values = flag.get_possible_values();
        let values: Vec<_> =
            values.iter().filter(|it| !it.is_hide_set()).map(PossibleValue::get_name).collect();
        if !values.is_empty() && !values.contains(&"true") {
            let _ = write!(line, ": {}", quoted(values));
        }
        let defaults: Vec<_> = flag
            .get_default_values()
            .iter()
            .map(|it| it.display().to_string())
            .filter(|it| it != "false")
            .collect();
        if !defaults.is_empty() {
            let _ = write!(line, " [default: {}]", defaults.join(","));
        }
    }
    Some(line + "\n")
}

/// The values of each key, in the order of their first ones.
fn grouped<T>(all: impl Iterator<Item = (String, T)>) -> Vec<(String, Vec<T>)> {
    let mut groups = Vec::<(String, Vec<T>)>::new();
    for (key, value) in all {
        match groups.iter_mut().find(|(it, _)| *it == key) {
            Some((_, values)) => values.push(value),
            None => groups.push((key, vec![value])),
        }
    }
    groups
}

/// The flags by heading and commands. Other commands take the flags of the process that they ask.
fn flags(command: &Command) -> String {
    let subcommands = command.get_subcommands().filter(|it| !it.is_hide_set() && it.get_name() != "help");
    let lines = subcommands.flat_map(|subcommand| {
        let flags = subcommand.get_arguments().filter(|it| !it.is_hide_set());
        flags.filter_map(move |it| {
            Some((line(it)?, (it.get_help_heading().unwrap_or_default(), subcommand.get_name())))
        })
    });
    let sections = grouped(lines).into_iter().map(|(line, places)| {
        let (heading, mut commands) = (places[0].0, places.iter().map(|it| it.1).collect::<Vec<_>>());
        if commands.iter().any(|it| SERVING.contains(it)) {
            commands.retain(|it| SERVING.contains(it));
        }
        ([heading, &commands.join(", ")].join(": "), line)
    });
    let sections = grouped(sections).into_iter();
    let text = |title: &str, lines: &[String]| format!("\n### {title}\n\n{}", lines.concat());
    sections.map(|(title, lines)| text(title.trim_start_matches(": "), &lines)).collect()
}

/// Names with a reason, or with one of our flags; equal ones share a line.
fn fates(names: impl Iterator<Item = (String, String)>) -> String {
    let rows = grouped(names.map(|(name, fate)| (fate, name))).into_iter();
    rows.map(|(fate, names)| format!("- {}: {fate}\n", quoted(names.iter().map(|it| &**it)))).collect()
}

/// The fate of every flag of kube-proxy.
fn kube_proxys_flags(run: &Command) -> String {
    let find = |name: &str| {
        let has_name = |it: &&Arg| {
            it.get_long() == Some(name) || it.get_all_aliases().unwrap_or_default().contains(&name)
        };
        run.get_arguments().find(has_name).map(|it| it.get_long().unwrap())
    };
    let fate = |name: &str, reason: Option<&str>| match (find(name), reason) {
        (Some(long), None) if long == name => "the same".to_owned(),
        (Some(long), None) => format!("alias of `--{long}`"),
        (None, Some(reason)) => format!("rejected: {reason}"),
        (None, None) => {
            let ours = RENAMED.iter().find(|(theirs, _)| *theirs == name).and_then(|(_, ours)| find(ours));
            format!("renamed to `--{}`", ours.unwrap_or_else(|| panic!("--{name} has no fate")))
        }
        (Some(long), Some(reason)) => panic!("--{name} is --{long}, and rejected: {reason}"),
    };
    fates(kube_proxy_config::flags().map(move |(name, reason)| (format!("--{name}"), fate(name, reason))))
}

/// The fate of every field of a `KubeProxyConfiguration`. The log has the reasons of those without effect.
fn fields(command: &Command, run: &Command) -> String {
    let fate = |flag: Option<&str>| {
        let mut flags = run.get_arguments().chain(command.get_arguments());
        flag.map_or_else(
            || "no effect; the log has the reason".to_owned(),
            |id| format!("`--{}`", flags.find(|it| it.get_id() == id).unwrap().get_long().unwrap()),
        )
    };
    fates(FIELDS.iter().map(move |it| (it.path.to_owned(), fate(it.flag))))
}

#[test]
fn the_page_of_flags_is_generated() {
    let mut command = command();
    command.build();
    let run = command.find_subcommand("run").unwrap();
    let generated = format!(
        "{}\n## Flags of kube-proxy\n\n{}\n## Fields of a KubeProxyConfiguration\n\n{}",
        flags(&command),
        kube_proxys_flags(run),
        fields(&command, run)
    );
    let page = fs::read_to_string(PAGE).unwrap();
    let (by_hand, documented) = page.split_once(BEGIN).unwrap();
    if env::var_os(UPDATE).is_some() {
        fs::write(PAGE, format!("{by_hand}{BEGIN}{generated}")).unwrap();
    } else {
        // Not compared by `assert_eq`, which would print both.
        assert!(documented == generated, "`cargo xtask docs` writes docs/flags.md again");
    }
}
