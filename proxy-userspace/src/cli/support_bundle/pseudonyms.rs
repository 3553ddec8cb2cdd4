//! Pseudonyms for addresses and names in texts.
//!
//! Invariant: a word has the same pseudonym wherever it occurs, and no two words share one. JSON stays the same document:
//! its keys, and the names of labels, are kept.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use serde_json::Value;

/// Names that every cluster has.
const COMMON: [&str; 6] =
    ["default", "kube-system", "kube-public", "kube-node-lease", "kubernetes", "localhost"];

#[derive(Debug, Default)]
pub(super) struct Pseudonyms {
    names: HashMap<String, String>,
    addresses: HashMap<IpAddr, String>,
    /// How many there are of each kind.
    counts: BTreeMap<&'static str, usize>,
}

impl Pseudonyms {
    /// Replaces this name from now on. The kind appears in the pseudonym.
    pub(super) fn learn(&mut self, kind: &'static str, name: &str) {
        let is_name = name.contains(|it: char| it.is_ascii_alphabetic()) && !COMMON.contains(&name);
        if is_name && name.parse::<IpAddr>().is_err() && !self.names.contains_key(name) {
            let pseudonym = self.next(kind);
            self.names.insert(name.to_owned(), pseudonym);
        }
    }

    /// The names in the JSON of a page, which are recognized by their keys.
    pub(super) fn learn_from_page(&mut self, json: &str) {
        if let Ok(page) = serde_json::from_str(json) {
            self.learn_from(&page, "", "");
        }
    }

    fn learn_from(&mut self, value: &Value, parent: &str, key: &str) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(it, value)| self.learn_from(value, key, it)),
            Value::Array(items) => items.iter().for_each(|it| self.learn_from(it, parent, key)),
            Value::String(text) => match (parent, key) {
                (_, "namespace") => self.learn("namespace", text),
                (_, "podName") => self.learn("pod", text),
                (_, "node" | "nodeName" | "hostname") | ("nodes", "name") => self.learn("node", text),
                ("service", "name") => self.learn("service", text),
                (_, "item" | "service") => self.learn_qualified_names(text),
                _ => {}
            },
            _ => {}
        }
    }

    /// Names with their namespace, as in `shop/web`, of objects that may exist no more.
    pub(super) fn learn_qualified_names(&mut self, text: &str) {
        let is_name = |it: &str| {
            it.starts_with(|it: char| it.is_ascii_lowercase())
                && it.chars().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || "-.".contains(it))
        };
        for word in text.split(|it: char| it.is_whitespace() || "\"'`,;:()=".contains(it)) {
            if let Some((namespace, name)) = word.trim_end_matches('.').split_once('/')
                && is_name(namespace)
                && !namespace.contains('.')
                && is_name(name)
            {
                self.learn("namespace", namespace);
                self.learn("service", name);
            }
        }
    }

    /// The hosts of URLs.
    pub(super) fn learn_servers(&mut self, text: &str) {
        for rest in text.split("://").skip(1) {
            let end = rest.find(|it: char| !is_word(it) || it == ':').unwrap_or(rest.len());
            self.learn("host", &rest[..end]);
        }
    }

    /// The text with pseudonyms.
    pub(super) fn replace(&mut self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(start) = rest.find(is_word) {
            let (before, tail) = rest.split_at(start);
            let (word, after) = tail.split_at(tail.find(|it| !is_word(it)).unwrap_or(tail.len()));
            out.push_str(before);
            let is_key = after.starts_with('=') || before.ends_with('"') && after.starts_with("\":");
            if is_key {
                out.push_str(word);
            } else {
                self.replace_word(word, &mut out);
            }
            rest = after;
        }
        out + rest
    }

    /// Replaces an address, an address with a port, or names that are separated by colons or dots.
    fn replace_word(&mut self, word: &str, out: &mut String) {
        // At the end of a sentence, or before an explanation.
        let core = word.trim_end_matches(['.', ':']);
        // `fd00::` is an address as it is.
        for it in [word, core] {
            if let Ok(address) = it.parse() {
                out.push_str(&self.of_address(address));
                return out.push_str(&word[it.len()..]);
            }
        }
        for (n, part) in word.split(':').enumerate() {
            if n > 0 {
                out.push(':');
            }
            let name = part.trim_end_matches('.');
            if is_invalid_ipv4(name) && !self.names.contains_key(name) {
                let pseudonym = self.next("invalid-ipv4");
                self.names.insert(name.to_owned(), pseudonym);
            }
            if let Ok(address) = name.parse() {
                out.push_str(&self.of_address(address));
            } else if let Some(pseudonym) = self.names.get(name) {
                out.push_str(pseudonym);
            } else {
                let labels = name.split('.').map(|it| self.names.get(it).map_or(it, String::as_str));
                out.push_str(&labels.collect::<Vec<_>>().join("."));
            }
            out.push_str(&part[name.len()..]);
        }
    }

    fn of_address(&mut self, address: IpAddr) -> String {
        if address.is_loopback() || address.is_unspecified() {
            return address.to_string();
        }
        if let Some(it) = self.addresses.get(&address) {
            return it.clone();
        }
        let pseudonym = self.next(if address.is_ipv4() { "ipv4" } else { "ipv6" });
        self.addresses.insert(address, pseudonym.clone());
        pseudonym
    }

    fn next(&mut self, kind: &'static str) -> String {
        let count = self.counts.entry(kind).or_default();
        *count += 1;
        format!("{kind}-{count}")
    }
}

/// Whether a character is part of a word.
fn is_word(it: char) -> bool {
    it.is_ascii_alphanumeric() || "._:-".contains(it)
}

/// Whether a word is an address that a user has mistyped, as in `10.96.0.300`.
fn is_invalid_ipv4(word: &str) -> bool {
    let is_number = |it: &str| !it.is_empty() && it.bytes().all(|it| it.is_ascii_digit());
    word.split('.').count() == 4 && word.split('.').all(is_number) && word.parse::<IpAddr>().is_err()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(text: &str, expect: &str) {
        let mut pseudonyms = Pseudonyms::default();
        pseudonyms.learn("service", "web");
        pseudonyms.learn("node", "n1.example.com");
        pseudonyms.learn("service", "name");
        pseudonyms.learn_servers("--kube-api-server https://api.example.com:6443");
        assert_eq!(pseudonyms.replace(text), expect);
    }

    #[test]
    fn addresses_are_replaced_with_and_without_ports() {
        check("10.96.0.10:80/TCP -> 10.1.0.1:8080, 10.96.0.10", "ipv4-1:80/TCP -> ipv4-2:8080, ipv4-1");
        check("[fd00::1]:80 fd00::1: refused. fd00::/64", "[ipv6-1]:80 ipv6-1: refused. ipv6-2/64");
        check("::ffff:10.1.0.1 tcp:10.1.0.1.", "ipv6-1 tcp:ipv4-1.");
        check("invalid: 10.96.0.300", "invalid: invalid-ipv4-1");
        check(
            "127.0.0.1:80 0.0.0.0 ::1 [::]:80 6.18.44 12:30:59",
            "127.0.0.1:80 0.0.0.0 ::1 [::]:80 6.18.44 12:30:59",
        );
    }

    #[test]
    fn names_are_replaced_as_whole_words() {
        check(
            "shop/web:http web-1 web, web.shop.svc _web_",
            "shop/service-1:http web-1 service-1, service-1.shop.svc _web_",
        );
        check("node n1.example.com: healthy", "node node-1: healthy");
        check(
            "https://api.example.com:6443/x host=\"api.example.com:6443\"",
            "https://host-1:6443/x host=\"host-1:6443\"",
        );
    }

    #[test]
    fn keys_are_kept() {
        check(r#"{"name":"name", "web" : 1}"#, r#"{"name":"service-2", "service-1" : 1}"#);
        check(r#"up{name="web"} 1"#, r#"up{name="service-1"} 1"#);
    }

    #[test]
    fn names_are_learned_from_pages_and_from_the_log() {
        let mut pseudonyms = Pseudonyms::default();
        pseudonyms.learn_from_page(
            r#"{"items":[{"service":{"namespace":"default","name":"web","ports":[{"name":"http"}]},
                          "endpoints":[{"podName":"web-1"}]}],
                "node":"n1","nodes":[{"name":"n2"}],"sources":[{"name":"file"}],
                "rejected":[{"item":"EndpointSlice shop/web-x","reason":"bad"}]}"#,
        );
        pseudonyms
            .learn_qualified_names("WARN endpoint 10.0.0.1:80 of team/old:http is ejected, see net/ipv4.");
        let text = "n1 n2 file shop web-x web http web-1 default team/old";
        let expect =
            "node-1 node-2 file namespace-1 service-2 service-1 http pod-1 default namespace-2/service-3";
        assert_eq!(pseudonyms.replace(text), expect);
    }

    proptest! {
        #[test]
        fn json_stays_the_same_document(
            keys in proptest::collection::vec("[a-z]{1,4}", 1..5),
            values in proptest::collection::vec("[a-z.:0-9/]{0,12}", 5),
        ) {
            let mut pseudonyms = Pseudonyms::default();
            keys.iter().for_each(|it| pseudonyms.learn("service", it));
            let object: serde_json::Map<_, _> =
                keys.iter().cloned().zip(values.into_iter().map(Value::from)).collect();
            let text = pseudonyms.replace(&Value::Object(object.clone()).to_string());
            let after: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
            prop_assert!(after.keys().eq(object.keys()));
        }

        #[test]
        fn no_address_is_left(address: std::net::Ipv6Addr, v4: std::net::Ipv4Addr, port: u16) {
            prop_assume!(!address.is_loopback() && !address.is_unspecified());
            prop_assume!(!v4.is_loopback() && !v4.is_unspecified());
            let text = format!("a {address}, [{address}]:{port}/TCP {v4}:{port} ({v4})");
            let replaced = Pseudonyms::default().replace(&text);
            prop_assert!(!replaced.contains(&v4.to_string()) && !replaced.contains(&address.to_string()), "{replaced}");
        }
    }
}
