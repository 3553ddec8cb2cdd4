//! The signals that end a backend.

use std::io;

/// Waits for SIGTERM or Ctrl-C; on Windows, for Ctrl-C or the end of the console.
///
/// # Errors
///
/// The signals cannot be received.
pub(super) async fn ended() -> io::Result<()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            it = tokio::signal::ctrl_c() => it,
            _ = terminate.recv() => Ok(()),
        }
    }
    #[cfg(windows)]
    {
        let mut closed = tokio::signal::windows::ctrl_close()?;
        tokio::select! {
            it = tokio::signal::ctrl_c() => it,
            _ = closed.recv() => Ok(()),
        }
    }
}
