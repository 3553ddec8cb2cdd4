//! What the backend asks of the system: the programs `ipvsadm`, `nft` and `ip`, and settings of the kernel.

use std::{fs, io, path::Path, process::Stdio};

use tokio::{io::AsyncWriteExt as _, process::Command};

use crate::{
    marks::{MASK, PREFIX},
    servers::{self, Connections, Servers},
    table::{self, Listing},
};

/// The routing table, and the preference of the rule, that make addresses of Services local to IPVS.
const ROUTES: u32 = 10256;
/// How much of a tool's message is kept, in characters.
const MAX_MESSAGE: usize = 800;
/// What IPVS needs, below /proc/sys/net/ipv4, and why.
const SETTINGS: [(&str, &str, &str); 5] = [
    ("vs/conntrack", "1", "masquerading"),
    ("vs/conn_reuse_mode", "1", "reused client ports get a new endpoint"),
    ("vs/expire_nodest_conn", "1", "end of connections to deleted endpoints"),
    ("vs/expire_quiescent_template", "1", "session affinity ends with its endpoint"),
    ("ip_forward", "1", "forwarding"),
];

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot start `{program}`: {error}; install the package {package}")]
    Start { program: &'static str, package: &'static str, error: io::Error },
    #[error("`{command}`: {message}")]
    Tool { command: String, message: String },
    #[error("the kernel has no IPVS: load its module ip_vs")]
    NoIpvs,
    #[error("--scheduler {0}: the kernel does not have it: load its module ip_vs_{0}")]
    NoScheduler(String),
    #[error("cannot set net/ipv4/{0} to {1} ({2}): {3}")]
    Setting(&'static str, &'static str, &'static str, io::Error),
    #[error("cannot read what `nft --json` lists: {0}; is it built with JSON?")]
    Json(#[from] serde_json::Error),
}

/// What a program printed: on standard output, and on standard error if it complained.
type Output = (String, Option<String>);

async fn output(
    program: &'static str,
    package: &'static str,
    arguments: &str,
    input: &str,
) -> Result<Output, Error> {
    let start = |error| Error::Start { program, package, error };
    let mut command = Command::new(program);
    command.args(arguments.split(' ')).env("LC_ALL", "C").kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(start)?;
    let stdin = child.stdin.take();
    let write = async move {
        // It may end without reading everything: then it says why.
        if let Some(mut it) = stdin {
            let _ = it.write_all(input.as_bytes()).await;
        }
    };
    let ((), output) = tokio::join!(write, child.wait_with_output());
    let output = output.map_err(start)?;
    let text = |it: &[u8]| String::from_utf8_lossy(it).into_owned();
    let mut error: String = text(&output.stderr).trim().chars().take(MAX_MESSAGE).collect();
    if !output.status.success() && error.is_empty() {
        error = output.status.to_string();
    }
    Ok((text(&output.stdout), Some(error).filter(|it| !it.is_empty())))
}

/// The virtual servers of this program, and which endpoints have connections.
pub(crate) async fn list_servers() -> Result<(Servers, Connections), Error> {
    match output("ipvsadm", "ipvsadm", "--list --numeric", "").await? {
        (list, None) => Ok(servers::parse(&list)),
        (_, Some(message)) if message.contains("Protocol not available") => Err(Error::NoIpvs),
        (_, Some(message)) => Err(Error::Tool { command: "ipvsadm --list".to_owned(), message }),
    }
}

/// Applies lines; an error names the line.
pub(crate) async fn restore(lines: &[String]) -> Result<(), Error> {
    if lines.is_empty() {
        return Ok(());
    }
    let (_, message) = restored(&lines.join("\n")).await?;
    if message.is_none() {
        return Ok(());
    }
    // It goes on after an error, and does not say which line it is about.
    for line in lines {
        if let (_, Some(message)) = restored(line).await?
            && !["already exists", "No such"].iter().any(|it| message.contains(it))
        {
            return Err(Error::Tool { command: format!("ipvsadm {line}"), message });
        }
    }
    Ok(())
}

async fn restored(lines: &str) -> Result<Output, Error> {
    output("ipvsadm", "ipvsadm", "--restore", &format!("{lines}\n")).await
}

/// Whether the kernel has a scheduler: a virtual server is made with it, and deleted.
pub(crate) async fn has_scheduler(name: &str) -> Result<bool, Error> {
    let mark = PREFIX | !MASK;
    let (_, message) = restored(&format!("-A -f {mark} -s {name}")).await?;
    restored(&format!("-D -f {mark}")).await?;
    Ok(message.is_none_or(|it| it.contains("already exists")))
}

/// Applies a text of nftables as one transaction; an error names the line.
pub(crate) async fn nft(text: &str) -> Result<(), Error> {
    match output("nft", "nftables", "-f -", text).await? {
        (_, Some(message)) => Err(Error::Tool { command: "nft -f -".to_owned(), message }),
        _ => Ok(()),
    }
}

/// What the kernel has of the table; nothing without the table.
pub(crate) async fn list_table() -> Result<Listing, Error> {
    let arguments = format!("--json --numeric list table {}", table::NAME);
    match output("nft", "nftables", &arguments, "").await? {
        (list, None) => Ok(Listing::parse(&list)?),
        (_, Some(message)) if message.contains("No such file") => Ok(Listing::default()),
        (_, Some(message)) => Err(Error::Tool { command: format!("nft {arguments}"), message }),
    }
}

/// The families that the kernel has, as `ip` calls them.
fn families() -> impl Iterator<Item = &'static str> {
    ["-4", "-6"].into_iter().filter(|it| *it == "-4" || Path::new("/proc/sys/net/ipv6").exists())
}

/// Makes the addresses of marked packets local.
pub(crate) async fn add_routes() -> Result<(), Error> {
    for family in families() {
        ip(&format!("{family} route replace local default dev lo table {ROUTES}")).await?;
        let rule = format!("{family} rule add pref {ROUTES} fwmark {PREFIX:#x}/{MASK:#x} lookup {ROUTES}");
        match ip(&rule).await {
            Err(Error::Tool { message, .. }) if message.contains("File exists") => {}
            it => drop(it?),
        }
    }
    Ok(())
}

pub(crate) async fn has_routes() -> Result<bool, Error> {
    for family in families() {
        let rule = ip(&format!("{family} rule show pref {ROUTES}")).await?;
        let Ok(route) = ip(&format!("{family} route show table {ROUTES}")).await else { return Ok(false) };
        if rule.is_empty() || !route.contains("local") {
            return Ok(false);
        }
    }
    Ok(true)
}

pub(crate) async fn delete_routes() -> Result<(), Error> {
    for family in families() {
        for it in ["rule del pref", "route flush table"] {
            match ip(&format!("{family} {it} {ROUTES}")).await {
                Err(Error::Tool { message, .. })
                    if message.contains("No such") || message.contains("does not exist") => {}
                it => drop(it?),
            }
        }
    }
    Ok(())
}

async fn ip(arguments: &str) -> Result<String, Error> {
    match output("ip", "iproute2", arguments, "").await? {
        (out, None) => Ok(out),
        (_, Some(message)) => Err(Error::Tool { command: format!("ip {arguments}"), message }),
    }
}

/// Changes the settings of the kernel that are not as IPVS needs them.
pub(crate) fn set() -> Result<(), Error> {
    for (name, value, why) in SETTINGS {
        let path = format!("/proc/sys/net/ipv4/{name}");
        if fs::read_to_string(&path).is_ok_and(|it| it.trim() == value) {
            continue;
        }
        fs::write(&path, value).map_err(|it| Error::Setting(name, value, why, it))?;
        tracing::info!(setting = %format!("net.ipv4.{}", name.replace('/', ".")), value, reason = why, "kernel setting changed");
    }
    Ok(())
}
