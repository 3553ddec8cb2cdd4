//! Arbitrary bytes as a KubeProxyConfiguration.

use std::path::Path;

use kube_proxy_config::{FIELDS, File};

use crate::invariants;

/// A file is refused in a line, or every value of it is that of a flag, which its field is named for, or remarked on.
pub fn target(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match File::parse(Path::new("file"), text, |it| it != "nft_masquerade_bit") {
        Err(error) => invariants::line(&error.to_string()),
        Ok(file) => {
            file.remarks().for_each(invariants::line);
            for (id, values) in file.defaults() {
                let field = file.field_of(id).expect("a value has a field");
                let known = ["kind", "mode"].contains(&field) || FIELDS.iter().any(|it| it.path == field);
                assert!(known && !values.is_empty(), "{id} of {field}: {values:?}");
            }
        }
    }
}
