//! Pseudonyms for addresses and names in texts.
//!
//! Invariant: a word has the same pseudonym wherever it occurs, and no two words share one. JSON stays the same document:
//! its keys, and the names of labels, are kept. In doubt, a name is replaced.

use std::{
    collections::HashSet,
    hash::{BuildHasher as _, RandomState},
    io::{self, Write},
    net::IpAddr,
};

/// Names that every cluster has, and words of JSON.
const COMMON: [&str; 9] = [
    "default",
    "kube-system",
    "kube-public",
    "kube-node-lease",
    "kubernetes",
    "localhost",
    "true",
    "false",
    "null",
];

const KINDS: [&str; 5] = ["namespace", "service", "pod", "node", "host"];

/// How much of a text is replaced at a time, in bytes; more, up to where an object of JSON or a line ends.
const BUFFER: usize = 64 << 10;

/// A pseudonym is a keyed hash of its word, so no address and no text of a name is kept.
#[derive(Debug, Default)]
pub(super) struct Pseudonyms {
    /// The hashes of names, each with the number of its kind in the last three bits.
    names: HashSet<u64>,
    hasher: RandomState,
}

impl Pseudonyms {
    /// Replaces this name from now on. The kind appears in the pseudonym.
    pub(super) fn learn(&mut self, kind: &'static str, name: &str) {
        // At the end of a sentence.
        let name = name.trim_end_matches('.');
        let is_name = name.contains(|it: char| it.is_ascii_alphabetic()) && !COMMON.contains(&name);
        if is_name && name.parse::<IpAddr>().is_err() && self.kind_of(name).is_none() {
            let number = (0..).zip(KINDS).find(|(_, it)| *it == kind).map_or(0, |(number, _)| number);
            self.names.insert(self.hasher.hash_one(name) & !7 | number);
        }
    }

    /// The kind of a name that was learned.
    fn kind_of(&self, name: &str) -> Option<&'static str> {
        let hash = self.hasher.hash_one(name) & !7;
        (0..).zip(KINDS).find_map(|(number, kind)| self.names.contains(&(hash | number)).then_some(kind))
    }

    /// The name of a Service, as in `shop/web` and `shop/web:http`.
    pub(super) fn learn_service(&mut self, text: &str) {
        if let Some((namespace, name)) = text.split_once('/') {
            self.learn("namespace", namespace);
            self.learn("service", name.split(':').next().unwrap_or_default());
        }
    }

    /// The names in fields of JSON, as in `"podName":"web-1"`, and in those of log lines and labels of metrics, as in
    /// `namespace="shop"`; the hosts of URLs; in prose also names with their namespace.
    pub(super) fn learn_text(&mut self, text: &str, is_prose: bool) {
        let text = &unescaped(text);
        for separator in ["\":\"", "="] {
            for (at, _) in text.match_indices(separator) {
                let key = text[..at].rsplit(|it: char| !is_word(it)).next().unwrap_or_default();
                let rest = text[at + separator.len()..].trim_start_matches('"');
                let value = beginning(rest, |it| is_word(it) || it == '/');
                match key {
                    "namespace" => self.learn("namespace", value),
                    "podName" => self.learn("pod", value),
                    "node" | "nodeName" | "hostname" => self.learn("node", value),
                    "service" if value.contains('/') => self.learn_service(value),
                    "service" => self.learn("service", value),
                    "item" if separator != "=" => {
                        let item = rest.split("\",").next().unwrap_or_default();
                        self.learn_qualified_names(item);
                    }
                    "name" if separator != "=" && !is_prose => {
                        match rest[value.len()..].split('"').nth(2).unwrap_or_default() {
                            // Of ports, sources, tables and ServiceCIDRs.
                            "protocol" | "port" | "address" | "entries" | "cidrs" => {}
                            "type" | "ips" => self.learn("service", value),
                            "uid" => self.learn("pod", value),
                            _ => self.learn("node", value),
                        }
                    }
                    _ => {}
                }
            }
        }
        for url in text.split("://").skip(1) {
            self.learn("host", beginning(url, |it| is_word(it) && it != ':'));
        }
        if is_prose {
            self.learn_qualified_names(text);
        }
    }

    /// Names with their namespace, as in `shop/web`, of objects that may exist no more.
    fn learn_qualified_names(&mut self, text: &str) {
        let is_name = |it: &str| {
            it.starts_with(|it: char| it.is_ascii_lowercase())
                && it.chars().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || "-.".contains(it))
        };
        for word in text.split(|it: char| it.is_whitespace() || "\"'`,;:()=".contains(it)) {
            if let Some((namespace, name)) = word.split_once('/')
                && is_name(namespace)
                && !namespace.contains('.')
                && is_name(name)
            {
                self.learn_service(word);
            }
        }
    }

    pub(super) fn replace(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(start) = rest.find(is_word) {
            let (before, tail) = rest.split_at(start);
            let word = beginning(tail, is_word);
            rest = &tail[word.len()..];
            out.push_str(before);
            let is_key = rest.starts_with('=') || before.ends_with('"') && rest.starts_with("\":");
            out.push_str(&if is_key { word.to_owned() } else { self.of_escaped_word(before, word) });
        }
        out + rest
    }

    /// A word with pseudonyms, after this text: in strings of JSON and in lines of the log, its beginning may be part of an escape.
    fn of_escaped_word(&self, before: &str, word: &str) -> String {
        let backslashes = before.len() - before.trim_end_matches('\\').len();
        if backslashes == 0 {
            return self.of_word(word);
        }
        let (escape, name) = word.split_at(escape_len(word));
        let replaced = self.of_word(name);
        // `\\n` is a newline in a string that is quoted in another one; else a backslash before a word with an n.
        if backslashes.is_multiple_of(2) && replaced == name {
            return self.of_word(word);
        }
        escape.to_owned() + &replaced
    }

    /// A word with pseudonyms: for all of it, or for what is between its colons and dots.
    fn of_word(&self, word: &str) -> String {
        // At the end of a sentence, or before an explanation; but `fd00::` is an address as it is.
        let core = word.trim_end_matches(['.', ':']);
        if let Some((known, it)) = [word, core].into_iter().find_map(|it| Some((self.of(it)?, it))) {
            return known + &word[it.len()..];
        }
        let Some(separator) = [":", "."].into_iter().find(|it| core.contains(*it)) else {
            return word.to_owned();
        };
        let parts: Vec<_> = core.split(separator).map(|it| self.of_word(it)).collect();
        parts.join(separator) + &word[core.len()..]
    }

    /// The pseudonym of an address, or of a name that was learned.
    fn of(&self, word: &str) -> Option<String> {
        let (kind, word) = match word.parse::<IpAddr>() {
            Ok(it) if it.is_loopback() || it.is_unspecified() => return None,
            Ok(it) => (if it.is_ipv4() { "ipv4" } else { "ipv6" }, it.to_string()),
            Err(_) if is_invalid_ipv4(word) => ("invalid-ipv4", word.to_owned()),
            Err(_) => (self.kind_of(word)?, word.to_owned()),
        };
        Some(format!("{kind}-{:016x}", self.hasher.hash_one(&*word)))
    }
}

/// Writes a text with pseudonyms, in pieces whose names are learned first.
pub(super) struct Anonymized<'a> {
    pub(super) pseudonyms: &'a mut Pseudonyms,
    out: &'a mut dyn Write,
    text: Vec<u8>,
    is_prose: bool,
}

impl<'a> Anonymized<'a> {
    pub(super) fn new(pseudonyms: &'a mut Pseudonyms, out: &'a mut dyn Write, is_prose: bool) -> Self {
        Self { pseudonyms, out, text: Vec::new(), is_prose }
    }

    /// Writes the rest.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.drain(self.text.len())
    }

    fn drain(&mut self, end: usize) -> io::Result<()> {
        let text = String::from_utf8_lossy(&self.text[..end]);
        self.pseudonyms.learn_text(&text, self.is_prose);
        self.out.write_all(self.pseudonyms.replace(&text).as_bytes())?;
        self.text.drain(..end);
        Ok(())
    }
}

impl Write for Anonymized<'_> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(text);
        // A word, and a key with its value and the next key, are in one piece.
        if self.text.len() >= BUFFER
            && let Some(last) = text.iter().rposition(|it| b"}\n".contains(it))
        {
            self.drain(self.text.len() - text.len() + last + 1)?;
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a character is part of a word.
fn is_word(it: char) -> bool {
    it.is_ascii_alphanumeric() || "._:-".contains(it)
}

/// A text without the backslashes of escapes, also in strings that are quoted in others: quotes stay, and a newline stands for any
/// other character.
fn unescaped(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        if !part.is_empty() && !part.starts_with('"') {
            out.push('\n');
        }
        out.push_str(&part[escape_len(part)..]);
    }
    out
}

/// How much of what follows a backslash is part of the escape, as in `nweb` and `u0009web`.
fn escape_len(text: &str) -> usize {
    match text.as_bytes() {
        [b'b' | b'f' | b'n' | b'r' | b't', ..] => 1,
        [b'u', a, b, c, d, ..] if [a, b, c, d].iter().all(|it| it.is_ascii_hexdigit()) => 5,
        _ => 0,
    }
}

/// What a text begins with, of such characters.
fn beginning(text: &str, has: impl Fn(char) -> bool) -> &str {
    text.split(|it: char| !has(it)).next().unwrap_or_default()
}

/// Whether a word is an address that a user has mistyped, as in `10.96.0.300`.
fn is_invalid_ipv4(word: &str) -> bool {
    let is_number = |it: &str| !it.is_empty() && it.bytes().all(|it| it.is_ascii_digit());
    word.split('.').count() == 4 && word.split('.').all(is_number) && word.parse::<IpAddr>().is_err()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proxy_contract::localv1;
    use serde::Serialize;
    use serde_json::Value;

    use super::*;

    /// Replaces a text in which each word that has a pseudonym is marked with its kind, as in `<service web>`.
    #[track_caller]
    fn check(pseudonyms: &Pseudonyms, marked: &str) {
        let (mut text, mut expect) = (String::new(), String::new());
        for part in marked.split_inclusive(['<', '>']) {
            if let Some((kind, word)) = part.strip_suffix('>').and_then(|it| it.split_once(' ')) {
                text += word;
                expect += &format!("{kind}-{:016x}", pseudonyms.hasher.hash_one(word));
            } else {
                text += part.trim_end_matches('<');
                expect += part.trim_end_matches('<');
            }
        }
        assert_eq!(pseudonyms.replace(&text), expect, "{text}");
    }

    #[test]
    fn addresses_and_names_are_replaced_as_whole_words_and_keys_are_kept() {
        let mut pseudonyms = Pseudonyms::default();
        pseudonyms.learn("service", "web");
        pseudonyms.learn("node", "n1.example.com");
        pseudonyms.learn("service", "name");
        pseudonyms.learn("host", "net");
        pseudonyms.learn("host", "user");
        // It stays a Service.
        pseudonyms.learn("namespace", "web");
        pseudonyms.learn_text("--kube-api-server https://api.example.com:6443", false);
        for text in [
            "<ipv4 10.96.0.10>:80/TCP to <ipv4 10.1.0.1>:8080, <ipv4 10.96.0.10>",
            "[<ipv6 fd00::1>]:80 <ipv6 fd00::1>: refused. <ipv6 fd00::>/64",
            "<ipv6 ::ffff:10.1.0.1> tcp:<ipv4 10.1.0.1>.",
            "invalid: <invalid-ipv4 10.96.0.300>",
            "127.0.0.1:80 0.0.0.0 ::1 [::]:80 6.18.44 12:30:59",
            "shop/<service web>:http web-1 <service web>, <service web>.shop.svc _web_",
            "node <node n1.example.com>: healthy",
            "https://<host api.example.com>:6443/x host=\"<host api.example.com>:6443\"",
            r#""at\n<ipv4 10.96.0.10>\tof \\<service web>\u0009<service web>""#,
            r#""\"at\\n<service web>\\u0009<service web>\\\\t<ipv4 10.96.0.10>\" \\<host net> \\\n<host net>""#,
            r"at\<host user> \u{9}<service web>",
            r#"{"name":"<service name>", "<service web>" : 1} up{name="<service web>"} 1"#,
        ] {
            check(&pseudonyms, text);
        }
    }

    fn json(message: impl Serialize) -> String {
        serde_json::to_string(&message).unwrap()
    }

    /// A Service with a port and an endpoint, as `/state` has it.
    fn item(service: &str, pod: &str) -> String {
        let port = localv1::PortMapping { name: "http".into(), port: 80, ..Default::default() };
        let service = localv1::Service {
            namespace: "shop".into(),
            name: service.into(),
            r#type: "ClusterIP".into(),
            ports: vec![port],
            ..Default::default()
        };
        let port = localv1::PortName { name: "http".into(), port: 8080, ..Default::default() };
        let endpoint =
            localv1::Endpoint { pod_name: pod.into(), port_overrides: vec![port], ..Default::default() };
        format!(r#"{{"service":{},"endpoints":[{}]}}"#, json(service), json(endpoint))
    }

    #[test]
    fn names_are_learned_from_pages_and_from_the_log() {
        let mut pseudonyms = Pseudonyms::default();
        let node = localv1::Node { name: "n2".into(), ..Default::default() };
        let range = localv1::ServiceCidr { name: "range".into(), cidrs: vec!["10.96.0.0/16".into()] };
        let pod = localv1::Pod { name: "agent".into(), uid: "0f".into(), ..Default::default() };
        let (item, node, range, pod) = (item("web", "web-1"), json(node), json(range), json(pod));
        pseudonyms.learn_service("2nd/cart");
        let state = format!(
            r#"{{"node":"n1","items":[{item}],"nodes":[{node}],"serviceCidrs":[{range}],"pods":[{pod}]}}"#
        );
        for page in [
            &*state,
            r#"{"sources":[{"name":"file","address":null}],"tables":[{"name":"rows","entries":1}],
                "ejected":[{"service":"team/old","node":true}],
                "rejected":[{"by":"source","item":"EndpointSlice finance/late","reason":"and/or"}]}"#,
            r#"x{namespace="dev",service="api"} 1 node=n7"#,
        ] {
            pseudonyms.learn_text(page, false);
        }
        pseudonyms.learn_text("WARN endpoint 10.0.0.1:80 of lab/new:http is ejected, as is qa/one.", true);
        pseudonyms.learn_text(r#"{"error":"of\nops/two and \"team-3/three\": namespace=\"four\""}"#, true);
        pseudonyms.learn_text(r#""\"of\\nlab-2/five: namespace=\\\"six\\\"\\r\\nto\\tseven/eight\"""#, true);
        let text = "<node n1> <node n2> <node n7> <namespace shop>/<service web> <pod web-1> <pod agent> \
                    <namespace 2nd>/<service cart> <namespace team>/<service old> <service late> \
                    <namespace finance> <namespace dev>/<service api> <namespace lab>/<service new> \
                    <namespace qa>/<service one> <namespace ops>/<service two> <service three> <namespace four> \
                    <namespace lab-2>/<service five> <namespace six> <namespace seven>/<service eight> \
                    default http range file rows true and/or";
        check(&pseudonyms, text);
    }

    #[test]
    fn what_comes_in_pieces_has_the_pseudonyms_of_the_whole() {
        let items: Vec<_> = (0..9_000).map(|it| item(&format!("web-{it}"), &format!("db-x{it}"))).collect();
        let page = format!(r#"{{"items":[{}]}}"#, items.join(","));
        let (mut pseudonyms, mut written) = (Pseudonyms::default(), Vec::new());
        let mut out = Anonymized::new(&mut pseudonyms, &mut written, false);
        page.as_bytes().chunks(1013).for_each(|it| out.write_all(it).unwrap());
        out.finish().unwrap();
        let written = String::from_utf8(written).unwrap();
        assert!(
            written == pseudonyms.replace(&page) && !written.contains("web-") && !written.contains("db-x")
        );
    }

    proptest! {
        #[test]
        fn json_stays_the_same_document(
            keys in proptest::collection::vec("[a-z]{1,4}", 1..5),
            values in proptest::collection::vec("[a-z.:0-9/\n\t\"\\\\]{0,12}", 5),
        ) {
            let mut pseudonyms = Pseudonyms::default();
            keys.iter().map(String::as_str).chain(["true", "t"]).for_each(|it| pseudonyms.learn("service", it));
            let mut object: serde_json::Map<_, _> =
                keys.iter().cloned().zip(values.into_iter().map(Value::from)).collect();
            object.insert("is".into(), true.into());
            let text = pseudonyms.replace(&Value::Object(object.clone()).to_string());
            let after: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
            prop_assert!(after.keys().eq(object.keys()));
        }

        #[test]
        fn no_address_is_left(address: std::net::Ipv6Addr, v4: std::net::Ipv4Addr, port: u16) {
            prop_assume!(!address.is_loopback() && !address.is_unspecified());
            prop_assume!(!v4.is_loopback() && !v4.is_unspecified());
            let text = format!("a {address}, [{address}]:{port}/TCP {v4}:{port} ({v4})\n{v4}\t{address}");
            for text in [json(&text), json(json(&text)), text] {
                let replaced = Pseudonyms::default().replace(&text);
                prop_assert!(!replaced.contains(&v4.to_string()) && !replaced.contains(&address.to_string()), "{replaced}");
            }
        }
    }
}
