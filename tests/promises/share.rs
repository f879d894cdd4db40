//! Chunks that go to another process, through a socket, as file descriptors.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use growspan::driver::{ChunkProps, Shareable};
use growspan::{Bytes, GrowableBuffer, Sizing};

use crate::{GRANULE, peek, sharing_device};

const SOCKET: &str = "GROWSPAN_TEST_SOCKET";

/// Which chunks are sent.
const SENT: [usize; 2] = [2, 1];

fn pattern(chunk: usize) -> Vec<u8> {
    (0..GRANULE).map(|n| (n / 512 * 3 + n + chunk * 101) as u8).collect()
}

pub(crate) fn a_chunk_goes_to_another_process_and_back() {
    let device = sharing_device();
    let pool = device.new_pool(ChunkProps::PLAIN.with_shareable(Shareable::PosixFd), Bytes::mib(64));
    assert_eq!(pool.left_out(), [], "{}", device.info().name);
    let granule = Bytes::new(GRANULE as u64);
    let builder = GrowableBuffer::<u8>::builder(&device).max_len(8 * GRANULE).pool(&pool);
    let mut buffer = builder.sizing(Sizing::Uniform(granule)).build().unwrap();
    for chunk in 0..4 {
        buffer.append(&pattern(chunk)).unwrap();
    }

    let path = std::env::temp_dir().join(format!("growspan-{}.socket", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["share::as_other_process", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .env(SOCKET, &path);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let socket = accept(&listener);
    std::fs::remove_file(&path).unwrap();
    let talk = || -> std::io::Result<()> {
        let mut socket = socket.ok_or(std::io::ErrorKind::TimedOut)?;
        socket.set_read_timeout(Some(Duration::from_secs(60)))?;
        for chunk in SENT {
            let fd = buffer.export_chunk(chunk).unwrap();
            send(&socket, fd.as_fd())?;
        }
        // The other process has read what was there. What is written now it sees as well.
        expect(&mut socket, b'r')?;
        for chunk in SENT {
            buffer.copy_in(chunk * GRANULE + 5, &[0xEE; 3]).unwrap();
        }
        socket.write_all(b"w")?;
        expect(&mut socket, b'd')
    };
    let talked = talk();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    println!("{text}");
    talked.unwrap_or_else(|error| panic!("{error}; the other process: {:?}\n{text}", output.status));
    assert!(output.status.success() && text.contains("role done"), "{:?}\n{text}", output.status);

    // The other process is gone, and the memory is here as before.
    for chunk in 0..4 {
        let mut expected = pattern(chunk);
        if SENT.contains(&chunk) {
            expected[5..8].fill(0xEE);
        }
        let mut now = vec![0; GRANULE];
        buffer.copy_out(chunk * GRANULE, &mut now).unwrap();
        assert!(now == expected, "chunk {chunk}");
    }
    buffer.close().unwrap();
    assert_eq!(pool.classes(), [(granule, 4 - SENT.len())], "only chunks that nobody else had");
    pool.trim(Bytes::ZERO);
    assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO);
}

/// Waits for the other process to call, for a while.
fn accept(listener: &UnixListener) -> Option<UnixStream> {
    listener.set_nonblocking(true).unwrap();
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(60) {
        if let Ok((socket, _)) = listener.accept() {
            socket.set_nonblocking(false).unwrap();
            return Some(socket);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

#[test]
#[ignore = "not a test of its own: others start it in a process of its own"]
fn as_other_process() {
    let Some(path) = std::env::var_os(SOCKET) else { return };
    let mut socket = UnixStream::connect(path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let device = sharing_device();
    let granule = Bytes::new(GRANULE as u64);
    let mut range = device.reserve(Bytes::new((SENT.len() * GRANULE) as u64)).unwrap();
    for _ in SENT {
        let fd = receive(&socket).unwrap();
        // SAFETY: the sender exported it on the same kind of device, from a chunk of one granule.
        let chunk = unsafe { device.import(fd.as_fd(), granule) }.unwrap();
        drop(fd);
        range.append(vec![chunk]).unwrap();
    }
    assert_eq!(device.snapshot().bytes_mapped, range.mapped());
    let read = |place: usize| {
        let mut bytes = vec![0; GRANULE];
        peek(range.base() + (place * GRANULE) as u64, &mut bytes);
        bytes
    };
    for (place, chunk) in SENT.into_iter().enumerate() {
        assert!(read(place) == pattern(chunk), "chunk {chunk} as it was sent");
    }
    socket.write_all(b"r").unwrap();
    expect(&mut socket, b'w').unwrap();
    for (place, chunk) in SENT.into_iter().enumerate() {
        let mut expected = pattern(chunk);
        expected[5..8].fill(0xEE);
        assert!(read(place) == expected, "chunk {chunk} as it was written after");
    }
    println!("{}", device.snapshot());
    range.close().unwrap();
    assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO);
    socket.write_all(b"d").unwrap();
    println!("role done");
}

fn expect(socket: &mut UnixStream, word: u8) -> std::io::Result<()> {
    let mut byte = [0];
    socket.read_exact(&mut byte)?;
    assert_eq!(byte, [word]);
    Ok(())
}

/// Room for a control message with one descriptor, aligned as its header wants.
#[repr(C)]
union Control {
    header: libc::cmsghdr,
    bytes: [u8; 64],
}

/// A message of one byte, with room for one descriptor.
fn message(byte: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: all zeros are a message without anything.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = byte;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut *control).cast();
    // SAFETY: the macro only computes.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<libc::c_int>() as u32) } as _;
    message
}

/// Sends a descriptor.
#[expect(clippy::multiple_unsafe_ops_per_block, reason = "one header, field by field")]
fn send(socket: &UnixStream, fd: BorrowedFd<'_>) -> std::io::Result<()> {
    let (mut word, mut control) = ([b'f'], Control { bytes: [0; 64] });
    let mut byte = libc::iovec { iov_base: word.as_mut_ptr().cast(), iov_len: 1 };
    let message = message(&mut byte, &mut control);
    // SAFETY: the message has room for one control header.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: the header lies within `control`, which is aligned for it.
    unsafe {
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<libc::c_int>() as u32) as _;
        libc::CMSG_DATA(header).cast::<libc::c_int>().write_unaligned(fd.as_raw_fd());
    }
    // SAFETY: the message points to one byte and one control message, alive until the call returns.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, 0) };
    if sent == 1 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Receives a descriptor.
#[expect(clippy::multiple_unsafe_ops_per_block, reason = "one header, field by field")]
fn receive(socket: &UnixStream) -> std::io::Result<OwnedFd> {
    let (mut word, mut control) = ([0_u8], Control { bytes: [0; 64] });
    let mut byte = libc::iovec { iov_base: word.as_mut_ptr().cast(), iov_len: 1 };
    let mut message = message(&mut byte, &mut control);
    // SAFETY: the message points to one byte and room for one control message, alive until the call returns.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if received != 1 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the system has filled the message in.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    assert!(!header.is_null(), "no descriptor came");
    // SAFETY: the header lies within `control`, and for this type a descriptor follows it, now ours.
    unsafe {
        assert_eq!((*header).cmsg_type, libc::SCM_RIGHTS);
        Ok(OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<libc::c_int>().read_unaligned()))
    }
}
