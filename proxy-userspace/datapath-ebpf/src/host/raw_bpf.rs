//! Raw bpf(2): the commands that aya 0.14 does not offer, and one socket option.
//!
//! Invariant: every buffer passed to the kernel is as long as what the kernel reads or writes; its length is checked here.

#![expect(
    unsafe_code,
    reason = "bpf(2) takes a union of raw pointers, and aya 0.14 offers neither batches nor link updates"
)]

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::{ffi::OsStrExt as _, net::UnixDatagram},
    },
    path::Path,
};

use aya_obj::generated::{
    BPF_F_QUERY_EFFECTIVE, bpf_attach_type, bpf_attr, bpf_cmd, bpf_link_info, bpf_map_type,
};
use bytemuck::Pod;

/// Calls bpf(2).
///
/// # Safety
///
/// Every pointer in `attr` must be valid for what `command` does with it.
unsafe fn bpf(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i64> {
    let size = size_of::<bpf_attr>();
    // SAFETY: `attr` is valid for `size` bytes; what it points to is the caller's promise.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command as u32, std::ptr::from_mut(attr), size) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// An attribute of zeroes; the kernel requires unused fields to be zero.
fn attr() -> bpf_attr {
    // SAFETY: a union of integers and arrays of them: all zeroes is a value of each.
    unsafe { std::mem::zeroed() }
}

fn fd(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// Opens the object pinned at `path`: a map, a program or a link. `NotFound` if there is none.
pub(crate) fn obj_get(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = attr();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    // SAFETY: `path` is a C string that outlives the call.
    owned(unsafe { bpf(bpf_cmd::BPF_OBJ_GET, &mut attr) }?)
}

/// The file descriptor returned by a call.
fn owned(result: i64) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(result).map_err(io::Error::other)?;
    // SAFETY: the kernel has just created this file descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Creates an array of maps; inner maps must have the type, the sizes and the flags of `template`.
pub(crate) fn create_array_of_maps(name: &str, template: BorrowedFd<'_>, slots: u32) -> io::Result<OwnedFd> {
    let mut map_name = [0; 16];
    // The last byte stays zero: it terminates the name.
    for (to, from) in map_name[..15].iter_mut().zip(name.bytes()) {
        // C's `char` is signed on x86-64, and not on arm64.
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let mut attr = attr();
    let word = size_of::<u32>() as u32;
    attr.__bindgen_anon_1.map_type = bpf_map_type::BPF_MAP_TYPE_ARRAY_OF_MAPS as u32;
    attr.__bindgen_anon_1.key_size = word;
    attr.__bindgen_anon_1.value_size = word;
    attr.__bindgen_anon_1.max_entries = slots;
    attr.__bindgen_anon_1.inner_map_fd = fd(template);
    attr.__bindgen_anon_1.map_name = map_name;
    // SAFETY: no pointers.
    let created = unsafe { bpf(bpf_cmd::BPF_MAP_CREATE, &mut attr) }?;
    owned(created)
}

/// The attribute of a command on the entry of a key, which has to outlive the call.
fn element(map: BorrowedFd<'_>, key: &[u8]) -> bpf_attr {
    let mut attr = attr();
    attr.__bindgen_anon_2.map_fd = fd(map);
    attr.__bindgen_anon_2.key = key.as_ptr() as u64;
    attr
}

/// Reads an entry of a hash map or array whose keys and values have these types, if there is one.
pub(crate) fn lookup<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    let mut value = V::zeroed();
    let mut attr = element(map, bytemuck::bytes_of(key));
    attr.__bindgen_anon_2.__bindgen_anon_1.value = std::ptr::from_mut(&mut value) as u64;
    // SAFETY: the kernel reads a key and writes a value. The sizes of the types were compared with those of the map when it was
    // opened, and both outlive the call.
    match unsafe { bpf(bpf_cmd::BPF_MAP_LOOKUP_ELEM, &mut attr) } {
        Ok(_) => Ok(Some(value)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Deletes an entry of a map with u32 keys.
pub(crate) fn delete(map: BorrowedFd<'_>, key: u32) -> io::Result<()> {
    let key = key.to_ne_bytes();
    // SAFETY: the kernel reads a key of 4 bytes, the size of `key`, which outlives the call.
    unsafe { bpf(bpf_cmd::BPF_MAP_DELETE_ELEM, &mut element(map, &key)) }.map(drop)
}

/// Writes an entry of a map whose keys and values have these types; with the flag `BPF_EXIST`, `NotFound` if there is none yet.
pub(crate) fn update<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K, value: &V, flags: u32) -> io::Result<()> {
    let mut attr = element(map, bytemuck::bytes_of(key));
    attr.__bindgen_anon_2.__bindgen_anon_1.value = std::ptr::from_ref(value) as u64;
    attr.__bindgen_anon_2.flags = flags.into();
    // SAFETY: the kernel reads a key and a value of the map's sizes, which are those of the types; both outlive the call.
    unsafe { bpf(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr) }.map(drop)
}

/// Replaces the program of a link without a moment in which none is attached (Linux 5.7).
pub(crate) fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = attr();
    attr.link_update.link_fd = fd(link);
    attr.link_update.__bindgen_anon_1.new_prog_fd = fd(program);
    // SAFETY: no pointers.
    unsafe { bpf(bpf_cmd::BPF_LINK_UPDATE, &mut attr) }.map(drop)
}

/// Detaches a link's program before it returns (Linux 5.9). Dropping the last reference detaches it some time later.
pub(crate) fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = attr();
    attr.link_detach.link_fd = fd(link);
    // SAFETY: no pointers.
    unsafe { bpf(bpf_cmd::BPF_LINK_DETACH, &mut attr) }.map(drop)
}

/// The id (inode number) of the cgroup that a link is attached to; 0 once the cgroup is removed.
pub(crate) fn link_cgroup(link: BorrowedFd<'_>) -> io::Result<u64> {
    let info = link_info(link)?;
    // SAFETY: a link of another type leaves zeroes or other integers here; both are values.
    Ok(unsafe { info.__bindgen_anon_1.cgroup.cgroup_id })
}

/// The index of the interface that a tcx link is attached to; 0 once the interface is removed.
pub(crate) fn link_interface(link: BorrowedFd<'_>) -> io::Result<u32> {
    let info = link_info(link)?;
    // SAFETY: as for `link_cgroup`.
    Ok(unsafe { info.__bindgen_anon_1.tcx.ifindex })
}

pub(crate) fn link_program(link: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(link_info(link)?.prog_id)
}

fn link_info(link: BorrowedFd<'_>) -> io::Result<bpf_link_info> {
    // SAFETY: a struct of integers: all zeroes is a value of it.
    let mut info: bpf_link_info = unsafe { std::mem::zeroed() };
    let mut attr = attr();
    attr.info.bpf_fd = fd(link);
    attr.info.info_len = size_of::<bpf_link_info>() as u32;
    attr.info.info = std::ptr::from_mut(&mut info) as u64;
    // SAFETY: `info` is valid for the length given, and outlives the call.
    unsafe { bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr) }?;
    Ok(info)
}

/// The ids of the programs that run at a hook of a cgroup, inherited ones included, in order of execution.
pub(crate) fn effective_programs(cgroup: BorrowedFd<'_>, hook: bpf_attach_type) -> io::Result<Vec<u32>> {
    // A cgroup has at most 64 programs per hook (BPF_CGROUP_MAX_PROGS), and so has each of its ancestors.
    let mut ids = vec![0_u32; 64];
    loop {
        let mut attr = attr();
        attr.query.__bindgen_anon_1.target_fd = fd(cgroup);
        attr.query.attach_type = hook as u32;
        attr.query.query_flags = BPF_F_QUERY_EFFECTIVE;
        attr.query.prog_ids = ids.as_mut_ptr() as u64;
        attr.query.__bindgen_anon_2.prog_cnt = u32::try_from(ids.len()).map_err(io::Error::other)?;
        // SAFETY: the kernel writes at most `prog_cnt` ids, for which there is room.
        let result = unsafe { bpf(bpf_cmd::BPF_PROG_QUERY, &mut attr) };
        // SAFETY: the field the kernel wrote; an integer.
        let count = unsafe { attr.query.__bindgen_anon_2.prog_cnt } as usize;
        match result {
            Ok(_) => {
                ids.truncate(count);
                return Ok(ids);
            }
            // There are more; the kernel has returned their number.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && count > ids.len() => {
                ids.resize(count, 0);
            }
            Err(error) => return Err(error),
        }
    }
}

/// The cookie of the network namespace that the calling thread is in (Linux 5.14).
pub(crate) fn netns_cookie() -> io::Result<u64> {
    // Not bound to an address: the loopback interface may be down.
    let socket = UnixDatagram::unbound()?;
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    let (level, option) = (libc::SOL_SOCKET, libc::SO_NETNS_COOKIE);
    let to = std::ptr::from_mut(&mut cookie).cast();
    // SAFETY: the kernel writes at most `length` bytes to `cookie`, which has that many.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, to, &mut length) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(cookie) }
}

/// The size of a map's entries, in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct EntrySize {
    pub(crate) key: usize,
    pub(crate) value: usize,
}

impl EntrySize {
    pub(crate) const fn of<K, V>() -> Self {
        Self { key: size_of::<K>(), value: size_of::<V>() }
    }

    /// The number of `keys`.
    fn count(self, keys: &[u8]) -> u32 {
        assert_eq!(keys.len() % self.key, 0, "the keys are complete");
        u32::try_from(keys.len() / self.key).expect("fewer than 2^32 entries in memory")
    }
}

/// Writes entries of a hash map, an array (Linux 5.6) or an outer map. Not atomic: after an error, some may be written.
pub(crate) fn update_batch(
    map: BorrowedFd<'_>,
    entry: EntrySize,
    keys: &[u8],
    values: &[u8],
) -> io::Result<()> {
    let count = entry.count(keys);
    assert_eq!(values.len(), count as usize * entry.value, "each key has a value");
    let mut attr = attr();
    attr.batch.map_fd = fd(map);
    attr.batch.keys = keys.as_ptr() as u64;
    attr.batch.values = values.as_ptr() as u64;
    attr.batch.count = count;
    // SAFETY: the kernel reads `count` keys and values, which is what the slices hold.
    unsafe { bpf(bpf_cmd::BPF_MAP_UPDATE_BATCH, &mut attr) }.map(drop)
}

/// Deletes entries of a hash map (Linux 5.6). `NotFound` if one does not exist; some may then be deleted.
pub(crate) fn delete_batch(map: BorrowedFd<'_>, entry: EntrySize, keys: &[u8]) -> io::Result<()> {
    let mut attr = attr();
    attr.batch.map_fd = fd(map);
    attr.batch.keys = keys.as_ptr() as u64;
    attr.batch.count = entry.count(keys);
    // SAFETY: the kernel reads `count` keys, which is what the slice holds.
    unsafe { bpf(bpf_cmd::BPF_MAP_DELETE_BATCH, &mut attr) }.map(drop)
}

/// Where a batch of entries has ended, as the kernel says it: a u32 for a hash map, a key for an array; more room does no harm.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    words: [u64; 4],
    is_within: bool,
}

impl Cursor {
    /// After this position of an array.
    pub(crate) fn after(position: u32) -> Self {
        // As bytes, the key is at the beginning.
        let mut words = [0; 4];
        bytemuck::bytes_of_mut(&mut words)[..size_of::<u32>()].copy_from_slice(&position.to_ne_bytes());
        Self { words, is_within: true }
    }
}

/// Some entries of a map.
pub(crate) struct Batch {
    pub(crate) keys: Vec<u8>,
    pub(crate) values: Vec<u8>,
    /// Whether there are no further ones.
    pub(crate) is_last: bool,
}

/// Reads at most `count` entries of a hash map or array (Linux 5.6) from a cursor on, and moves it. For a hash map, `count` must have
/// room for the entries of its largest bucket.
pub(crate) fn lookup_batch(
    map: BorrowedFd<'_>,
    entry: EntrySize,
    count: u32,
    cursor: &mut Cursor,
) -> io::Result<Batch> {
    let mut keys = vec![0; count as usize * entry.key];
    let mut values = vec![0; count as usize * entry.value];
    let mut attr = attr();
    attr.batch.map_fd = fd(map);
    attr.batch.in_batch = if cursor.is_within { cursor.words.as_ptr() as u64 } else { 0 };
    attr.batch.out_batch = cursor.words.as_mut_ptr() as u64;
    attr.batch.keys = keys.as_mut_ptr() as u64;
    attr.batch.values = values.as_mut_ptr() as u64;
    attr.batch.count = count;
    // SAFETY: the kernel reads its cursor, and writes that and at most `count` keys and values, for which there is room.
    let is_last = match unsafe { bpf(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr) } {
        Ok(_) => false,
        // The end of the map was reached.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
        Err(error) => return Err(error),
    };
    cursor.is_within = true;
    // SAFETY: the field the kernel wrote; an integer.
    let count = unsafe { attr.batch.count } as usize;
    keys.truncate(count * entry.key);
    values.truncate(count * entry.value);
    Ok(Batch { keys, values, is_last })
}
