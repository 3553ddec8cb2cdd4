//! The fields of a `KubeProxyConfiguration`, and how each is used.
//!
//! Invariant: a field without a flag has a reason, in words for users who have set it.

use std::sync::LazyLock;

#[derive(Clone, Debug)]
pub struct Field {
    /// The path, as in `clientConnection.kubeconfig`; with `.*` at the end, all fields below it.
    pub path: &'static str,
    /// The id of the corresponding flag.
    pub flag: Option<&'static str>,
    /// kube-proxy's defaults; an empty value means the same.
    pub defaults: Vec<&'static str>,
    /// Why a command without such a flag does not need the field.
    pub reason: &'static str,
}

/// The field at a path.
pub(super) fn field(path: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|it| match it.path.strip_suffix(".*") {
        Some(above) => path.strip_prefix(above).is_some_and(|it| it.is_empty() || it.starts_with('.')),
        None => it.path == path,
    })
}

/// All fields, in the order of the documents, from lines of `fields.txt`: path, flag, defaults and reason.
pub static FIELDS: LazyLock<Vec<Field>> = LazyLock::new(|| {
    let field = |line: &'static str| {
        let mut columns = line.split('|').map(str::trim);
        let mut next = || columns.next().expect("each line has four columns");
        let (path, flag, defaults, reason) = (next(), next(), next(), next());
        let flag = Some(flag).filter(|it| !it.is_empty());
        Field { path, flag, defaults: defaults.split_whitespace().collect(), reason }
    };
    include_str!("fields.txt").lines().filter(|it| !it.starts_with('#')).map(field).collect()
});
