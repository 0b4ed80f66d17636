//! A client's socket.
//!
//! Responsible for reading what is there, for writing what the socket takes, and for waiting for either with
//! as few wake-ups as can be. Not responsible for what the bytes say.
//!
//! It is watched for bytes to read only. A socket that is watched for room to write too wakes the broker each
//! time that its client reads an answer, so room is waited for only while there is none.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags, recv, send};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::lease::frame::Lines;

/// How long to wait for room that cannot be watched.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Read at a time.
const READ_BYTES: usize = 16 << 10;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Stream {
    watched: AsyncFd<OwnedFd>,
}

impl Stream {
    /// Takes over a connection that does not block.
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        let watched = watch(stream.into(), Interest::READABLE)?;
        Ok(Self { watched })
    }

    /// Waits for bytes and adds them; how many, 0 at the end. Nothing is lost when it is not waited for.
    ///
    /// After bytes it looks once more before it waits: the next request may be there already.
    pub(super) async fn read(&self, lines: &mut Lines) -> io::Result<usize> {
        loop {
            let mut ready = self.watched.readable().await?;
            let mut buffer = [const { MaybeUninit::uninit() }; READ_BYTES];
            match recv(ready.get_inner(), &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok(((bytes, _), count)) => {
                    lines.push(bytes);
                    return Ok(count);
                }
                Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Writes what the socket takes now, at least one byte.
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        Ok(send(self.watched.get_ref(), bytes, flags)?)
    }

    /// Waits until the socket takes bytes, or for a moment where that cannot be watched, as when no more files may
    /// be opened: the next write knows.
    pub(super) async fn writable(&self) {
        let watched = self.watched.get_ref().try_clone();
        match watched.and_then(|socket| watch(socket, Interest::WRITABLE)) {
            Ok(watched) if watched.writable().await.is_ok() => {}
            _ => tokio::time::sleep(LOOK_AGAIN).await,
        }
    }
}

/// Waits for what happens at a descriptor.
#[expect(
    deprecated,
    reason = "its successor is unsafe because of types that share a descriptor; an `OwnedFd` shares it with nothing"
)]
pub(super) fn watch(descriptor: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(descriptor, interest)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    fn pair() -> (Stream, UnixStream) {
        let (own, other) = UnixStream::pair().unwrap();
        (Stream::new(own).unwrap(), other)
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build();
        runtime.unwrap().block_on(test);
    }

    #[test]
    fn all_that_was_sent_is_read_and_then_the_end() {
        run(async {
            let (stream, mut other) = pair();
            let text = [b"x".repeat(READ_BYTES + 9), b"\nend\n".to_vec()].concat();
            other.write_all(&text).unwrap();
            drop(other);
            let mut lines = Lines::new(2 * READ_BYTES);
            let mut read = 0;
            while let count @ 1.. = stream.read(&mut lines).await.unwrap() {
                read += count;
            }
            assert_eq!(read, text.len());
            assert_eq!(lines.next().unwrap().unwrap().len(), READ_BYTES + 9);
            assert_eq!(lines.next().unwrap().unwrap(), b"end");
            assert_eq!(stream.read(&mut lines).await.unwrap(), 0);
        });
    }

    #[test]
    fn a_full_socket_takes_bytes_again_when_some_were_read() {
        run(async {
            let (stream, mut other) = pair();
            let block = [7; 4096];
            let mut written = 0;
            let error = loop {
                match stream.write(&block) {
                    Ok(count) => written += count,
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            let reader = std::thread::spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(20));
                let mut all = vec![0; written];
                other.read_exact(&mut all).unwrap();
                other
            });
            stream.writable().await;
            assert!(stream.write(&block).unwrap() > 0);
            drop(reader.join().unwrap());
        });
    }
}
