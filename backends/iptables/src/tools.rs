//! The programs that write and list rules, and what their failures mean.

use std::{
    io,
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

/// Which of the variants of iptables is used.
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

/// Why a program failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ToolError {
    #[error(
        "cannot run `{program}`: {error}; install the package iptables, or choose another --iptables-mode"
    )]
    Run { program: String, error: io::Error },
    #[error("`{program}` failed: {message}{}", about_line(.line.as_ref()))]
    Failed {
        program: String,
        message: String,
        /// The line of the input that the message names, with its number.
        line: Option<(usize, String)>,
    },
    #[error(
        "iptables 1.6.2 or later and the kernel (for a match NAME its module xt_NAME) must have `{rules}`: {error}"
    )]
    Required { rules: String, error: Box<ToolError> },
}

fn about_line(line: Option<&(usize, String)>) -> String {
    line.map_or_else(String::new, |(number, text)| format!("; line {number} is `{text}`"))
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
    ///
    /// # Errors
    ///
    /// The program cannot be run, or refuses the input.
    pub(crate) async fn restore(self, family: Family, input: &str) -> Result<(), ToolError> {
        let program = self.program(family, "restore");
        let mut command = Command::new(&program);
        command.args(["--noflush", "-w", LOCK_TIMEOUT]);
        let output =
            run(command, input).await.map_err(|error| ToolError::Run { program: program.clone(), error })?;
        if output.status.success() {
            return Ok(());
        }
        let message = match String::from_utf8_lossy(&output.stderr).trim() {
            "" => output.status.to_string(),
            it => it.to_owned(),
        };
        Err(failed(program, &message, input))
    }

    /// Lists the rules of a family.
    ///
    /// # Errors
    ///
    /// The program cannot be run, or fails.
    pub(crate) async fn list(self, family: Family, listing: &mut Listing) -> Result<(), ToolError> {
        let program = self.program(family, "save");
        let error = |error| ToolError::Run { program: program.clone(), error };
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
        Err(failed(program.clone(), String::from_utf8_lossy(&output.stderr).trim(), ""))
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

/// What a message of a program means.
fn failed(program: String, message: &str, input: &str) -> ToolError {
    let number = message.rsplit("line").find_map(|it| {
        let digits = it.trim_start_matches([':', ' ']);
        digits.split(|it: char| !it.is_ascii_digit()).next()?.parse::<usize>().ok()
    });
    let text = number.and_then(|it| input.lines().nth(it.checked_sub(1)?));
    // The programs also say how they can be asked for help.
    let message = message.split("\nTry `").next().unwrap_or(message);
    let message = Vec::from_iter(message.split_whitespace()).join(" ");
    ToolError::Failed { program, message, line: number.zip(text.map(str::to_owned)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_its_line() {
        let input = "*nat\n:KPI-A - [0:0]\n-A KPI-A -p tcp -m tcp -m no_such -j KPI-B\nCOMMIT\n";
        let line = "; line 3 is `-A KPI-A -p tcp -m tcp -m no_such -j KPI-B`";
        // What the programs of version 1.8.9 print.
        let cases = [
            (
                "iptables-restore v1.8.9 (legacy): Couldn't load match `no_such':No such file or directory\n\nError \
                 occurred at line: 3\nTry `iptables-restore -h' or 'iptables-restore --help' for more information.",
                line,
            ),
            (
                "iptables-nft-restore v1.8.9 (nf_tables): \nline 3: RULE_APPEND failed (No such file or directory): \
                 rule in chain KPI-A",
                line,
            ),
            ("iptables-restore: line 4 failed", "; line 4 is `COMMIT`"),
            ("Another app is currently holding the xtables lock", "`x` failed: Another app"),
        ];
        for (message, expected) in cases {
            let error = failed("x".to_owned(), message, input).to_string();
            assert!(error.contains(expected), "{error}");
            assert!(!error.contains("--help") && !error.contains('\n'), "{error}");
        }
    }
}
