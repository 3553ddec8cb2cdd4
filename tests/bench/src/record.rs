//! Recorded figures, `docs/figures/DATE-SUBJECT-linux-KERNEL.json`: what was measured, when, on which machine, of which commit.
//! Invariant: a record is what one run of one subject has measured; nothing is merged into it later.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use build_tools::command::{output, workspace};
use jiff::Zoned;
use nix::sys::{sysinfo::sysinfo, utsname::uname};
use serde::{Deserialize, Serialize};

use crate::figures::Figures;

/// How long other work is observed before a subject is measured.
const OBSERVATION: Duration = Duration::from_secs(2);
/// The share of the CPUs, in percent, above which other work has to be mentioned.
const MAX_BUSY: f64 = 10.0;

pub(crate) fn folder() -> PathBuf {
    workspace().join("docs/figures")
}

/// The figures of a subject, and where they come from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The name of its file, which says the subject, too.
    #[serde(skip)]
    pub(crate) file: String,
    #[serde(skip)]
    subject: String,
    pub(crate) origin: Origin,
    pub(crate) figures: Figures,
}

/// When, where and of what figures were measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Origin {
    pub(crate) date: String,
    pub(crate) machine: String,
    /// The version of Linux, such as `6.18`.
    pub(crate) kernel: String,
    pub(crate) commit: String,
    /// What has measured.
    pub(crate) harness: String,
    /// The versions of other proxies.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) versions: BTreeMap<String, String>,
    /// How busy the CPUs were with other work, right before; unknown if it was not observed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) busy_percent: Option<f64>,
}

impl Origin {
    pub(crate) fn here() -> Result<Self> {
        let release = uname()?.release().to_string_lossy().into_owned();
        let kernel = release.split(['.', '-']).take(2).collect::<Vec<_>>().join(".");
        let memory = sysinfo()?.ram_total() as f64;
        Ok(Self {
            date: Zoned::now().date().to_string(),
            machine: format!(
                "{} cores, {:.0} GiB, Linux {kernel}, {}",
                thread::available_parallelism()?,
                (memory / f64::from(1 << 30)).ceil(),
                std::env::consts::ARCH,
            ),
            kernel,
            commit: commit()?,
            harness: "cargo xtask bench".into(),
            versions: BTreeMap::new(),
            busy_percent: Some(busy_percent()?),
        })
    }

    /// What a reader should know of the other work on the machine.
    pub(crate) fn disturbance(&self) -> Option<String> {
        let busy = self.busy_percent.filter(|it| *it > MAX_BUSY)?;
        Some(format!("beside other work, which took {busy:.0} % of the CPUs"))
    }
}

/// The commit, and whether anything but documents differs from it.
fn commit() -> Result<String> {
    let git = |arguments: &[&str]| output(Command::new("git").current_dir(workspace()).args(arguments));
    let commit = git(&["rev-parse", "--short", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no", "--", ":!docs", ":!*.md"])?;
    Ok(if changed.is_empty() { commit } else { format!("{commit}, changed") })
}

/// How busy the CPUs are while this process waits.
fn busy_percent() -> Result<f64> {
    let read = || -> Result<[f64; 2]> {
        let stat = fs::read_to_string("/proc/stat")?;
        let line = stat.lines().next().context("/proc/stat is empty")?;
        let fields: Vec<f64> = line.split_whitespace().skip(1).filter_map(|it| it.parse().ok()).collect();
        // user, nice, system, idle, iowait, irq, softirq, steal; what follows is contained in the first two.
        let idle = fields.get(3..5).context("no idle time")?.iter().sum();
        Ok([idle, fields.iter().take(8).sum()])
    };
    let before = read()?;
    thread::sleep(OBSERVATION);
    let after = read()?;
    Ok(((1.0 - (after[0] - before[0]) / (after[1] - before[1])) * 1000.0).round() / 10.0)
}

/// All records, the newest last.
#[derive(Debug)]
pub(crate) struct Records(Vec<Record>);

impl Records {
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let mut records = Vec::new();
        let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let Some(stem) = file.strip_suffix(".json") else { continue };
            let subject = stem
                .split_at_checked("2026-01-31-".len())
                .and_then(|(_, rest)| rest.split_once("-linux-"))
                .with_context(|| format!("{file} is not named DATE-SUBJECT-linux-KERNEL.json"))?
                .0
                .to_owned();
            let text = fs::read_to_string(&path)?;
            let record: Record =
                serde_json::from_str(&text).with_context(|| format!("cannot read {file}"))?;
            records.push(Record { file, subject, ..record });
        }
        records.sort_by(|one, other| one.file.cmp(&other.file));
        Ok(Self(records))
    }

    /// The records of a subject, the newest first.
    pub(crate) fn of(&self, subject: &str) -> impl Iterator<Item = &Record> {
        self.0.iter().rev().filter(move |it| it.subject == subject)
    }

    pub(crate) fn newest(&self, subject: &str) -> Option<&Record> {
        self.of(subject).next()
    }
}

impl Record {
    pub(crate) fn new(subject: &str, origin: Origin, figures: Figures) -> Self {
        let file = format!("{}-{subject}-linux-{}.json", origin.date, origin.kernel);
        Self { file, subject: subject.to_owned(), origin, figures }
    }

    /// Writes it to its file, whose path is returned.
    pub(crate) fn write(&self, folder: &Path) -> Result<PathBuf> {
        let path = folder.join(&self.file);
        fs::create_dir_all(folder)?;
        fs::write(&path, serde_json::to_string_pretty(self)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }
}
