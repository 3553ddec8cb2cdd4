//! `support-bundle`: what a bug report needs, in one archive.
//!
//! Invariant: what cannot be read is said in its place; only an archive that cannot be written is an error.

mod archive;
mod host;
mod pseudonyms;

use std::{
    io::{self, IsTerminal as _, Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Result, anyhow, bail};
use clap::Args;
use datapath_ebpf as ebpf;
use jiff::Timestamp;

use self::{
    archive::Archive,
    pseudonyms::{Anonymized, Pseudonyms},
};
use super::{
    check, config, dump,
    flags::{DatapathFlags, PacketFlags, ReportFlags},
    output::{Escaped, wrong_usage},
    status::{self, Output, Seen},
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
    content: Content,
}

/// What is in a file, read when it is written if it may be large.
enum Content {
    Text(Result<String>),
    Status(Output),
    Dump,
    /// Of the process.
    Page(&'static str),
}

/// Where the large files come from.
struct Source<'a> {
    sockets: &'a ebpf::Options,
    reports: &'a ReportFlags,
}

impl Source<'_> {
    fn write(&self, content: &Content, out: &mut dyn Write) -> Result<()> {
        match content {
            Content::Text(Ok(text)) => Ok(out.write_all(text.as_bytes())?),
            Content::Text(Err(error)) => Err(anyhow!("{error:#}")),
            Content::Status(format) => Ok(status::write(&mut self.seen()?, *format, out)?),
            Content::Dump => dump::write(&self.sockets.pin_dir, out),
            Content::Page(path) => Ok(io::copy(&mut self.page(path)?, out).map(drop)?),
        }
    }

    fn seen(&self) -> Result<Seen> {
        Seen::read(self.sockets, self.reports)
    }

    fn page(&self, path: &str) -> Result<impl Read + use<>> {
        match self.reports.status.path() {
            Some(socket) => {
                admin::get(socket, path).map_err(|error| anyhow!("{}: {error}", socket.display()))
            }
            None => bail!("--status-socket is empty"),
        }
    }
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
    // The name of the node does not matter for reading.
    let sockets = flags.datapath.options("", false)?;
    let options = flags.packets.options(sockets.clone())?;
    let entries = entries(&sockets, &options, &flags.reports);
    let source = Source { sockets: &sockets, reports: &flags.reports };
    let pseudonyms = flags.anonymize.then(|| learn(&entries, &source));
    let unread = if to_stdout {
        let mut stdout = io::stdout().lock();
        let unread = pack(&entries, &source, pseudonyms, &mut stdout)?;
        stdout.flush()?;
        unread
    } else {
        let (unread, size) = archive::create(&flags.file, |file| {
            let unread = pack(&entries, &source, pseudonyms, file)?;
            Ok((unread, file.metadata()?.len()))
        })?;
        tracing::info!(file = %flags.file.display(), kilobytes = size.div_ceil(1000), "archive written");
        unread
    };
    if !unread.is_empty() {
        tracing::warn!(
            files = unread.join(" "),
            "not everything could be read; these files have the reasons"
        );
    }
    Ok(())
}

/// What the archive has, in this order.
fn entries(sockets: &ebpf::Options, options: &reconciler::Options, reports: &ReportFlags) -> Vec<Entry> {
    let entry = |name, about, content| Entry { name, about, content };
    let text = |name, about, text| Entry { name, about, content: Content::Text(text) };
    vec![
        text(
            "check.txt",
            "`check`: what is wrong on this node, and the remedy",
            Ok(check::report(options, reports)),
        ),
        entry(
            "status.txt",
            "`status`: what is programmed, Service by Service",
            Content::Status(Output::Table),
        ),
        entry(
            "status.json",
            "the same as JSON, with counters of each endpoint",
            Content::Status(Output::Json),
        ),
        entry("dump.txt", "`dump`: every entry in the kernel", Content::Dump),
        text("hooks.txt", "our programs and those of others at the hooks that we use", hooks(sockets)),
        text("host.txt", "kernel, limits, settings, environment", Ok(host::describe(&sockets.pin_dir))),
        entry("process/status.json", "the process' own view", Content::Page("/status")),
        entry("process/state.json", "the state that it serves", Content::Page("/state")),
        entry("process/metrics.txt", "its metrics", Content::Page("/metrics")),
        entry("process/config.txt", "its flags, with the origin of each", Content::Page("/config")),
        entry("process/log.txt", "the newest lines of its log", Content::Page("/log")),
    ]
}

/// Reads everything into an archive; returns the names of the files that could not be read.
fn pack(
    entries: &[Entry],
    source: &Source<'_>,
    mut pseudonyms: Option<Pseudonyms>,
    out: &mut dyn Write,
) -> Result<Vec<&'static str>> {
    let is_anonymized = pseudonyms.is_some();
    let mut archive = Archive::new(out);
    let mut unread = Vec::new();
    for Entry { name, content, .. } in entries {
        let written = archive.add(name, |out| {
            let mut out = Escaped::new(out);
            let written = match &mut pseudonyms {
                Some(pseudonyms) => write_anonymized(source, content, pseudonyms, &mut out),
                None => source.write(content, &mut out),
            };
            if let Err(error) = &written {
                let mut text = format!("{error:#}");
                if let Some(pseudonyms) = &pseudonyms {
                    text = pseudonyms.replace(&text);
                }
                writeln!(out, "cannot be read: {text}")?;
            }
            out.flush()?;
            written
        })?;
        unread.extend(written.is_err().then_some(*name));
        // What one file needed is not there for the next one.
        process::give_back_memory();
    }
    // It says what could not be read, and so it comes last.
    let overview = overview(entries, &unread, is_anonymized);
    archive.add("README.txt", |out| Ok(out.write_all(overview.as_bytes())?))??;
    archive.finish()?;
    Ok(unread)
}

/// The names in everything that will be in the archive.
fn learn(entries: &[Entry], source: &Source<'_>) -> Pseudonyms {
    let mut pseudonyms = Pseudonyms::default();
    if let Ok(name) = nix::unistd::gethostname() {
        pseudonyms.learn("node", &name.to_string_lossy());
    }
    // A file may name what only a later one is known to name.
    for content in
        entries.iter().map(|it| &it.content).filter(|it| matches!(it, Content::Text(_) | Content::Page(_)))
    {
        // What cannot be read now is said where it is read again.
        let _ = write_anonymized(source, content, &mut pseudonyms, &mut io::sink());
        process::give_back_memory();
    }
    pseudonyms
}

/// Writes a file with pseudonyms for the names in it, and those that are known.
fn write_anonymized(
    source: &Source<'_>,
    content: &Content,
    pseudonyms: &mut Pseudonyms,
    out: &mut dyn Write,
) -> Result<()> {
    let mut seen = None;
    match content {
        Content::Page(path @ ("/status" | "/state")) => {
            return Ok(pseudonyms.replace_page(source.page(path)?, out)?);
        }
        Content::Status(_) => {
            // It has the names of this moment.
            let seen = seen.insert(source.seen()?);
            seen.services().for_each(|it| pseudonyms.learn_service(it));
            pseudonyms.replace_page(&*serde_json::to_vec(&seen.process.status)?, &mut io::sink())?;
        }
        _ => {}
    }
    let has_names = matches!(content, Content::Text(_) | Content::Page("/log"));
    let mut out = Anonymized::new(pseudonyms, out, has_names);
    let written = match (content, &mut seen) {
        (Content::Status(format), Some(seen)) => status::write(seen, *format, &mut out).map_err(Into::into),
        _ => source.write(content, &mut out),
    };
    out.finish()?;
    written
}

/// The hooks of the cgroup, one line each.
fn hooks(options: &ebpf::Options) -> Result<String> {
    let status = ebpf::query_at(options.cgroup.as_deref(), &options.pin_dir)?;
    use std::fmt::Write as _;
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

/// What the archive is, and what its files are.
fn overview(entries: &[Entry], unread: &[&str], is_anonymized: bool) -> String {
    use std::fmt::Write as _;
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
    text += "A large file is in parts, as in state.json.0000: `cat state.json.*` is the whole.\n\n";
    for Entry { name, about, .. } in entries {
        let unread = if unread.contains(name) { " (cannot be read)" } else { "" };
        let _ = writeln!(text, "{name:<22}{about}{unread}");
    }
    text
}
