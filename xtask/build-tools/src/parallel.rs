//! Work that threads share.

use std::{iter, thread};

use anyhow::Result;
use parking_lot::Mutex;

/// Calls `work` with each item, so many at a time, and returns the results in the order of the items.
///
/// An item is taken from the iterator when a thread is free for it. A thread ends at an error, which is returned when the
/// others have ended.
pub fn in_parallel<T, R: Send>(
    threads: usize,
    items: impl IntoIterator<Item = T, IntoIter: Send>,
    work: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let queue = Mutex::new(items.into_iter().enumerate());
    let next = || queue.lock().next();
    let worker = || -> Result<Vec<(usize, R)>> {
        iter::from_fn(next).map(|(index, item)| Ok((index, work(item)?))).collect()
    };
    let results: Result<Vec<_>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().map(|it| it.join().expect("no worker panics")).collect()
    });
    let mut results: Vec<_> = results?.into_iter().flatten().collect();
    results.sort_by_key(|it| it.0);
    Ok(results.into_iter().map(|(_, it)| it).collect())
}
