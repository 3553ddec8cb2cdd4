//! Pseudonyms for addresses and names in texts.
//!
//! Invariant: a word has the same pseudonym wherever it occurs, and no two words share one. JSON stays the same document:
//! its keys, and the names of labels, are kept.

use std::{
    cell::RefCell,
    fmt,
    hash::{BuildHasher as _, Hash, RandomState},
    io::{self, Read, Write},
    net::IpAddr,
};

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

/// Names that every cluster has.
const COMMON: [&str; 6] =
    ["default", "kube-system", "kube-public", "kube-node-lease", "kubernetes", "localhost"];

/// How much of a text is replaced at a time, in bytes.
const BUFFER: usize = 64 << 10;

const KINDS: [&str; 5] = ["namespace", "service", "pod", "node", "host"];
/// The words of the filter of names: with two million names, one of 20,000 other words is taken for a name.
const FILTER_WORDS: usize = 1 << 20;
/// How many bits of the filter a name sets.
const BITS_PER_NAME: u64 = 6;

/// A pseudonym is a keyed hash of its word, so that nothing is kept of addresses; of names there is a Bloom filter.
#[derive(Debug)]
pub(super) struct Pseudonyms {
    names: Vec<u64>,
    hasher: RandomState,
}

impl Default for Pseudonyms {
    fn default() -> Self {
        Self { names: vec![0; FILTER_WORDS], hasher: RandomState::new() }
    }
}

impl Pseudonyms {
    /// Replaces this name from now on. The kind appears in the pseudonym.
    pub(super) fn learn(&mut self, kind: &str, name: &str) {
        let is_name = name.contains(|it: char| it.is_ascii_alphabetic()) && !COMMON.contains(&name);
        if is_name && name.parse::<IpAddr>().is_err() {
            let kind = KINDS.iter().position(|it| *it == kind).unwrap_or_default();
            for (word, bit) in bits(kind, self.hashes(name)) {
                self.names[word] |= bit;
            }
        }
    }

    fn hashes(&self, name: &str) -> (u64, u64) {
        (self.hasher.hash_one(name), self.hasher.hash_one((name, name)) | 1)
    }

    /// Copies the JSON of a page with pseudonyms. The names in it are recognized by their keys, and learned before they are
    /// written.
    pub(super) fn replace_page(&mut self, page: impl Read, out: &mut dyn Write) -> io::Result<()> {
        let copied = RefCell::default();
        let mut page = serde_json::Deserializer::from_reader(Copied { page, copied: &copied });
        let mut walker = Walker { out: Anonymized::new(self, out, false), copied: &copied };
        let parsed = Value { walker: &mut walker, parent: "", key: "" }.deserialize(&mut page);
        let parsed = parsed.and_then(|()| page.end());
        walker.drain(0)?;
        walker.out.finish()?;
        Ok(parsed?)
    }

    fn learn_field(&mut self, parent: &str, key: &str, text: &str) {
        match (parent, key) {
            (_, "namespace") => self.learn("namespace", text),
            (_, "podName") => self.learn("pod", text),
            (_, "node" | "nodeName" | "hostname") | ("nodes", "name") => self.learn("node", text),
            ("service", "name") => self.learn("service", text),
            (_, "item" | "service") if text.contains('/') => self.learn_qualified_names(text),
            (_, "service") => self.learn("service", text),
            _ => {}
        }
    }

    /// The name of a Service, as in `shop/web`.
    pub(super) fn learn_service(&mut self, text: &str) {
        if let Some((namespace, name)) = text.split_once('/') {
            self.learn("namespace", namespace);
            self.learn("service", name);
        }
    }

    /// The names in labels of metrics and in fields of log lines, as in `namespace="shop"`.
    fn learn_labels(&mut self, text: &str) {
        for (at, _) in text.match_indices('=') {
            let key = text[..at].rsplit(|it: char| !is_word(it)).next().unwrap_or_default();
            let value = text[at + 1..].trim_start_matches('"');
            let end = value.find(|it| !is_word(it) && it != '/').unwrap_or(value.len());
            self.learn_field("", key, &value[..end]);
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

    pub(super) fn replace(&self, text: &str) -> String {
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
    fn replace_word(&self, word: &str, out: &mut String) {
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
            if let Ok(address) = name.parse() {
                out.push_str(&self.of_address(address));
            } else if is_invalid_ipv4(name) {
                out.push_str(&self.pseudonym("invalid-ipv4", name));
            } else if let Some(pseudonym) = self.of_name(name) {
                out.push_str(&pseudonym);
            } else {
                let labels = name.split('.').map(|it| self.of_name(it).unwrap_or_else(|| it.into()));
                out.push_str(&labels.collect::<Vec<_>>().join("."));
            }
            out.push_str(&part[name.len()..]);
        }
    }

    fn of_address(&self, address: IpAddr) -> String {
        if address.is_loopback() || address.is_unspecified() {
            return address.to_string();
        }
        let kind = if address.is_ipv4() { "ipv4" } else { "ipv6" };
        self.pseudonym(kind, address)
    }

    /// The pseudonym of a name, if it was learned.
    fn of_name(&self, name: &str) -> Option<String> {
        let hashes = self.hashes(name);
        let is_known = |kind: &usize| bits(*kind, hashes).all(|(word, bit)| self.names[word] & bit != 0);
        (0..KINDS.len()).find(is_known).map(|kind| self.pseudonym(KINDS[kind], name))
    }

    fn pseudonym(&self, kind: &str, word: impl Hash) -> String {
        format!("{kind}-{:016x}", self.hasher.hash_one(word))
    }
}

/// The bits in the filter of a name of this kind, from two hashes of the name.
fn bits(kind: usize, (first, step): (u64, u64)) -> impl Iterator<Item = (usize, u64)> {
    let first_bit = BITS_PER_NAME * kind as u64;
    let bits =
        (first_bit..first_bit + BITS_PER_NAME).map(move |it| first.wrapping_add(step.wrapping_mul(it)));
    bits.map(|it| ((it >> 6) as usize % FILTER_WORDS, 1 << (it % 64)))
}

/// Writes a text with pseudonyms, in pieces between which no word lies.
pub(super) struct Anonymized<'a> {
    pseudonyms: &'a mut Pseudonyms,
    out: &'a mut dyn Write,
    text: Vec<u8>,
    /// Whether names with their namespace are to be learned.
    has_names: bool,
}

impl<'a> Anonymized<'a> {
    pub(super) fn new(pseudonyms: &'a mut Pseudonyms, out: &'a mut dyn Write, has_names: bool) -> Self {
        Self { pseudonyms, out, text: Vec::new(), has_names }
    }

    /// Writes the rest.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.drain(self.text.len())
    }

    fn drain(&mut self, end: usize) -> io::Result<()> {
        let text = String::from_utf8_lossy(&self.text[..end]);
        if self.has_names {
            self.pseudonyms.learn_qualified_names(&text);
        }
        self.pseudonyms.learn_servers(&text);
        self.pseudonyms.learn_labels(&text);
        self.out.write_all(self.pseudonyms.replace(&text).as_bytes())?;
        self.text.drain(..end);
        Ok(())
    }
}

impl Write for Anonymized<'_> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(text);
        // Neither words, nor what is before and after keys, contain any of these.
        if self.text.len() >= BUFFER
            && let Some(last) = self.text.iter().rposition(|it| b",\n ".contains(it))
        {
            self.drain(last + 1)?;
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A reader of which a copy is kept until it is taken.
struct Copied<'a, R> {
    page: R,
    copied: &'a RefCell<Vec<u8>>,
}

impl<R: Read> Read for Copied<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.page.read(buffer)?;
        self.copied.borrow_mut().extend_from_slice(&buffer[..length]);
        Ok(length)
    }
}

/// Learns the names of a page, and writes what was read of it.
struct Walker<'a> {
    out: Anonymized<'a>,
    copied: &'a RefCell<Vec<u8>>,
}

impl Walker<'_> {
    /// Writes what was read, if it is as much.
    fn drain(&mut self, size: usize) -> io::Result<()> {
        let mut copied = self.copied.borrow_mut();
        if copied.len() >= size {
            self.out.write_all(&copied)?;
            copied.clear();
        }
        Ok(())
    }
}

/// A value of JSON, with its key and that of the object with that key.
struct Value<'a, 'w> {
    walker: &'a mut Walker<'w>,
    parent: &'a str,
    key: &'a str,
}

impl<'de> DeserializeSeed<'de> for Value<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Value<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<(), E> {
        self.walker.out.pseudonyms.learn_field(self.parent, self.key, text);
        self.walker.drain(BUFFER).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Self { walker, parent, key } = self;
        while items.next_element_seed(Value { walker, parent, key })?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        while let Some(key) = fields.next_key::<String>()? {
            fields.next_value_seed(Value { walker: self.walker, parent: self.key, key: &key })?;
        }
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
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
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    #[track_caller]
    fn check(text: &str, expect: &str) {
        let mut pseudonyms = Pseudonyms::default();
        pseudonyms.learn("service", "web");
        pseudonyms.learn("node", "n1.example.com");
        pseudonyms.learn("service", "name");
        pseudonyms.learn_servers("--kube-api-server https://api.example.com:6443");
        assert_eq!(numbered(&pseudonyms.replace(text)), expect);
    }

    /// A text in which the pseudonyms of each kind are numbered as they occur.
    fn numbered(text: &str) -> String {
        let (mut out, mut rest) = (String::new(), text);
        let mut known = BTreeMap::<&str, Vec<&str>>::new();
        let is_hash = |it: &str| it.len() == 16 && it.bytes().all(|it| it.is_ascii_hexdigit());
        while let Some(at) = rest.find('-') {
            let (before, after) = (&rest[..at], &rest[at + 1..]);
            out.push_str(&rest[..=at]);
            rest = after;
            if let Some(hash) = after.get(..16).filter(|it| is_hash(it)) {
                let kind = before.rsplit(|it: char| !it.is_ascii_alphanumeric()).next().unwrap();
                let known = known.entry(kind).or_default();
                let position = known.iter().position(|it| *it == hash).unwrap_or_else(|| {
                    known.push(hash);
                    known.len() - 1
                });
                out += &(position + 1).to_string();
                rest = &after[16..];
            }
        }
        out + rest
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
        check(r#"{"name":"name", "web" : 1}"#, r#"{"name":"service-1", "service-2" : 1}"#);
        check(r#"up{name="web"} 1"#, r#"up{name="service-1"} 1"#);
    }

    #[test]
    fn names_are_learned_from_pages_and_from_the_log() {
        let mut pseudonyms = Pseudonyms::default();
        let page = r#"{"items":[{"service":{"namespace":"default","name":"web","ports":[{"name":"http"}]},
                          "endpoints":[{"podName":"web-1"}]}],
                "node":"n1","nodes":[{"name":"n2"}],"sources":[{"name":"file"}],
                "rejected":[{"item":"EndpointSlice shop/web-x","reason":"bad"}]}"#;
        pseudonyms.replace_page(page.as_bytes(), &mut io::sink()).unwrap();
        pseudonyms
            .learn_qualified_names("WARN endpoint 10.0.0.1:80 of team/old:http is ejected, see net/ipv4.");
        let text = "n1 n2 file shop web-x web http web-1 default team/old";
        let expect =
            "node-1 node-2 file namespace-1 service-1 service-2 http pod-1 default namespace-2/service-3";
        assert_eq!(numbered(&pseudonyms.replace(text)), expect);
    }

    #[test]
    fn names_that_a_text_is_the_first_to_have_are_replaced_in_it() {
        let mut pseudonyms = Pseudonyms::default();
        pseudonyms.learn_service("2nd/cart");
        let mut written = Vec::new();
        let mut out = Anonymized::new(&mut pseudonyms, &mut written, false);
        out.write_all(br#"x{namespace="shop",service="web"} 1 node=n7 service=team/old at 2nd/cart a=b"#)
            .unwrap();
        out.finish().unwrap();
        let expect = r#"x{namespace="namespace-1",service="service-1"} 1 node=node-1 service=namespace-2/service-2 at namespace-3/service-3 a=b"#;
        assert_eq!(numbered(str::from_utf8(&written).unwrap()), expect);
    }

    #[test]
    fn a_large_page_is_the_same_document_with_pseudonyms() {
        let items = (0..9_000).map(|n| {
            format!(r#"{{"service":{{"namespace":"shop","name":"web-{n}"}},"endpoints":[{{"podName":"db-x{n}"}}]}}"#)
        });
        let page = format!(r#"{{"items":[{}]}}"#, items.collect::<Vec<_>>().join(","));
        let mut pseudonyms = Pseudonyms::default();
        let mut written = Vec::new();
        pseudonyms.replace_page(page.as_bytes(), &mut written).unwrap();
        // What comes in pieces has the pseudonyms of the whole.
        assert_eq!(String::from_utf8(written).unwrap(), pseudonyms.replace(&page));
        let mut pieces = Vec::new();
        let mut out = Anonymized::new(&mut pseudonyms, &mut pieces, false);
        page.as_bytes().chunks(1013).for_each(|it| out.write_all(it).unwrap());
        out.finish().unwrap();
        let pieces = String::from_utf8(pieces).unwrap();
        assert!(pieces == pseudonyms.replace(&page) && !pieces.contains("web-") && !pieces.contains("db-x"));
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
