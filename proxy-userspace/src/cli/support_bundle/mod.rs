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
/// The findings of `check`, `status`, `dump`, the programs at the hooks, the running process's pages, metrics, configuration
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

/// What the archive has, in this order: the names of files, what they are, and where they come from.
const FILES: [(&str, &str, Content); 11] = [
    ("check.txt", "`check`: what is wrong on this node, and the remedy", Content::Check),
    ("status.txt", "`status`: what is programmed, Service by Service", Content::Status(Output::Table)),
    ("status.json", "the same as JSON, with counters of each endpoint", Content::Status(Output::Json)),
    ("dump.txt", "`dump`: every entry in the kernel", Content::Dump),
    ("hooks.txt", "our programs and those of others at the hooks that we use", Content::Hooks),
    ("host.txt", "kernel, limits, settings, environment", Content::Host),
    ("process/status.json", "the process's own view", Content::Page("/status")),
    ("process/state.json", "the state that it serves", Content::Page("/state")),
    ("process/metrics.txt", "its metrics", Content::Page("/metrics")),
    ("process/config.txt", "its flags, with the origin of each", Content::Page("/config")),
    ("process/log.txt", "the newest lines of its log", Content::Page("/log")),
];

enum Content {
    Check,
    Status(Output),
    Dump,
    Hooks,
    Host,
    /// Of the process.
    Page(&'static str),
}

/// Where files come from: what may be large is read when it is written, and the rest once, before.
struct Source<'a> {
    sockets: &'a ebpf::Options,
    reports: &'a ReportFlags,
    /// What `check` prints; read first, as it takes much memory for a moment.
    check: String,
    hooks: Result<Vec<u8>>,
    host: Vec<u8>,
}

impl Source<'_> {
    fn write(&self, content: &Content, out: &mut dyn Write) -> Result<()> {
        match content {
            Content::Check => Ok(out.write_all(self.check.as_bytes())?),
            Content::Status(format) => Ok(status::write(&mut self.seen()?, *format, out)?),
            Content::Dump => dump::write(&self.sockets.pin_dir, out),
            Content::Hooks => match &self.hooks {
                Ok(it) => Ok(out.write_all(it)?),
                Err(error) => Err(anyhow!("{error:#}")),
            },
            Content::Host => Ok(out.write_all(&self.host)?),
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

pub(super) fn main(flags: Flags) -> Result<()> {
    let to_stdout = flags.file == Path::new("-");
    if to_stdout && io::stdout().is_terminal() {
        return Err(wrong_usage("`-` would write an archive to the terminal; redirect it, or name a file"));
    }
    if !to_stdout {
        archive::check_path(&flags.file)?;
    }
    // The name of the node does not matter for reading.
    let sockets = flags.datapath.options("", None)?;
    let options = flags.packets.options(sockets.clone())?;
    let check = check::report(&options, &flags.reports);
    let (mut hooks, mut host) = (Vec::new(), Vec::new());
    let hooks = write_hooks(&sockets, &mut hooks).map(|()| hooks);
    host::describe(&sockets.pin_dir, &mut host)?;
    let source = Source { sockets: &sockets, reports: &flags.reports, check, hooks, host };
    let pseudonyms = flags.anonymize.then(|| learn(&source));
    let unread = if to_stdout {
        let mut stdout = io::stdout().lock();
        let unread = pack(&source, pseudonyms, &mut stdout)?;
        stdout.flush()?;
        unread
    } else {
        let (unread, size) = archive::create(&flags.file, |file| {
            let unread = pack(&source, pseudonyms, file)?;
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

/// Reads everything into an archive; returns the names of the files that could not be read.
fn pack(
    source: &Source<'_>,
    mut pseudonyms: Option<Pseudonyms>,
    out: &mut dyn Write,
) -> Result<Vec<&'static str>> {
    let is_anonymized = pseudonyms.is_some();
    let mut archive = Archive::new(out);
    let mut unread = Vec::new();
    for (name, _, content) in &FILES {
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
    let overview = overview(&unread, is_anonymized);
    archive.add("README.txt", |out| Ok(out.write_all(overview.as_bytes())?))??;
    archive.finish()?;
    Ok(unread)
}

/// The names in everything that will be in the archive.
fn learn(source: &Source<'_>) -> Pseudonyms {
    let mut pseudonyms = Pseudonyms::default();
    if let Ok(name) = nix::unistd::gethostname() {
        pseudonyms.learn("node", &name.to_string_lossy());
    }
    // A file may name what only a later one is known to name.
    for (_, _, content) in &FILES {
        if matches!(content, Content::Status(_) | Content::Dump) {
            continue;
        }
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
    let is_prose = matches!(content, Content::Check | Content::Hooks | Content::Host | Content::Page("/log"));
    let mut out = Anonymized::new(pseudonyms, out, is_prose);
    let written = match content {
        Content::Status(format) => source.seen().and_then(|mut seen| {
            // It has the names of this moment.
            seen.services().for_each(|it| out.pseudonyms.learn_service(it));
            out.pseudonyms.learn_text(&serde_json::to_string(&seen.process.status)?, false);
            Ok(status::write(&mut seen, *format, &mut out)?)
        }),
        _ => source.write(content, &mut out),
    };
    out.finish()?;
    written
}

/// Writes the hooks of the cgroup, one line each.
fn write_hooks(options: &ebpf::Options, out: &mut dyn Write) -> Result<()> {
    let status = ebpf::query_at(options.cgroup.as_deref(), &options.pin_dir)?;
    writeln!(out, "cgroup {}", status.cgroup.display())?;
    for hook in &status.hooks {
        let own = match (hook.program, hook.is_attached) {
            (Some(id), true) => format!("ours (id {id})"),
            (Some(id), false) => format!("ours (id {id}) is not attached"),
            (None, _) => "none of ours".to_owned(),
        };
        let others = hook.foreign.iter().map(|it| format!("; also {it}")).collect::<String>();
        writeln!(out, "{:<14}{own}{others}", hook.name)?;
    }
    Ok(())
}

/// What the archive is, and what its files are.
fn overview(unread: &[&str], is_anonymized: bool) -> String {
    let names = if is_anonymized {
        "Addresses and names are pseudonyms, the same in all files. A log line or a reason may still quote what users wrote."
    } else {
        "It contains addresses and names; `--anonymize` replaces them."
    };
    let file = |(name, about, _): &(&str, &str, Content)| {
        let unread = if unread.contains(name) { " (cannot be read)" } else { "" };
        format!("{name:<22}{about}{unread}\n")
    };
    format!(
        "kube-proxy-ebpf {} support bundle of {}\n{names}\n\
         A large file is in parts, as in state.json.0000: `cat state.json.*` is the whole.\n\n{}",
        env!("CARGO_PKG_VERSION"),
        Timestamp::now().strftime("%FT%TZ"),
        FILES.iter().map(file).collect::<String>()
    )
}
