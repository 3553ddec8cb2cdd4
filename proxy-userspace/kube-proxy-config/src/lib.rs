//! Reads a `KubeProxyConfiguration`, as kubeadm writes it for kube-proxy, as values of flags; and says why flags of kube-proxy are
//! not taken.
//!
//! Invariant: every field is used, or a remark names it with the reason. Unknown fields are remarked on, too; only a file of
//! another kind is an error.

#![forbid(unsafe_code)]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use serde_json::{Value, json};
use serde_saphyr::options::DuplicateKeyPolicy;

const VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
const KIND: &str = "KubeProxyConfiguration";

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct ConfigError {
    pub path: PathBuf,
    /// What is wrong, and the remedy.
    pub reason: String,
}

/// The content of a file.
#[derive(Debug, Default)]
pub struct File {
    pub path: PathBuf,
    pub text: String,
    /// Values of flags by id, with the fields that they come from.
    values: BTreeMap<&'static str, (Vec<String>, String)>,
    /// What to log about its fields.
    pub remarks: Vec<String>,
}

impl File {
    /// Reads a file; `is_flag` tells which flags the command has.
    ///
    /// # Errors
    ///
    /// If it cannot be read, or as for [`File::parse`].
    pub fn read(path: &Path, is_flag: impl Fn(&str) -> bool) -> Result<Self, ConfigError> {
        let invalid = |reason: String| ConfigError { path: path.to_owned(), reason: escaped_line(&reason) };
        let text = fs::read_to_string(path)
            .map_err(|error| invalid(format!("{error}; set --config to a readable file")))?;
        Self::parse(path, &text, is_flag)
    }

    /// Reads the text of a file; `is_flag` tells which flags the command has.
    ///
    /// # Errors
    ///
    /// If it is no YAML, of another kind, or a flag cannot have the value of its field.
    pub fn parse(path: &Path, text: &str, is_flag: impl Fn(&str) -> bool) -> Result<Self, ConfigError> {
        let invalid = |reason: String| ConfigError { path: path.to_owned(), reason: escaped_line(&reason) };
        let mut file = Self { path: path.to_owned(), text: text.to_owned(), ..Self::default() };
        let value: Value = match serde_saphyr::from_str(text) {
            Ok(value) => value,
            Err(error) => {
                let reason = error.without_snippet().to_string();
                let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
                // kube-proxy takes the last one of a field that is listed twice, with a warning.
                let last_wins = serde_saphyr::options! { duplicate_keys: DuplicateKeyPolicy::LastWins };
                let value = serde_saphyr::from_str_with_options(text, last_wins);
                let value = value.map_err(|_| invalid(format!("{reason}; correct the YAML")))?;
                file.remark(&format!("{}: {reason}; the last one is used", path.display()));
                value
            }
        };
        check_kind(&value).map_err(invalid)?;
        // The configuration is that of a cluster, so the cluster is the source.
        if is_flag("source") {
            file.values.insert("source", (vec!["kube".into()], "kind".into()));
        }
        let mode = value.get("mode").and_then(Value::as_str).unwrap_or_default();
        // kube-proxy's default in this mode, which a value of the file replaces.
        if mode == "nftables" && is_flag("node_port_addresses") {
            file.values.insert("node_port_addresses", (vec!["primary".into()], "mode".into()));
        }
        let mut leaves = Vec::new();
        collect("", &value, &mut leaves);
        for (at, value) in leaves {
            let is_used = is_used_in(&at, mode);
            file.add(&at, value, |it| is_used && is_flag(it), is_used).map_err(invalid)?;
        }
        Ok(file)
    }

    /// The flags that have a value in the file.
    pub fn defaults(&self) -> impl Iterator<Item = (&'static str, &[String])> {
        self.values.iter().map(|(id, (values, _))| (*id, values.as_slice()))
    }

    /// The field with the value of a flag.
    pub fn field_of(&self, id: &str) -> Option<&str> {
        self.values.get(id).map(|(_, field)| field.as_str())
    }

    fn remark(&mut self, text: &str) {
        self.remarks.push(escaped_line(text));
    }

    fn add(
        &mut self,
        at: &str,
        value: &Value,
        is_flag: impl Fn(&str) -> bool,
        is_used: bool,
    ) -> Result<(), String> {
        let shown = self.path.display();
        let Some(Field { defaults, flag, reason, .. }) = field(at) else {
            self.remark(&format!("{shown}: {at} is unknown and ignored; is it misspelled?"));
            return Ok(());
        };
        let is_unset = if has_zero(at) { value.is_null() } else { is_empty(value) };
        if is_unset {
            return Ok(());
        }
        if let Some(id) = flag.filter(|it| is_flag(it)) {
            if let Some(values) = values(at, value) {
                self.values.insert(id, (values, at.to_owned()));
                return Ok(());
            }
            return Err(format!("{at}: {value} is not a single value"));
        }
        let reason = if is_used { *reason } else { "it belongs to another mode" };
        let text = plain(value);
        if !defaults.contains(&text.as_str()) {
            self.remark(&format!("{shown}: {at}: {text} is ignored, because {reason}"));
        }
        Ok(())
    }
}

/// The text with control characters escaped.
fn escaped_line(text: &str) -> String {
    let escaped = |it: char| if it.is_control() { it.escape_default().collect() } else { String::from(it) };
    text.chars().map(escaped).collect()
}

/// Whether kube-proxy uses a field in this mode; the default mode is iptables.
fn is_used_in(at: &str, mode: &str) -> bool {
    match mode {
        "nftables" => !at.starts_with("iptables."),
        _ => !at.starts_with("nftables."),
    }
}

fn check_kind(value: &Value) -> Result<(), String> {
    let word = |key| value.get(key).and_then(Value::as_str).unwrap_or_default();
    let (version, kind) = (word("apiVersion"), word("kind"));
    if (version, kind) == (VERSION, KIND) {
        return Ok(());
    }
    let what = match (version, kind) {
        ("", "") => "a file without apiVersion and kind".to_owned(),
        _ => format!("{version} {kind}"),
    };
    let remedy = match kind {
        "ConfigMap" => "extract its config.conf to a file".to_owned(),
        KIND => format!("convert it to {VERSION}"),
        _ => format!("use a {KIND} of {VERSION}"),
    };
    Err(format!("--config does not support {what}; {remedy}"))
}

/// Collects the values of a document, with their paths.
fn collect<'a>(at: &str, value: &'a Value, found: &mut Vec<(String, &'a Value)>) {
    for (key, value) in value.as_object().into_iter().flatten() {
        let at = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
        match value {
            _ if matches!(at.as_str(), "apiVersion" | "kind") => {}
            Value::Object(inner) if !inner.is_empty() && at != "featureGates" => collect(&at, value, found),
            _ => found.push((at, value)),
        }
    }
}

/// Whether 0 and `false` are values of a field, which is `null` where it is not set.
fn has_zero(at: &str) -> bool {
    const NULLABLE: [&str; 4] =
        ["iptables.masqueradeBit", "nftables.masqueradeBit", "iptables.localhostNodePorts", "oomScoreAdj"];
    at.starts_with("conntrack.") || NULLABLE.contains(&at)
}

/// Whether a value means the same as a missing field: Go serializes fields that are not set.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => matches!(text.as_str(), "" | "0s"),
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
    }
}

/// The value of `--verbose` for a level of klog: 4 is for debugging, 6 and more for tracing.
pub fn verbosity(klog: u64) -> u8 {
    if klog >= 6 { 2 } else { u8::from(klog >= 4) }
}

fn values(at: &str, value: &Value) -> Option<Vec<String>> {
    match (at, value) {
        ("logging.verbosity", _) => value.as_u64().map(|it| vec![verbosity(it).to_string()]),
        ("nodePortAddresses", Value::Array(items)) => Some(items.iter().map(plain).collect()),
        ("featureGates", Value::Object(gates)) => {
            let gates: Vec<_> = gates.iter().map(|(name, it)| format!("{name}={}", plain(it))).collect();
            Some(vec![gates.join(",")])
        }
        (_, Value::Array(_) | Value::Object(_)) => None,
        _ => Some(vec![plain(value)]),
    }
}

/// A `KubeProxyConfiguration` with the values of flags, by their ids: each field that has a flag of the command.
pub fn document<'a>(value_of: impl Fn(&str) -> Option<&'a str>) -> Value {
    let mut document = json!({ "apiVersion": VERSION, "kind": KIND });
    for field in &*FIELDS {
        let Some(value) = field.flag.and_then(&value_of) else { continue };
        let mut place = &mut document;
        for key in field.path.split('.') {
            place = &mut place[key];
        }
        *place = typed(field.path, value);
    }
    document
}

/// The value of a field, from that of its flag.
fn typed(at: &str, value: &str) -> Value {
    let words = || value.split(',').filter(|it| !it.is_empty());
    let name = at.rsplit('.').next().unwrap_or(at);
    let parsed = || serde_json::from_str(value).unwrap_or_else(|_| value.into());
    match name {
        // The least level of klog with this meaning.
        "verbosity" => json!(match value {
            "0" => 0,
            "1" => 4,
            _ => 6,
        }),
        "nodePortAddresses" => words().collect(),
        "featureGates" => {
            words().filter_map(|it| it.split_once('=')).map(|(name, it)| (name, it == "true")).collect()
        }
        "masqueradeAll" | "masqueradeBit" | "maxPerCore" | "min" | "tcpBeLiberal" => parsed(),
        _ => value.into(),
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A field of a `KubeProxyConfiguration`. One without a flag has a reason, in words for users who have set it.
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

fn field(path: &str) -> Option<&'static Field> {
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

/// Why a command does not take a flag of kube-proxy; `None` if kube-proxy has no such flag, or the command needs it.
pub fn reason(name: &str) -> Option<&'static str> {
    let (_, reason) = flags().find(|(it, _)| *it == name)?;
    // A command without the flag does not need the field of the file either.
    let id = name.replace('-', "_");
    let of_field = || Some(FIELDS.iter().find(|it| it.flag == Some(&*id))?.reason);
    reason.or_else(of_field)
}

/// The flags of kube-proxy 1.36 on Linux (`AddFlags` in its `cmd/kube-proxy/app/options.go`, and those of its logs), without
/// those that klog keeps for programs of old: the long name of each, from lines of `flags.txt`. One that `run` does not take has
/// a reason, in words for users who have set it.
pub fn flags() -> impl Iterator<Item = (&'static str, Option<&'static str>)> + Clone {
    include_str!("flags.txt").lines().map(|line| match line.split_once(": ") {
        Some((name, reason)) => (name, Some(reason)),
        None => (line, None),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_flags_become_fields_that_are_read_as_these_values() {
        let flags = [
            ("cluster_cidr", "10.0.0.0/8,fd00::/8"),
            ("node_port_addresses", "192.0.2.0/24,primary"),
            ("nft_masquerade_bit", "15"),
            ("masquerade_all", "true"),
            ("feature_gates", "A=true,B=false"),
            ("conntrack_min", "0"),
            ("conntrack_udp_timeout", "30s"),
            ("verbose", "1"),
        ];
        let document = document(|id| flags.iter().find(|it| it.0 == id).map(|it| it.1));
        assert_eq!(document["nftables"], json!({ "masqueradeAll": true, "masqueradeBit": 15 }));
        assert_eq!(document["conntrack"], json!({ "min": 0, "udpTimeout": "30s" }));
        assert_eq!(document.get("bindAddress"), None);
        let file = File::parse("configz".as_ref(), &document.to_string(), |_| true).unwrap();
        for (id, value) in flags {
            let read = file.defaults().find(|it| it.0 == id).map(|it| it.1.join(","));
            assert_eq!(read.as_deref(), Some(value), "{id}");
        }
    }
}
