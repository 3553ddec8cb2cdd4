//! `cargo xtask bench report`: measures, records the figures, and writes the page of the documents from all records.
//! Invariant: a subject that fails does not keep the others from being measured and written.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, bail};
use build_tools::command::{status, workspace};
use clap::{Args, builder::PossibleValuesParser};

use crate::{
    page::{PICTURE_PREFIX, Page},
    proxies::ProxiesArguments,
    record::{self, Origin, Record, Records},
    subject::{Subject, names},
};

/// What `bench report` measures and draws.
#[derive(Clone, Debug, Args)]
pub(crate) struct ReportArguments {
    /// Measure this subject instead of all; can be repeated
    #[arg(long, value_name = "SUBJECT", value_parser = PossibleValuesParser::new(names()), conflicts_with = "from_records")]
    only: Vec<String>,
    /// Measure nothing: write the page again from docs/figures
    #[arg(long)]
    from_records: bool,
    #[command(flatten)]
    proxies: ProxiesArguments,
}

/// Writes docs/figures, docs/performance.md and its plots.
pub(crate) fn report(arguments: ReportArguments) -> Result<()> {
    let ReportArguments { only, from_records, proxies } = arguments;
    let mut failed = Vec::new();
    let is_chosen = |name: &String| !from_records && (only.is_empty() || only.contains(name));
    for subject in names().into_iter().filter(is_chosen) {
        if let Err(error) = measure(&subject, &proxies) {
            status("Failed", &format!("{subject}: {error:#}"));
            failed.push(subject);
        }
    }
    write(&workspace().join("docs"))?;
    if !failed.is_empty() {
        bail!("not measured: {}; the page shows their last records", failed.join(", "));
    }
    Ok(())
}

fn measure(subject: &str, proxies: &ProxiesArguments) -> Result<()> {
    let mut origin = Origin::here()?;
    if let Some(disturbance) = origin.disturbance() {
        status("Warning", &format!("{subject} is measured {disturbance}"));
    }
    let subject_to_measure = match subject {
        "proxies" => Subject::Proxies(proxies.clone()),
        other => Subject::named(other)?,
    };
    let figures = subject_to_measure.measure()?;
    figures.print();
    origin.versions.clone_from(&figures.versions);
    let path = Record { origin, figures }.write(&record::folder(), subject)?;
    status("Recorded", &path.display().to_string());
    Ok(())
}

fn write(docs: &Path) -> Result<()> {
    let page = Page::new(&Records::read(&record::folder())?)?;
    let path = docs.join("performance.md");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    fs::write(&path, page.fill(&text)?)?;
    let pictures = docs.join("pictures");
    for entry in fs::read_dir(&pictures)? {
        let file = entry?;
        let name = file.file_name().to_string_lossy().into_owned();
        if name.starts_with(PICTURE_PREFIX) && !page.pictures.contains_key(&name) {
            fs::remove_file(file.path())?;
        }
    }
    for (name, svg) in &page.pictures {
        fs::write(pictures.join(name), svg)?;
    }
    status("Ready", &path.display().to_string());
    Ok(())
}
