//! Reads bodies, and the lines of a watch.

use std::time::Duration;

use http_body_util::BodyExt as _;
use kube::client::Body;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::timeout;

use super::watch_error::{ErrorKind, WatchError};
use crate::kube_types::objects::Metadata;

/// A larger buffer is freed when it is empty.
const MAX_IDLE_BUFFER: usize = 64 << 10;

#[derive(Deserialize)]
pub(super) struct WatchEvent<'a> {
    #[serde(rename = "type")]
    pub(super) event_type: EventType,
    #[serde(borrow)]
    pub(super) object: &'a RawValue,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum EventType {
    Added,
    Modified,
    Deleted,
    Bookmark,
    Error,
}

#[derive(Default, Deserialize)]
pub(super) struct PartialObject {
    #[serde(default)]
    pub(super) metadata: Metadata,
}

/// A response body that arrives line by line.
pub(super) struct Lines {
    body: Body,
    buffer: Vec<u8>,
}

impl Lines {
    pub(super) fn new(body: Body) -> Self {
        Self { body, buffer: Vec::new() }
    }

    /// Waits for data and passes all complete lines to `line`; false at the end of the body.
    ///
    /// An incomplete last line is dropped with the body.
    pub(super) async fn read(
        &mut self,
        resource: &str,
        limit: Duration,
        mut line: impl FnMut(&[u8]) -> Result<(), WatchError>,
    ) -> Result<bool, WatchError> {
        let Some(data) = next_data(&mut self.body, resource, limit).await? else { return Ok(false) };
        let mut rest: &[u8] = &data;
        while let Some(end) = rest.iter().position(|it| *it == b'\n') {
            let (head, tail) = rest.split_at(end);
            rest = &tail[1..];
            if self.buffer.is_empty() {
                line(head)?;
            } else {
                self.buffer.extend_from_slice(head);
                line(&self.buffer)?;
                self.buffer.clear();
            }
        }
        self.buffer.extend_from_slice(rest);
        if self.buffer.is_empty() && self.buffer.capacity() > MAX_IDLE_BUFFER {
            self.buffer = Vec::new();
        }
        Ok(true)
    }
}

/// Reads a whole body, at least its first `max` bytes.
pub(super) async fn read_all(
    body: &mut Body,
    resource: &str,
    limit: Duration,
    max: usize,
) -> Result<Vec<u8>, WatchError> {
    let mut bytes = Vec::new();
    while bytes.len() < max
        && let Some(data) = next_data(body, resource, limit).await?
    {
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

/// Waits for more of a body; `None` at its end.
pub(super) async fn next_data(
    body: &mut Body,
    resource: &str,
    limit: Duration,
) -> Result<Option<bytes::Bytes>, WatchError> {
    loop {
        let Ok(frame) = timeout(limit, body.frame()).await else {
            let text = format!("{resource}: the API server has not sent anything for {limit:.0?}");
            return Err(WatchError::new(ErrorKind::NoResponse, text));
        };
        match frame {
            None => return Ok(None),
            Some(Err(error)) => {
                let error = WatchError::connection(resource, &error);
                return Err(WatchError { kind: ErrorKind::NoResponse, ..error });
            }
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}
