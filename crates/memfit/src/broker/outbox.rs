//! What a client has not read yet.
//!
//! Responsible for writing at once where the socket takes it, and for keeping the rest. A client that does not
//! read is not read from either ([`Outbox::is_full`]), so what is kept is bounded by what it asked for
//! before, and no other client waits for it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tokio::sync::Notify;

use super::stream::Stream;
use crate::lease::protocol::Reply;

/// Unread bytes above which nothing more is read from a client.
const FULL_BYTES: usize = 64 << 10;

/// One client's way out.
#[derive(Debug)]
pub(crate) struct Outbox {
    stream: Rc<Stream>,
    unread: RefCell<Vec<u8>>,
    /// Set when the connection is to end.
    is_closed: Cell<bool>,
    /// The client's task looks again.
    pub(crate) changed: Notify,
}

impl Outbox {
    pub(crate) fn new(stream: Rc<Stream>) -> Self {
        Self {
            stream,
            unread: RefCell::default(),
            is_closed: Cell::new(false),
            changed: Notify::new(),
        }
    }

    /// Keeps a reply for [`Outbox::flush`].
    pub(crate) fn put(&self, reply: &Reply) {
        let mut unread = self.unread.borrow_mut();
        // Replies are numbers, texts and maps with text keys, which always have a JSON form.
        if serde_json::to_writer(&mut *unread, reply).is_ok() {
            unread.push(b'\n');
        }
    }

    /// Writes as much as the socket takes without waiting.
    pub(crate) fn flush(&self) {
        let mut unread = self.unread.borrow_mut();
        let mut written = 0;
        while written < unread.len() {
            match self.stream.write(&unread[written..]) {
                Ok(0) => break,
                Ok(count) => written += count,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    self.changed.notify_one();
                    break;
                }
                Err(_) => {
                    // The other end is gone; reading will say so too.
                    self.close();
                    break;
                }
            }
        }
        unread.drain(..written);
    }

    /// Ends the connection once its task looks.
    pub(crate) fn close(&self) {
        self.is_closed.set(true);
        self.changed.notify_one();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.get()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.unread.borrow().is_empty()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.unread.borrow().len() >= FULL_BYTES
    }
}
