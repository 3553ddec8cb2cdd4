//! Settings of the C library for this process: the heap, and lookups of names.

#![expect(unsafe_code, reason = "the functions of the C library have no safe wrapper")]

/// How much free memory at its end the heap keeps until it is [given back](give_back_memory), in bytes.
#[cfg(target_env = "gnu")]
const KEPT_FREE: libc::c_int = 32 << 20;
/// From this size on a block is a mapping of its own, which grows without a copy and is returned at once, in bytes.
#[cfg(target_env = "gnu")]
const OWN_MAPPING: libc::c_int = 4 << 20;

/// Makes all threads allocate from one heap; must be called before a second thread starts.
///
/// A state is received, computed and compiled by different threads, and freed by another thread than the one that allocated
/// it: with one heap per thread, every heap grows to the size of the largest (200 MB with 10,000 Services of 10 endpoints,
/// instead of 140 MB). Each thread has a cache of freed memory, so that contention is rare.
///
/// The heap keeps what one change has freed for the next one: it would return it to the kernel at once, which clears each page again.
pub fn keep_one_heap() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        (libc::M_TRIM_THRESHOLD, KEPT_FREE),
        // It would follow the largest block that was freed, but not if the other threshold is set.
        (libc::M_MMAP_THRESHOLD, OWN_MAPPING),
    ] {
        // SAFETY: it sets a parameter of the allocator; if that fails, only memory or time is wasted.
        unsafe {
            libc::mallopt(parameter, value);
        }
    }
}

/// Lets a static binary look names up in files and by DNS alone, whatever the node's nsswitch.conf says; must be called
/// before a second thread starts.
///
/// The other ways are libraries of the node, which need the C library of the node: loaded beside the one in the binary, it
/// ends the process where their versions differ (seen with glibc 2.41 on the node and 2.36 in the binary).
pub fn use_no_library_of_the_node() {
    #[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
    {
        // nss.h of glibc.
        unsafe extern "C" {
            fn __nss_configure_lookup(
                database: *const libc::c_char,
                services: *const libc::c_char,
            ) -> libc::c_int;
        }
        for (database, services) in [(c"hosts", c"files dns"), (c"group", c"files")] {
            // SAFETY: two strings, which are copied; if there is no memory for that, nothing changes.
            unsafe {
                __nss_configure_lookup(database.as_ptr(), services.as_ptr());
            }
        }
    }
}

/// Returns free memory of the heap to the system; without this call the allocator keeps free blocks that lie between used ones.
/// Takes some milliseconds.
pub fn give_back_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes the allocator's locks, and touches only free memory.
    unsafe {
        libc::malloc_trim(0);
    }
}
