//! What a later stage derives from an object and keeps with it.

use std::{
    any::Any,
    fmt,
    sync::{Arc, OnceLock},
};

/// What a later stage has derived from an object that does not change any more: it lives as long as the object, and all who
/// share the object share it. It is no part of the object: a copy has none, and all are equal.
#[derive(Default)]
pub struct Memo(OnceLock<Arc<dyn Any + Send + Sync>>);

impl Memo {
    /// Whether nothing was derived yet.
    pub fn is_empty(&self) -> bool {
        self.0.get().is_none()
    }

    /// What was derived, or is now; `None` if something of another type was.
    pub fn get_or_init<T: Any + Send + Sync>(&self, derive: impl FnOnce() -> T) -> Option<&T> {
        self.0.get_or_init(|| Arc::new(derive())).downcast_ref()
    }
}

impl Clone for Memo {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl fmt::Debug for Memo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Memo")
    }
}

impl PartialEq for Memo {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Memo {}
