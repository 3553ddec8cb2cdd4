//! A backend that `brain` runs beside it: both end together.

use std::{env, ffi::OsString, fs, os::unix::fs::DirBuilderExt as _, path::PathBuf, process, time::Duration};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use proxy_contract::Target;
use tokio::{process::Child, time::timeout};

/// How long a backend may take to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The folder of a socket that no other user can reach; removed when dropped.
pub(super) struct PrivateSocket(PathBuf);

/// A running backend; killed when dropped.
pub(super) struct BackendProcess {
    name: String,
    child: Child,
}

impl PrivateSocket {
    pub(super) fn new() -> Result<Self> {
        let folder = env::temp_dir().join(format!("kube-proxy-ebpf-{}", process::id()));
        let made = fs::DirBuilder::new().mode(0o700).create(&folder);
        made.with_context(|| format!("cannot make the folder {}", folder.display()))?;
        Ok(Self(folder))
    }

    pub(super) fn target(&self) -> Target {
        Target::Unix(self.0.join("proxy.sock"))
    }
}

impl Drop for PrivateSocket {
    fn drop(&mut self) {
        // What is left is an empty folder for temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl BackendProcess {
    /// Starts a command with the variables that name its brain and its node.
    pub(super) fn start(command: &[OsString], target: &Target, node: &str) -> Result<Self> {
        let Some((program, arguments)) = command.split_first() else { bail!("the command is empty") };
        let name = program.to_string_lossy().into_owned();
        let mut command = tokio::process::Command::new(program);
        command.args(arguments).env("KUBE_PROXY_EBPF_TARGET", target.to_string()).env("NODE_NAME", node);
        let child = command.kill_on_drop(true).spawn();
        Ok(Self { child: child.with_context(|| format!("cannot start the backend {name}"))?, name })
    }

    /// Waits until it ends by itself.
    pub(super) async fn ended(&mut self) -> Result<()> {
        let status = self.child.wait().await?;
        if !status.success() {
            bail!("the backend {} has ended: {status}", self.name);
        }
        Ok(())
    }

    pub(super) async fn stop(mut self) {
        let pid = self.child.id().and_then(|it| i32::try_from(it).ok());
        // It may have ended by itself.
        if let Some(pid) = pid
            && kill(Pid::from_raw(pid), Signal::SIGTERM).is_ok()
        {
            let _ = timeout(STOP_TIMEOUT, self.child.wait()).await;
        }
    }
}
