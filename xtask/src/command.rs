//! Running other programs. The one rule: whoever fails is named, with its arguments.

use std::{
    env,
    ffi::OsStr,
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

/// What this program says about its own work, on stderr, in cargo's manner.
pub(crate) fn say(verb: &str, what: &str) {
    eprintln!("{verb:>12} {what}");
}

/// The root of the workspace.
pub(crate) fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// Runs `command` to its end, its output passed through.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start `{}`", line(command)))?;
    if !status.success() {
        bail!("`{}` failed: {status}", line(command));
    }
    Ok(())
}

/// Runs `command` to its end and gives back what it printed, trimmed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start `{}`", line(command)))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed: {}: {}", line(command), output.status, stderr.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Like [`output`] for what is tried only: kept quiet, and killed after `limit`. The error is what stderr said.
pub(crate) fn attempt(command: &mut Command, limit: Duration) -> Result<()> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{}`", line(command)))?;
    let mut stderr = child.stderr.take().expect("stderr is piped");
    let reader = thread::spawn(move || {
        let mut text = Vec::new();
        // Whatever could be read is what there is to tell.
        let _ = stderr.read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text);
        let error = text.lines().find(|it| it.starts_with("error"));
        let line = error.or(text.trim().lines().last()).unwrap_or_default();
        // What failed; the whole chain of causes would be a page.
        line.splitn(3, ": ").take(2).collect::<Vec<_>>().join(": ")
    });
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if started.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            bail!("`{}` took more than {} s", line(command), limit.as_secs());
        }
        thread::sleep(Duration::from_millis(20));
    };
    let said = reader.join().unwrap_or_default();
    if !status.success() {
        bail!("`{}` failed: {said}", line(command));
    }
    Ok(())
}

/// The command as one would type it.
fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// The path of a program: on the PATH, or where administrators' programs lie.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.map(|folder| folder.join(program)).find(|file| is_program(file))
}

fn is_program(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    fs::metadata(file).is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
}

/// The cargo that runs us, for this machine's own code, without what `cargo run` told us about xtask itself.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace());
    for (key, _) in env::vars_os() {
        let name = key.to_string_lossy();
        let about_xtask = name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        if about_xtask || matches!(&*name, "CARGO_BIN_NAME" | "CARGO_CRATE_NAME" | "OUT_DIR") {
            command.env_remove(&key);
        }
    }
    command
}

/// Any cargo, for another machine's code: nothing that is meant for the host compiler gets through.
pub(crate) fn foreign_cargo(program: &Path) -> Command {
    const KEPT: [&str; 7] = [
        "CARGO_BUILD_JOBS",
        "CARGO_HOME",
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTR",
        "CARGO_SOURCE_",
        "CARGO_TERM_",
    ];
    let mut command = Command::new(program);
    command.current_dir(workspace());
    for (key, _) in env::vars_os() {
        let name = key.to_string_lossy();
        let tool = name.starts_with("CARGO") || name.starts_with("RUST");
        if tool && name != "RUSTUP_HOME" && !KEPT.iter().any(|kept| name.starts_with(kept)) {
            command.env_remove(&key);
        }
    }
    command.env_remove("LD_LIBRARY_PATH").env_remove("MAKEFLAGS").env_remove("OUT_DIR");
    command
}

/// Copies a file, unless the copy is there already: what depends on it by time is left alone.
pub(crate) fn copy_if_changed(from: &Path, to: &Path) -> Result<bool> {
    let new = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    if fs::read(to).is_ok_and(|old| old == new) {
        return Ok(false);
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    // A running program's file cannot be written to, but it can be replaced.
    let draft = to.with_extension("new");
    fs::copy(from, &draft)
        .and_then(|_| fs::rename(&draft, to))
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(true)
}
