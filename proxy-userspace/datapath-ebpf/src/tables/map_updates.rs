//! Entries to be written to the tables and to be deleted, with keys and values concatenated as batch commands take them.

use bytemuck::NoUninit;

use crate::tables::store::Table;

/// The updates of one table; deletes come before writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableUpdates {
    pub deletes: Vec<u8>,
    pub keys: Vec<u8>,
    pub values: Vec<u8>,
}

/// The difference between two generations, or a whole one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MapUpdates {
    tables: [TableUpdates; Table::COUNT],
}

impl MapUpdates {
    /// Writes an entry, or deletes it if it has no value.
    pub(crate) fn set(&mut self, table: Table, key: &impl NoUninit, value: Option<&impl NoUninit>) {
        let updates = &mut self.tables[table.index()];
        match value {
            Some(value) => {
                updates.keys.extend_from_slice(bytemuck::bytes_of(key));
                updates.values.extend_from_slice(bytemuck::bytes_of(value));
            }
            None => updates.deletes.extend_from_slice(bytemuck::bytes_of(key)),
        }
    }

    pub(crate) fn table(&self, table: Table) -> &TableUpdates {
        &self.tables[table.index()]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tables.iter().all(|it| it.deletes.is_empty() && it.keys.is_empty())
    }
}
