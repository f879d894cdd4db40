//! Calls that the kernel refuses, as older kernels and sandboxes do.

use core::ffi::{c_int, c_long, c_ulong};

/// From now on a system call whose argument with this number (from 0) has this value fails with `code` in this process and
/// all that it starts.
pub(crate) fn refuse(call: c_long, argument: u32, value: c_int, code: c_int) {
    use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};
    let op = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    // The number of the call is at 0 of what a filter sees, its first argument at 16, each further one 8 behind.
    let program = [
        op(BPF_LD | BPF_W | BPF_ABS, 0, 0, 0),
        op(BPF_JMP | BPF_JEQ | BPF_K, 0, 3, call as u32),
        op(BPF_LD | BPF_W | BPF_ABS, 0, 0, 16 + 8 * argument),
        op(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, value.cast_unsigned()),
        op(BPF_RET | BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | code.cast_unsigned()),
        op(BPF_RET | BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
    // SAFETY: this flag only takes rights away.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    let (mode, all_threads) = (c_ulong::from(libc::SECCOMP_SET_MODE_FILTER), libc::SECCOMP_FILTER_FLAG_TSYNC);
    // SAFETY: the filter is a program of six steps that the call copies.
    let rc = unsafe { libc::syscall(libc::SYS_seccomp, mode, all_threads, &raw const filter) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}
