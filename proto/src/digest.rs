//! Digests of what a client has: the extension `Resume`.
//!
//! The rules are those of `Digests` in `localv1.proto`. Both sides hash bytes as they are sent, so what one of them encodes
//! in another way is sent again, and nothing is mistaken for something else.
//!
//! ```
//! use proxy_contract::{
//!     digest::{self, Buckets, KeptBuckets},
//!     localv1::{Digests, Set},
//! };
//!
//! // A Service without endpoints is a group of one object.
//! let digests = |bytes: &[u8]| {
//!     let service = digest::object(Set::ServicesSet, "default/web", bytes);
//!     let mut buckets = Buckets::new(2);
//!     buckets.add(digest::position(Set::ServicesSet, "default/web"), digest::all(&mut [service]));
//!     buckets.finish()
//! };
//! let have = Digests::of(&digests(b"old"));
//! let theirs = have.parse()?.expect("the version is known");
//! let kept = KeptBuckets::equal(&digests(b"new"), theirs);
//! assert!(!kept.contains(digest::position(Set::ServicesSet, "default/web")), "it is sent again");
//! # Ok::<_, String>(())
//! ```

use std::{borrow::Cow, fmt, io::Write as _};

use sha2::{Digest as _, Sha256};

use crate::localv1::{Digests, Set};

/// The version of the rules.
pub const VERSION: u32 = 1;
/// The maximum number of buckets.
pub const MAX_BUCKETS: usize = 2_048;
/// The field of a Service that is left out: the time of a change says nothing about the state.
const TRIGGER_TIME: u64 = 100;
/// The fields of a Service of `globalv1` that are left out: that time, and a hash that depends on it.
const GLOBAL_TRIGGER_TIME: [u64; 2] = [1, 101];

/// The first bytes of a SHA-256.
pub type Digest = [u8; 16];

/// The group of an object: its Service, or itself; `None` for the path of an endpoint of `globalv1` that lacks the Service,
/// which has no digest.
pub fn group_of(set: Set, path: &str) -> Option<(Set, Cow<'_, str>)> {
    match set {
        Set::EndpointsSet => {
            if let Some((service, _)) = path.rsplit_once('/') {
                return Some((Set::ServicesSet, service.into()));
            }
        }
        Set::GlobalEndpointInfos => {
            if let [namespace, service, ..] = path.split('|').collect::<Vec<_>>()[..] {
                let group = (Set::GlobalServiceInfos, format!("{namespace}|{service}||").into());
                return (!service.is_empty()).then_some(group);
            }
        }
        _ => {}
    }
    Some((set, path.into()))
}

/// The position of a group: its bucket is this number modulo the number of buckets.
pub fn position(set: Set, path: &str) -> u32 {
    let [a, b, c, d, ..] = hash(|it| write_key(it, set, path));
    u32::from_be_bytes([a, b, c, d])
}

/// The digest of an object.
pub fn object(set: Set, path: &str, bytes: &[u8]) -> Digest {
    hash(|it| {
        write_key(it, set, path);
        it.update([0]);
        match set {
            Set::ServicesSet => without(bytes, &[TRIGGER_TIME]).for_each(|part| it.update(part)),
            Set::GlobalServiceInfos => {
                without(bytes, &GLOBAL_TRIGGER_TIME).for_each(|part| it.update(part));
            }
            _ => it.update(bytes),
        }
    })
}

/// The digest of a group, from those of its objects, which it sorts; or that of a bucket, from those of its groups.
pub fn all(digests: &mut [Digest]) -> Digest {
    digests.sort_unstable();
    hash(|it| digests.iter().for_each(|digest| it.update(digest)))
}

/// The digests of groups, by bucket.
pub struct Buckets(Vec<Vec<Digest>>);

impl fmt::Debug for Buckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Buckets").field(&self.0.len()).finish()
    }
}

impl Buckets {
    /// Empty buckets, at least one and at most [`MAX_BUCKETS`].
    pub fn new(count: usize) -> Self {
        Self(vec![Vec::new(); count.clamp(1, MAX_BUCKETS)])
    }

    /// Adds a group.
    pub fn add(&mut self, position: u32, group: Digest) {
        let bucket = bucket(position, self.0.len());
        self.0[bucket].push(group);
    }

    /// The digests of the buckets.
    pub fn finish(mut self) -> Vec<Digest> {
        self.0.iter_mut().map(|it| all(it)).collect()
    }
}

fn bucket(position: u32, count: usize) -> usize {
    usize::try_from(position).unwrap_or_default() % count
}

impl Digests {
    /// The message with the digests of buckets.
    pub fn of(buckets: &[Digest]) -> Self {
        Self { version: VERSION, buckets: buckets.concat() }
    }

    /// The digests of the buckets; `None` if their version is unknown.
    ///
    /// # Errors
    ///
    /// The version is known, and the length is not that of 1 to [`MAX_BUCKETS`] digests.
    pub fn parse(&self) -> Result<Option<&[Digest]>, String> {
        if self.version != VERSION {
            return Ok(None);
        }
        let (buckets, rest) = self.buckets.as_chunks();
        if !rest.is_empty() || buckets.is_empty() || buckets.len() > MAX_BUCKETS {
            let length = self.buckets.len();
            return Err(format!(
                "Digests.buckets has {length} bytes; 1 to {MAX_BUCKETS} digests of 16 bytes are allowed"
            ));
        }
        Ok(Some(buckets))
    }
}

/// The buckets whose objects need not be sent, out of a number of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptBuckets {
    bits: Vec<u8>,
    count: usize,
}

impl KeptBuckets {
    /// The buckets that are equal on both sides.
    pub fn equal(ours: &[Digest], theirs: &[Digest]) -> Self {
        let count = ours.len();
        let mut bits = vec![0; count.div_ceil(8)];
        for (n, _) in ours.iter().zip(theirs).enumerate().filter(|(_, (a, b))| a == b) {
            bits[n / 8] |= 1 << (n % 8);
        }
        Self { bits, count }
    }

    /// Parses the bits of a message, for `count` buckets; `None` if the length is wrong.
    pub fn parse(bits: Vec<u8>, count: usize) -> Option<Self> {
        (count > 0 && bits.len() == count.div_ceil(8)).then_some(Self { bits, count })
    }

    /// The bits of the message `Kept`: bucket 0 is the lowest bit of the first byte.
    pub fn bits(&self) -> &[u8] {
        &self.bits
    }

    /// Whether no bucket is kept.
    pub fn is_empty(&self) -> bool {
        self.bits.iter().all(|it| *it == 0)
    }

    /// Whether the group at this position is kept.
    pub fn contains(&self, position: u32) -> bool {
        let n = bucket(position, self.count);
        self.bits[n / 8] & (1 << (n % 8)) != 0
    }
}

fn hash(write: impl FnOnce(&mut Sha256)) -> Digest {
    let mut hasher = Sha256::new();
    write(&mut hasher);
    let hash: [u8; 32] = hasher.finalize().into();
    let mut digest = Digest::default();
    digest.copy_from_slice(&hash[..16]);
    digest
}

fn write_key(hasher: &mut Sha256, set: Set, path: &str) {
    let mut number = [0; 12];
    let mut rest = &mut number[..];
    // Any i32 and a colon fit.
    let _ = write!(rest, "{}:", i32::from(set));
    let left = rest.len();
    hasher.update(&number[..12 - left]);
    hasher.update(path);
}

/// The encoded fields of a message but those of these numbers, and what cannot be parsed.
fn without<'a>(message: &'a [u8], numbers: &[u64]) -> impl Iterator<Item = &'a [u8]> {
    let mut rest = message;
    std::iter::from_fn(move || {
        while !rest.is_empty() {
            let Some((tag, length)) = field(rest) else { return Some(std::mem::take(&mut rest)) };
            let (field, after) = rest.split_at(length);
            rest = after;
            if !numbers.contains(&(tag >> 3)) {
                return Some(field);
            }
        }
        None
    })
}

/// The tag and the length of the first field of a message; `None` if it cannot be parsed.
fn field(message: &[u8]) -> Option<(u64, usize)> {
    let (tag, start) = varint(message)?;
    let length = match tag & 7 {
        0 => varint(&message[start..])?.1,
        1 => 8,
        2 => {
            let (length, size) = varint(&message[start..])?;
            usize::try_from(length).ok()?.checked_add(size)?
        }
        5 => 4,
        _ => return None,
    };
    let end = start.checked_add(length)?;
    (end <= message.len()).then_some((tag, end))
}

fn varint(bytes: &[u8]) -> Option<(u64, usize)> {
    let mut value = 0;
    for (n, byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * n);
        if byte & 0x80 == 0 {
            return Some((value, n + 1));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::{
        globalv1::ServiceInfo,
        localv1::{LoadBalancing, Service},
    };

    fn hex(digest: &[u8]) -> String {
        digest.iter().map(|it| format!("{it:02x}")).collect()
    }

    #[test]
    fn digests_are_those_of_the_specification() {
        // By `printf '1:default/web' | sha256sum`, and so on.
        assert_eq!(position(Set::ServicesSet, "default/web"), 0x6155_6ee6);
        assert_eq!(hex(&object(Set::NodesSet, "n1", &[1, 2])), "6c953163676600f04c96d7d24c89b22f");
        let mut two = [object(Set::NodesSet, "n1", &[1, 2]), object(Set::NodesSet, "n2", &[])];
        assert_eq!(hex(&all(&mut two)), "6bd224987969173e95aa9adea6bbe597");
        assert_eq!(hex(&all(&mut [])), "e3b0c44298fc1c149afbf4c8996fb924");
    }

    #[test]
    fn an_endpoint_belongs_to_its_service() {
        #[track_caller]
        fn check(set: Set, path: &str, expect: Option<(Set, &str)>) {
            assert_eq!(group_of(set, path), expect.map(|(set, path)| (set, path.into())));
        }
        check(Set::EndpointsSet, "default/web/pod", Some((Set::ServicesSet, "default/web")));
        check(Set::ServicesSet, "default/web", Some((Set::ServicesSet, "default/web")));
        let web = Some((Set::GlobalServiceInfos, "default|web||"));
        check(Set::GlobalEndpointInfos, "default|web|web-1|10.1.0.1", web);
        check(Set::GlobalServiceInfos, "default|web||", web);
        // The second path of the endpoint.
        check(Set::GlobalEndpointInfos, "default||web-1|10.1.0.1", None);
        check(Set::GlobalEndpointInfos, "web", Some((Set::GlobalEndpointInfos, "web")));
        check(Set::GlobalNodeInfos, "|n1||", Some((Set::GlobalNodeInfos, "|n1||")));
    }

    #[test]
    fn the_time_of_a_change_makes_no_difference() {
        let service = |trigger_time| Service {
            name: "web".into(),
            trigger_time,
            load_balancing: Some(LoadBalancing { drain_seconds: 7, ..LoadBalancing::default() }),
            ..Service::default()
        };
        let digest = |it: Service| object(Set::ServicesSet, "default/web", &it.encode_to_vec());
        assert_eq!(digest(service(Some(1_700_000_000_000_000))), digest(service(None)));
        assert_ne!(digest(Service { name: "api".into(), ..service(None) }), digest(service(None)));
        let global = |trigger_time, hash, created| {
            let info = ServiceInfo { hash, trigger_time, created, service: Some(service(Some(1))) };
            object(Set::GlobalServiceInfos, "default|web||", &info.encode_to_vec())
        };
        assert_eq!(global(Some(1_700_000_000_000_000), 1, None), global(None, 2, None));
        assert_ne!(global(None, 1, Some(3)), global(None, 1, None));
        // Bytes that are no message are hashed as they are.
        let garbage = |bytes: &[u8]| object(Set::ServicesSet, "default/web", bytes);
        assert_ne!(garbage(&[0xff; 40]), garbage(&[0xff; 41]));
    }

    #[test]
    fn sizes_are_checked() {
        let parse = |length| {
            Digests { version: VERSION, buckets: vec![0; length] }.parse().map(|it| it.map(<[_]>::len))
        };
        assert_eq!((parse(16), parse(16 * 2_048)), (Ok(Some(1)), Ok(Some(2_048))));
        assert!([0, 15, 17, 16 * 2_049].into_iter().all(|it| parse(it).is_err()));
        assert_eq!(Digests { version: 2, buckets: vec![0; 3] }.parse(), Ok(None));
        assert!(KeptBuckets::parse(vec![0; 2], 8).is_none() && KeptBuckets::parse(Vec::new(), 0).is_none());
        let kept = KeptBuckets::equal(&[[0; 16], [1; 16]], &[[0; 16], [2; 16]]);
        assert_eq!((kept.bits(), kept.contains(4), kept.contains(5)), (&[1][..], true, false));
    }
}
