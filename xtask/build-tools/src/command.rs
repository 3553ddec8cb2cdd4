//! Running other programs.
//! Invariant: an error names the program that failed, with its arguments.

use std::{
    env,
    ffi::OsStr,
    io,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

/// Reports a step on stderr, in the format of cargo.
pub fn status(verb: &str, message: &str) {
    eprintln!("{verb:>12} {message}");
}

/// The exit code of a task; an error is printed.
pub fn exit_code(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}

pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("this crate lies two folders below the root")
}

/// Runs `command` to completion and passes its output through.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start `{}`", line(command)))?;
    if !status.success() {
        bail!("`{}` failed: {status}", line(command));
    }
    Ok(())
}

/// Runs `command` to completion and returns its standard output, trimmed; the error contains its standard error.
pub fn output(command: &mut Command) -> Result<String> {
    Ok(String::from_utf8_lossy(&output_bytes(command)?).trim().to_owned())
}

/// Runs `command` to completion and returns its standard output as it is; the error contains its standard error.
pub fn output_bytes(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.output().with_context(|| format!("cannot start `{}`", line(command)))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed: {}: {}", line(command), output.status, stderr.trim());
    }
    Ok(output.stdout)
}

/// Waits for a child for at most `timeout`; kills it and returns `None` if it is still running then.
pub fn wait_or_kill(child: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    let begin = Instant::now();
    while begin.elapsed() <= timeout {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(Duration::from_millis(20));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

#[derive(Debug)]
pub struct KilledOnDrop(pub Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The command line as a user would type it.
pub fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// The cargo that started this program, to build for the host, without the variables that `cargo run` set for this program.
pub fn cargo() -> Command {
    cargo_without(&env::var_os("CARGO").unwrap_or_else(|| "cargo".into()), |name| {
        name.starts_with("CARGO_PKG_")
            || name.starts_with("CARGO_MANIFEST_")
            || matches!(name, "CARGO_BIN_NAME" | "CARGO_CRATE_NAME" | "OUT_DIR")
    })
}

/// [`cargo`] with a subcommand that builds below `target`, whatever folder the variables of this process name.
pub fn cargo_into_target(subcommand: &str) -> Command {
    let mut command = cargo();
    command.args([subcommand, "--target-dir"]).arg(workspace().join("target"));
    command
}

/// The folder of what cargo has fetched and installed.
pub fn cargo_home() -> Result<PathBuf> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    home.or_else(|| env::home_dir().map(|it| it.join(".cargo"))).context("there is no home folder")
}

/// A cargo that builds for another target: without any setting that is meant for the host's compiler.
pub(crate) fn cross_cargo(program: &Path) -> Command {
    const KEPT: [&str; 8] = [
        "CARGO_BUILD_JOBS",
        "CARGO_HOME",
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTR",
        "CARGO_SOURCE_",
        "CARGO_TERM_",
        "RUSTUP_HOME",
    ];
    cargo_without(program.as_os_str(), |name| {
        let is_setting = name.starts_with("CARGO") || name.starts_with("RUST");
        is_setting && !KEPT.iter().any(|it| name.starts_with(it))
            || matches!(name, "LD_LIBRARY_PATH" | "MAKEFLAGS" | "OUT_DIR")
    })
}

fn cargo_without(program: &OsStr, is_removed: impl Fn(&str) -> bool) -> Command {
    let mut command = Command::new(program);
    command.current_dir(workspace());
    for (key, _) in env::vars_os().filter(|(key, _)| is_removed(&key.to_string_lossy())) {
        command.env_remove(key);
    }
    command
}
