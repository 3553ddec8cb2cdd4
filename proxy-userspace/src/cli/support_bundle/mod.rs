//! `support-bundle`: what a bug report needs, in one archive.
//!
//! Invariant: what cannot be read is said in its place; only an archive that cannot be written is an error.

mod archive;
mod host;
mod pseudonyms;

use std::{
    fmt::Write as _,
    io::{self, IsTerminal as _, Write as _},
    path::{Path, PathBuf},
};

use anyhow::{Result, anyhow, bail};
use clap::Args;
use datapath_ebpf as ebpf;
use jiff::Timestamp;
use model::escaped;

use self::pseudonyms::Pseudonyms;
use super::{
    check, config, dump,
    flags::{DatapathFlags, PacketFlags, ReportFlags},
    output::wrong_usage,
    status,
};

/// Collect what a bug report needs in one archive
///
/// The findings of `check`, `status`, `dump`, the programs at the hooks, the running process' pages, metrics, configuration
/// and newest log lines, and the node's kernel, limits and settings. What cannot be read is named in its place, so it works
/// without a running process, too. Nothing is changed. Look through it before you publish it.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    _config: config::ConfigFlag,
    /// Replace addresses, and the names of namespaces, Services, pods, nodes and servers, by pseudonyms
    ///
    /// A word has the same pseudonym in all files of the archive. Loopback addresses and the names that every cluster has
    /// stay. Ports, names of ports, paths and cgroups stay, too.
    #[arg(long)]
    anonymize: bool,
    /// The archive, as in `bundle.tar.gz`, which must not exist; `-` for standard output
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    datapath: DatapathFlags,
    #[command(flatten)]
    packets: PacketFlags,
    #[command(flatten)]
    reports: ReportFlags,
}

/// A file of the archive.
struct Entry {
    name: &'static str,
    about: &'static str,
    content: Result<String>,
}

/// Writes the archive.
pub(super) fn main(flags: Flags) -> Result<()> {
    let to_stdout = flags.file == Path::new("-");
    if to_stdout && io::stdout().is_terminal() {
        return Err(wrong_usage("`-` would write an archive to the terminal; redirect it, or name a file"));
    }
    if !to_stdout {
        archive::check_path(&flags.file)?;
    }
    let mut entries = collect(flags.datapath, flags.packets, &flags.reports)?;
    if flags.anonymize {
        anonymize(&mut entries);
    }
    let unread: Vec<_> = entries.iter().filter(|it| it.content.is_err()).map(|it| it.name).collect();
    let overview = overview(&entries, flags.anonymize);
    let texts = entries.iter().map(|it| (it.name, text(it)));
    let bytes = archive::pack([("README.txt", overview)].into_iter().chain(texts))?;
    if to_stdout {
        let mut stdout = io::stdout().lock();
        stdout.write_all(&bytes)?;
        stdout.flush()?;
    } else {
        archive::write(&flags.file, &bytes)?;
        tracing::info!("wrote {} ({} kB)", flags.file.display(), bytes.len().div_ceil(1000));
    }
    if !unread.is_empty() {
        tracing::warn!("not everything could be read: the archive has the reason in {}", unread.join(", "));
    }
    Ok(())
}

/// Reads everything.
///
/// # Errors
///
/// If the flags contradict each other.
fn collect(datapath: DatapathFlags, packets: PacketFlags, reports: &ReportFlags) -> Result<Vec<Entry>> {
    // The name of the node does not matter for reading.
    let sockets = datapath.options("")?;
    let options = packets.options(sockets.clone())?;
    let page = |path| match reports.status() {
        Some(socket) => admin::get(socket, path).map_err(|error| anyhow!("{}: {error}", socket.display())),
        None => bail!("--status-socket is empty"),
    };
    let status = status::report(&sockets, reports);
    let (table, json) = match status {
        Ok((table, json)) => (Ok(table), Ok(json)),
        Err(error) => (Err(anyhow!("{error:#}")), Err(error)),
    };
    let entry = |name, about, content| Entry { name, about, content };
    Ok(vec![
        entry(
            "check.txt",
            "`check`: what is wrong on this node, and the remedy",
            Ok(check::report(&options, reports)),
        ),
        entry("status.txt", "`status`: what is programmed, Service by Service", table),
        entry("status.json", "the same as JSON, with counters of each endpoint", json),
        entry("dump.txt", "`dump`: every entry in the kernel", dump::text(&sockets.pin_dir)),
        entry("hooks.txt", "our programs and those of others at the hooks that we use", hooks(&sockets)),
        entry("host.txt", "kernel, limits, settings, environment", Ok(host::describe(&sockets.pin_dir))),
        entry("process/status.json", "the process' own view", page("/status")),
        entry("process/state.json", "the state that it serves", page("/state")),
        entry("process/metrics.txt", "its metrics", page("/metrics")),
        entry("process/config.txt", "its flags, with the origin of each", page("/config")),
        entry("process/log.txt", "the newest lines of its log", page("/log")),
    ])
}

/// The hooks of the cgroup, one line each.
fn hooks(options: &ebpf::Options) -> Result<String> {
    let status = ebpf::query_at(options.cgroup.as_deref(), &options.pin_dir)?;
    let mut text = format!("cgroup {}\n", status.cgroup.display());
    for hook in &status.hooks {
        let own = match (hook.program, hook.is_attached) {
            (Some(id), true) => format!("ours (id {id})"),
            (Some(id), false) => format!("ours (id {id}) is not attached"),
            (None, _) => "none of ours".to_owned(),
        };
        let others = hook.foreign.iter().map(|it| format!("; also {it}")).collect::<String>();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{:<14}{own}{others}", hook.name);
    }
    Ok(text)
}

fn anonymize(entries: &mut [Entry]) {
    let mut pseudonyms = Pseudonyms::default();
    if let Ok(name) = nix::unistd::gethostname() {
        pseudonyms.learn("node", &name.to_string_lossy());
    }
    for it in &*entries {
        let Ok(text) = &it.content else { continue };
        match it.name {
            "process/status.json" | "process/state.json" => pseudonyms.learn_from_page(text),
            "process/log.txt" => pseudonyms.learn_qualified_names(text),
            _ => {}
        }
        pseudonyms.learn_servers(text);
    }
    for it in entries {
        it.content = match &it.content {
            Ok(text) => Ok(pseudonyms.replace(text)),
            Err(error) => Err(anyhow!(pseudonyms.replace(&format!("{error:#}")))),
        };
    }
}

/// The text of a file, as a terminal may show it.
fn text(entry: &Entry) -> String {
    match &entry.content {
        Ok(text) => escaped(text).into_owned(),
        Err(error) => format!("cannot be read: {}\n", escaped(&format!("{error:#}"))),
    }
}

/// What the archive is, and what its files are.
fn overview(entries: &[Entry], is_anonymized: bool) -> String {
    let mut text = format!(
        "kube-proxy-ebpf {} support bundle of {}\n",
        env!("CARGO_PKG_VERSION"),
        Timestamp::now().strftime("%FT%TZ")
    );
    text += if is_anonymized {
        "Addresses and names are pseudonyms, the same in all files. A log line or a reason may still quote what users wrote.\n"
    } else {
        "It contains addresses and names; `--anonymize` replaces them.\n"
    };
    text.push('\n');
    for Entry { name, about, content } in entries {
        let unread = if content.is_err() { " (cannot be read)" } else { "" };
        let _ = writeln!(text, "{name:<22}{about}{unread}");
    }
    text
}
