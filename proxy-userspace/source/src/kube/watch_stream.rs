//! EventType an API server sends: lists, and lines of a watch.
//!
//! The one rule: an object is decoded alone, straight into what is read of it; no list of objects is ever held.

use std::time::Duration;

use http_body_util::BodyExt as _;
use kube::client::Body;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::watch_error::{ErrorKind, WatchError};
use crate::kube_types::objects::Metadata;

/// One page of a list.
#[derive(Deserialize)]
pub(super) struct Page<'a> {
    #[serde(default)]
    pub(super) metadata: PageMetadata,
    #[serde(borrow, default)]
    pub(super) items: Option<Vec<&'a RawValue>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PageMetadata {
    pub(super) resource_version: Option<String>,
    /// Where the next page begins; nothing, or empty, after the last one.
    #[serde(rename = "continue")]
    pub(super) next: Option<String>,
}

/// One line of a watch.
#[derive(Deserialize)]
pub(super) struct Event<'a> {
    #[serde(rename = "type")]
    pub(super) what: EventType,
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

/// Any object, as far as its name goes.
#[derive(Default, Deserialize)]
pub(super) struct Named {
    #[serde(default)]
    pub(super) metadata: Metadata,
}

/// Decodes an object, or says which field does not fit.
pub(super) fn object<T: DeserializeOwned>(text: &RawValue) -> Result<T, String> {
    serde_json::from_str(text.get()).map_err(|_| {
        let mut deserializer = serde_json::Deserializer::from_str(text.get());
        match serde_path_to_error::deserialize::<_, T>(&mut deserializer) {
            Ok(_) => "it cannot be read".to_owned(),
            Err(error) => format!("{}: {}", error.path(), error.inner()),
        }
    })
}

/// A body that arrives line by line.
pub(super) struct Lines {
    body: Body,
    buffer: Vec<u8>,
}

impl Lines {
    pub(super) fn new(body: Body) -> Self {
        Self { body, buffer: Vec::new() }
    }

    /// Waits for more, and hands over all lines that are complete; false at the end of the body.
    ///
    /// A line that never became complete is dropped with the body.
    pub(super) async fn read(
        &mut self,
        what: &str,
        patience: Duration,
        mut line: impl FnMut(&[u8]) -> Result<(), WatchError>,
    ) -> Result<bool, WatchError> {
        let Some(data) = frame(&mut self.body, what, patience).await? else { return Ok(false) };
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
        if self.buffer.is_empty() && self.buffer.capacity() > LARGE {
            self.buffer = Vec::new();
        }
        Ok(true)
    }
}

/// A buffer above this is given back when it is empty.
const LARGE: usize = 64 << 10;

/// A whole body, of `limit` bytes at most.
pub(super) async fn whole(
    body: &mut Body,
    what: &str,
    patience: Duration,
    limit: usize,
) -> Result<Vec<u8>, WatchError> {
    let mut bytes = Vec::new();
    while bytes.len() < limit
        && let Some(data) = frame(body, what, patience).await?
    {
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

async fn frame(body: &mut Body, what: &str, patience: Duration) -> Result<Option<bytes::Bytes>, WatchError> {
    loop {
        let Ok(frame) = tokio::time::timeout(patience, body.frame()).await else {
            let text = format!("{what}: the server has sent nothing for {patience:.0?}");
            return Err(WatchError::new(ErrorKind::Credentials, text));
        };
        match frame {
            None => return Ok(None),
            Some(Err(error)) => return Err(WatchError::connection(what, &error)),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}
