//! Files that change on a real file system.
