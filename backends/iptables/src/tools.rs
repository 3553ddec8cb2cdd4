//! The programs that write and list rules, and what their failures mean.

use std::{
    collections::BTreeSet,
    fs, io,
    process::{Output, Stdio},
};

use clap::ValueEnum;
use proxy_contract::backend::Family;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::Command,
};

use crate::ruleset::Listing;

/// How long the lock of other users of iptables is waited for, in seconds.
const LOCK_TIMEOUT: &str = "30";
/// The lists of the kernel's matches and targets; they exist if it has x_tables with tables of its own.
const REGISTERED: [&str; 4] = [
    "/proc/net/ip_tables_matches",
    "/proc/net/ip_tables_targets",
    "/proc/net/ip6_tables_matches",
    "/proc/net/ip6_tables_targets",
];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// The variant that the system chose: iptables-restore.
    #[default]
    Auto,
    /// On nftables: iptables-nft-restore.
    Nft,
    /// On the kernel's own tables: iptables-legacy-restore.
    Legacy,
}

/// Why a program failed, and what can be done about it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct ToolError(String);

impl ToolError {
    fn cannot_run(program: &str, error: &io::Error) -> Self {
        Self(format!(
            "cannot run `{program}`: {error}; install the package iptables, or choose another --iptables-mode"
        ))
    }
}

impl Mode {
    fn program(self, family: Family, task: &str) -> String {
        let name = if family == Family::V4 { "iptables" } else { "ip6tables" };
        match self {
            Self::Auto => format!("{name}-{task}"),
            Self::Nft => format!("{name}-nft-{task}"),
            Self::Legacy => format!("{name}-legacy-{task}"),
        }
    }

    /// Writes what `input` says; each of its tables is written as a whole or not at all.
    pub(crate) async fn restore(self, family: Family, input: &str) -> Result<(), ToolError> {
        let program = self.program(family, "restore");
        let mut command = Command::new(&program);
        command.args(["--noflush", "-w", LOCK_TIMEOUT]);
        let output = run(command, input).await.map_err(|it| ToolError::cannot_run(&program, &it))?;
        if output.status.success() {
            return Ok(());
        }
        let message = match String::from_utf8_lossy(&output.stderr).trim() {
            "" => output.status.to_string(),
            it => it.to_owned(),
        };
        Err(failed(&program, &message, input, family))
    }

    pub(crate) async fn list(self, family: Family, listing: &mut Listing) -> Result<(), ToolError> {
        let program = self.program(family, "save");
        let error = |it: io::Error| ToolError::cannot_run(&program, &it);
        let mut command = Command::new(&program);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().map_err(error)?;
        let stdout = child.stdout.take().expect("it is piped");
        let mut lines = BufReader::new(stdout).lines();
        while let Some(line) = lines.next_line().await.map_err(error)? {
            listing.take(family, &line);
        }
        let output = child.wait_with_output().await.map_err(error)?;
        if output.status.success() {
            return Ok(());
        }
        Err(failed(&program, String::from_utf8_lossy(&output.stderr).trim(), "", family))
    }
}

async fn run(mut command: Command, input: &str) -> io::Result<Output> {
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut stdin = child.stdin.take().expect("it is piped");
    let write = async move {
        // A program that ends before it has read everything says why.
        let _ = stdin.write_all(input.as_bytes()).await;
    };
    tokio::join!(write, child.wait_with_output()).1
}

fn failed(program: &str, message: &str, input: &str, family: Family) -> ToolError {
    let number = message.rsplit("line").find_map(|it| {
        let digits = it.trim_start_matches([':', ' ']);
        digits.split(|it: char| !it.is_ascii_digit()).next()?.parse::<usize>().ok()
    });
    let text = number.and_then(|it| input.lines().nth(it.checked_sub(1)?));
    let is_about_modules =
        ["No such file", "No chain/target/match", "Couldn't load", "does not exist", "unable to initialize"];
    // The kernel's own tables are refused at their end, without a word.
    let is_refused_as_a_whole = text == Some("COMMIT");
    let mut modules = BTreeSet::new();
    if is_refused_as_a_whole || is_about_modules.iter().any(|it| message.contains(it)) {
        let lines: Vec<&str> = match text {
            Some(text) if !is_refused_as_a_whole => vec![text],
            _ => input.lines().collect(),
        };
        modules = needed_modules(&lines, family);
        let registered: String = REGISTERED.iter().filter_map(|it| fs::read_to_string(it).ok()).collect();
        modules.retain(|module| {
            let name = module.split_once('_').map_or(module.as_str(), |(_, it)| it);
            !registered.lines().any(|it| it == name)
        });
    }
    // The programs also say how they can be asked for help.
    let message = message.split("\nTry `").next().unwrap_or(message);
    let message = Vec::from_iter(message.split_whitespace()).join(" ");
    let mut error = format!("`{program}` failed: {message}");
    if let Some((number, text)) = number.zip(text) {
        error += &format!("; line {number} is `{text}`");
    }
    if !modules.is_empty() {
        let names = Vec::from_iter(modules).join(", ");
        error += &format!(
            "; the kernel or iptables may lack one of these: {names} (modprobe says whether the kernel has it)"
        );
    }
    ToolError(error)
}

fn needed_modules(lines: &[&str], family: Family) -> BTreeSet<String> {
    let prefix = if family == Family::V4 { "ip" } else { "ip6" };
    let mut modules = BTreeSet::new();
    for line in lines {
        modules.extend(line.strip_prefix('*').map(|table| format!("{prefix}table_{table}")));
        let words: Vec<&str> = line.split(' ').collect();
        modules.extend(words.windows(2).filter_map(|pair| match pair {
            ["-m", "tcp" | "udp"] => None,
            ["-m", name] | ["-j", name @ ("MARK" | "MASQUERADE")] => Some(format!("xt_{name}")),
            ["-j", "REJECT"] => Some(format!("{prefix}t_REJECT")),
            ["-j", "DNAT"] => Some("xt_nat".to_owned()),
            _ => None,
        }));
    }
    modules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_its_line_and_the_missing_module() {
        let input = "*nat\n:KPI-A - [0:0]\n-A KPI-A -p tcp -m tcp -m no_such -j KPI-B\nCOMMIT\n";
        let line = "line 3 is `-A KPI-A -p tcp -m tcp -m no_such -j KPI-B`";
        let modules = "may lack one of these: xt_no_such (modprobe";
        // What the programs of version 1.8.9 print.
        let cases = [
            (
                "iptables-restore v1.8.9 (legacy): Couldn't load match `no_such':No such file or directory\n\nError \
                 occurred at line: 3\nTry `iptables-restore -h' or 'iptables-restore --help' for more information.",
                [line, modules],
            ),
            (
                "iptables-nft-restore v1.8.9 (nf_tables): \nline 3: RULE_APPEND failed (No such file or directory): \
                 rule in chain KPI-A",
                [line, modules],
            ),
            ("iptables-restore: line 4 failed", ["line 4 is `COMMIT`", "xt_no_such"]),
            ("iptables-nft-restore: line 3 failed: Invalid argument", [line, "Invalid argument; line 3"]),
            ("Another app is currently holding the xtables lock", ["the xtables lock", "`x` failed"]),
        ];
        for (message, expected) in cases {
            let error = failed("x", message, input, Family::V4).to_string();
            assert!(expected.iter().all(|it| error.contains(it)), "{error}");
            assert!(!error.contains("--help") && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn a_line_needs_the_modules_of_its_matches_and_target() {
        let cases = [
            ("*nat", Family::V6, "ip6table_nat"),
            (
                "-A X -m addrtype --dst-type LOCAL -m recent --set -j DNAT",
                Family::V4,
                "xt_addrtype xt_nat xt_recent",
            ),
            ("-A X -p udp -m udp -j REJECT --reject-with x", Family::V6, "ip6t_REJECT"),
            ("-A X -p sctp -m sctp -j MASQUERADE", Family::V4, "xt_MASQUERADE xt_sctp"),
        ];
        for (line, family, expected) in cases {
            assert_eq!(Vec::from_iter(needed_modules(&[line], family)).join(" "), expected);
        }
    }
}
