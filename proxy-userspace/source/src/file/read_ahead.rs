//! Reads many new files at a time, on all processors: nearly all of a first read is parsing.
//!
//! Invariant: what was read ahead counts only while the file has the signature that it had before.

use std::{collections::HashMap, fs, num::NonZero, os::unix::fs::MetadataExt, path::Path, thread};

use model::RequestedMetadata;

use super::{contents::Contents, documents::DocumentError};

/// For how many files threads are worth starting.
const MIN_FILES: usize = 64;

/// Device, inode, size, mtime and ctime: differs after every change of a file.
pub(super) type Signature = (u64, u64, u64, i64, i64, i64, i64);

pub(super) fn signature(it: &fs::Metadata) -> Signature {
    (it.dev(), it.ino(), it.size(), it.mtime(), it.mtime_nsec(), it.ctime(), it.ctime_nsec())
}

/// What was read ahead of a file, and its signature then.
pub(super) type ReadAhead<'a> = HashMap<&'a Path, (Signature, Result<Contents, DocumentError>)>;

/// Reads files ahead. Those that cannot be read are left out, and all if there are few.
pub(super) fn read_ahead<'a>(paths: &[&'a Path], requested: &RequestedMetadata) -> ReadAhead<'a> {
    if paths.len() < MIN_FILES {
        return ReadAhead::default();
    }
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let read = |paths: &[&'a Path]| -> Vec<_> {
        let files = paths.iter().filter_map(|path| {
            let signature = signature(&fs::metadata(path).ok().filter(fs::Metadata::is_file)?);
            let contents = Contents::parse(&fs::read(path).ok()?, &Contents::default(), requested);
            Some((*path, (signature, contents)))
        });
        files.collect()
    };
    thread::scope(|scope| {
        let parts = paths.chunks(paths.len().div_ceil(threads));
        let start = |paths| thread::Builder::new().spawn_scoped(scope, move || read(paths)).ok();
        let running: Vec<_> = parts.filter_map(start).collect();
        running.into_iter().flat_map(|it| it.join().unwrap_or_default()).collect()
    })
}
