//! Types of the kernel and their members, from the kernel's type information (BTF).
//!
//! Malformed BTF is no error: what it describes is then not found, and callers can do without it.
//! (<https://docs.kernel.org/bpf/btf.html>. The existing crates have a copyleft license, or do not expose members.)

/// The BTF of the running kernel.
pub(crate) const KERNEL: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
/// The sizes of the common part of a type, of a member, and of the header.
const TYPE: usize = 12;
const MEMBER: usize = 12;
const HEADER: usize = 24;

/// The offset of a member in a struct, in bits; of a bit field, the offset of its first bit. `None` if there is no such
/// struct or member; members of anonymous structs inside are not found.
pub(crate) fn member_offset(btf: &[u8], of: &str, name: &str) -> Option<u32> {
    let found = find(btf, STRUCT, of)?;
    let mut members = found.rest.chunks_exact(MEMBER);
    let member = members.find(|it| word(it, 0).is_some_and(|at| is_named(found.strings, at, name)))?;
    // In a struct with bit fields, the upper byte is the size of the bit field.
    let offset = word(member, 8)? as u32;
    Some(if found.has_bit_fields { offset & 0x00ff_ffff } else { offset })
}

pub(crate) fn struct_id(btf: &[u8], name: &str) -> Option<u32> {
    find(btf, STRUCT, name).map(|it| it.id)
}

pub(crate) fn function_id(btf: &[u8], name: &str) -> Option<u32> {
    find(btf, FUNCTION, name).map(|it| it.id)
}

const STRUCT: usize = 4;
const FUNCTION: usize = 12;

struct Type<'a> {
    id: u32,
    has_bit_fields: bool,
    /// What follows the common part.
    rest: &'a [u8],
    strings: &'a [u8],
}

/// The first type of a kind with this name.
fn find<'a>(btf: &'a [u8], kind: usize, name: &str) -> Option<Type<'a>> {
    let magic = u16::from_ne_bytes(btf.get(..2)?.try_into().ok()?);
    if magic != MAGIC || btf.len() < HEADER {
        return None;
    }
    let begin = word(btf, 4)?;
    let [types, length, strings] = [8, 12, 16].map(|at| word(btf, at));
    let strings = btf.get(begin.checked_add(strings?)?..)?;
    let mut types = btf.get(begin.checked_add(types?)?..)?.get(..length?)?;
    // Type 0 is void.
    for id in 1.. {
        let info = word(types, 4)?;
        let (this_kind, entries, has_bit_fields) = (info >> 24 & 0x1f, info & 0xffff, info >> 31 != 0);
        let (rest, next) = types.get(TYPE..)?.split_at_checked(size_after(this_kind, entries)?)?;
        if this_kind == kind && is_named(strings, word(types, 0)?, name) {
            return Some(Type { id, has_bit_fields, rest, strings });
        }
        types = next;
    }
    None
}

/// How many bytes follow the common part of a type.
fn size_after(kind: usize, entries: usize) -> Option<usize> {
    Some(match kind {
        // Pointers, forward declarations, type definitions, qualifiers, functions, floats and tags of types.
        2 | 7..=12 | 16 | 18 => 0,
        // Integers, variables and tags of declarations.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        // Structs and unions, sections, and enumerations of 64 bits.
        4 | 5 | 15 | 19 => entries * 12,
        // Enumerations and prototypes.
        6 | 13 => entries * 8,
        _ => return None,
    })
}

fn is_named(strings: &[u8], at: usize, name: &str) -> bool {
    let rest = strings.get(at..).and_then(|it| it.strip_prefix(name.as_bytes()));
    rest.is_some_and(|it| it.first() == Some(&0))
}

/// A word in native byte order, as in BTF.
fn word(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?) as usize)
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command};

    use super::*;

    /// BTF with an integer, a struct without bit fields, and one with.
    fn example() -> Vec<u8> {
        let strings = b"\0int\0sock\0socket\0first\0flag\0";
        let at = |name: &[u8]| strings.windows(name.len()).position(|it| it == name).unwrap() as u32;
        let (int, sock, socket) = (at(b"int\0"), at(b"sock\0"), at(b"socket\0"));
        let (first, flag) = (at(b"first\0"), at(b"flag\0"));
        let types = [
            [int, 1 << 24, 4].as_slice(),
            &[32],
            &[socket, 4 << 24 | 1, 8],
            &[flag, 1, 32],
            &[sock, 1 << 31 | 4 << 24 | 2, 8],
            &[first, 1, 0],
            &[flag, 1, 3 << 24 | 33],
        ]
        .concat();
        let length = types.len() as u32 * 4;
        let header = [24, 0, length, length, strings.len() as u32];
        let words = header.iter().chain(&types).flat_map(|it| it.to_ne_bytes());
        let begin = MAGIC.to_ne_bytes().into_iter().chain([1, 0]);
        begin.chain(words).chain(strings.iter().copied()).collect()
    }

    #[test]
    fn a_member_is_found_by_the_names_of_struct_and_member() {
        let btf = example();
        assert_eq!(member_offset(&btf, "sock", "first"), Some(0));
        assert_eq!(
            member_offset(&btf, "sock", "flag"),
            Some(33),
            "the size of a bit field is not part of its offset"
        );
        assert_eq!(member_offset(&btf, "socket", "flag"), Some(32));
        for (of, name) in [("sock", "fla"), ("soc", "flag"), ("int", "flag"), ("socket", "first"), ("", "")] {
            assert_eq!(member_offset(&btf, of, name), None, "{of}.{name}");
        }
        assert_eq!(struct_id(&btf, "socket"), Some(2));
        assert_eq!(struct_id(&btf, "sock"), Some(3));
        assert_eq!((struct_id(&btf, "int"), function_id(&btf, "sock")), (None, None));
    }

    #[test]
    fn malformed_btf_has_no_members() {
        let btf = example();
        for length in 0..btf.len() {
            // The last name is not terminated.
            assert_eq!(member_offset(&btf[..length], "sock", "flag"), None, "{length}");
        }
        for at in 0..btf.len() {
            for byte in [0, 0x7f, 0xff] {
                let mut btf = btf.clone();
                btf[at] = byte;
                // It may find something, and must terminate.
                let _ = (member_offset(&btf, "sock", "flag"), function_id(&btf, "sock"));
            }
        }
    }

    #[test]
    fn types_in_the_kernels_btf_are_those_of_bpftool() {
        let Ok(btf) = fs::read(KERNEL) else { return };
        let Ok(dump) = Command::new("bpftool").args(["btf", "dump", "file", KERNEL]).output() else { return };
        let dump = String::from_utf8_lossy(&dump.stdout);
        for (of, name) in [("sock", "sk_kern_sock"), ("sock", "sk_family"), ("task_struct", "pid")] {
            let begin = format!(" STRUCT '{of}' ");
            let members = dump.lines().skip_while(|it| !it.contains(&begin)).skip(1);
            let mut members = members.take_while(|it| it.starts_with('\t'));
            let found = members.find(|it| it.contains(&format!("'{name}'")));
            let offset =
                found.and_then(|it| it.split_once("bits_offset=")?.1.split(' ').next()?.parse().ok());
            assert_eq!(member_offset(&btf, of, name), offset, "{of}.{name}");
        }
        for (found, name) in [
            (struct_id(&btf, "sock"), "STRUCT 'sock' "),
            (function_id(&btf, "tcp_v4_connect"), "FUNC 'tcp_v4_connect' "),
        ] {
            let line = dump.lines().find(|it| it.contains(name)).unwrap();
            let id = line.strip_prefix('[').and_then(|it| it.split_once(']')).unwrap().0;
            assert_eq!(found, id.parse().ok(), "{name}");
        }
    }
}
