//! Where a member is in one of the kernel's structs, by the kernel's own type information (BTF).
//!
//! The one rule: whatever does not read as BTF is "not there", and no error: who asks can do without.
//! (<https://docs.kernel.org/bpf/btf.html>. The crates for it are under a copyleft licence, or show no members.)

/// Where the running kernel shows its types.
pub(super) const KERNEL: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
/// The sizes of what every type begins with, of a member, and of the header.
const TYPE: usize = 12;
const MEMBER: usize = 12;
const HEADER: usize = 24;

/// The place of a member in a struct, in bits from its begin; of a bit field, of its first bit. `None` if there is no such
/// struct or member; those of structs without a name inside are not looked for.
pub(super) fn member(btf: &[u8], of: &str, name: &str) -> Option<u32> {
    let magic = u16::from_ne_bytes(btf.get(..2)?.try_into().ok()?);
    if magic != MAGIC || btf.len() < HEADER {
        return None;
    }
    let begin = word(btf, 4)?;
    let [types, length, strings] = [8, 12, 16].map(|at| word(btf, at));
    let strings = btf.get(begin.checked_add(strings?)?..)?;
    let mut types = btf.get(begin.checked_add(types?)?..)?.get(..length?)?;
    while !types.is_empty() {
        let info = word(types, 4)?;
        let (kind, entries, has_bit_fields) = (info >> 24 & 0x1f, info & 0xffff, info >> 31 != 0);
        let rest = types.get(TYPE..)?;
        let (this, next) = rest.split_at_checked(size_after(kind, entries)?)?;
        if kind == STRUCT && is_named(strings, word(types, 0)?, of) {
            let member = this
                .chunks_exact(MEMBER)
                .find(|it| word(it, 0).is_some_and(|at| is_named(strings, at, name)));
            // Where there are bit fields, the upper byte is their size.
            let place = word(member?, 8)? as u32;
            return Some(if has_bit_fields { place & 0x00ff_ffff } else { place });
        }
        types = next;
    }
    None
}

const STRUCT: usize = 4;

/// How many bytes follow after what every type begins with.
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

/// A word of the machine's own byte order, as BTF is.
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
    fn a_member_is_found_by_its_name_in_the_struct_of_that_name() {
        let btf = example();
        assert_eq!(member(&btf, "sock", "first"), Some(0));
        assert_eq!(member(&btf, "sock", "flag"), Some(33), "the size of a bit field is no part of its place");
        assert_eq!(member(&btf, "socket", "flag"), Some(32));
        for (of, name) in [("sock", "fla"), ("soc", "flag"), ("int", "flag"), ("socket", "first"), ("", "")] {
            assert_eq!(member(&btf, of, name), None, "{of}.{name}");
        }
    }

    #[test]
    fn what_is_no_btf_has_no_members() {
        let btf = example();
        for length in 0..btf.len() {
            // The last name has lost its end.
            assert_eq!(member(&btf[..length], "sock", "flag"), None, "{length}");
        }
        for at in 0..btf.len() {
            for byte in [0, 0x7f, 0xff] {
                let mut btf = btf.clone();
                btf[at] = byte;
                // It may find something, and must end.
                let _ = member(&btf, "sock", "flag");
            }
        }
    }

    #[test]
    fn the_kernels_own_types_read_as_another_program_reads_them() {
        let Ok(btf) = fs::read(KERNEL) else { return };
        let Ok(dump) = Command::new("bpftool").args(["btf", "dump", "file", KERNEL]).output() else { return };
        let dump = String::from_utf8_lossy(&dump.stdout);
        for (of, name) in [("sock", "sk_kern_sock"), ("sock", "sk_family"), ("task_struct", "pid")] {
            let begin = format!(" STRUCT '{of}' ");
            let members = dump.lines().skip_while(|it| !it.contains(&begin)).skip(1);
            let mut members = members.take_while(|it| it.starts_with('\t'));
            let found = members.find(|it| it.contains(&format!("'{name}'")));
            let place = found.and_then(|it| it.split_once("bits_offset=")?.1.split(' ').next()?.parse().ok());
            assert_eq!(member(&btf, of, name), place, "{of}.{name}");
        }
    }
}
