//! Rows of tables as the kernel takes them: keys and values, one after the other.

use bytemuck::NoUninit;

use crate::store::Table;

/// What is to be deleted from a table, and then written to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TableChanges {
    /// Keys to delete.
    pub deletes: Vec<u8>,
    /// Keys to write.
    pub keys: Vec<u8>,
    /// Their values.
    pub values: Vec<u8>,
}

/// A difference between two generations, or the whole of one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    tables: [TableChanges; Table::COUNT],
}

impl Changes {
    /// Adds an entry to be written.
    pub(super) fn put(&mut self, table: Table, key: &impl NoUninit, value: &impl NoUninit) {
        let changes = &mut self.tables[table.index()];
        changes.keys.extend_from_slice(bytemuck::bytes_of(key));
        changes.values.extend_from_slice(bytemuck::bytes_of(value));
    }

    /// Adds a key to be deleted; deletes come before writes.
    pub(super) fn delete(&mut self, table: Table, key: &impl NoUninit) {
        self.tables[table.index()].deletes.extend_from_slice(bytemuck::bytes_of(key));
    }

    /// What concerns one table.
    pub(super) fn table(&self, table: Table) -> &TableChanges {
        &self.tables[table.index()]
    }

    /// Whether there is nothing to do.
    pub(super) fn is_empty(&self) -> bool {
        self.tables.iter().all(|it| it.deletes.is_empty() && it.keys.is_empty())
    }
}
