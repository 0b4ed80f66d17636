//! Reserved addresses of a device, and physical memory behind them now and then.
//!
//! Responsible for taking, mapping, unmapping and releasing physical memory, in chunks, and for copies
//! between it and the host. Not responsible for what lies there nor for where it is kept meanwhile.
//!
//! A chunk is *absent*, *held* (taken, not mapped) or *mapped*. [`Arena::open`] brings chunks from absent to
//! mapped and [`Arena::close`] back, each by way of held. Because unmapping does not touch the bytes, a
//! close that fails before anything is released can be undone exactly:
//!
//! ```text
//!            create            map                 access
//!   absent --------->  held  -------->  mapped  ------------>  open
//!          <---------        <--------
//!            release           unmap, for all chunks before any is released
//! ```
//!
//! Invariant: each chunk's state is what the driver was last told about it with success, so that whatever
//! could not be undone is found by the next open, close or drop.

use std::ops::Range;
use std::sync::Arc;

use super::device::Device;
use super::driver::{Driver, Handle};
use super::error::VmmError;
use super::held;

/// Length of a chunk, if the granularity allows: few calls for a large model, little wasted on a small one.
const CHUNK_BYTES: u64 = 32 << 20;

/// A range of addresses of a device that stays reserved while its memory goes and comes back.
pub struct Arena {
    device: Arc<Device>,
    start: u64,
    length: u64,
    chunk: u64,
    chunks: Vec<Chunk>,
    /// Chunks that may be read and written: those before this one.
    open: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunk {
    Absent,
    Held(Handle),
    Mapped(Handle),
}

impl Arena {
    /// Reserves addresses for `length` bytes, rounded up to the device's granularity; closed.
    ///
    /// # Errors
    ///
    /// [`VmmError`]: no memory has that length, or the driver refuses.
    pub fn reserve(device: Arc<Device>, length: u64) -> Result<Self, VmmError> {
        let unit = device.granularity();
        let rounded = length.checked_next_multiple_of(unit);
        let fits = |&bytes: &u64| bytes > 0 && i64::try_from(bytes).is_ok();
        let whole = rounded
            .filter(fits)
            .ok_or(VmmError::Length { wanted: length })?;
        let chunk = CHUNK_BYTES.next_multiple_of(unit).min(whole);
        let start = device.within(|driver| driver.reserve(whole))?;
        let count = usize::try_from(whole.div_ceil(chunk)).unwrap_or(usize::MAX);
        Ok(Self {
            device,
            start,
            length: whole,
            chunk,
            chunks: vec![Chunk::Absent; count],
            open: 0,
        })
    }

    /// Its first address, for its whole life.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.start
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// The device.
    #[must_use]
    pub const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Bytes from its start that may be used.
    #[must_use]
    pub fn open_bytes(&self) -> u64 {
        (self.open as u64 * self.chunk).min(self.length)
    }

    /// Bytes of the device that it holds, usable or not.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        let held = |&number: &usize| !matches!(self.chunks.get(number), Some(Chunk::Absent) | None);
        let numbers = (0..self.chunks.len()).filter(held);
        numbers.map(|number| self.place(number).1).sum()
    }

    /// Has memory behind the first `end` bytes at least; those that were open keep what lies in them, the
    /// others hold anything. All of it or nothing: on an error it is as before.
    ///
    /// # Errors
    ///
    /// [`VmmError::NoRoom`], with all that was missing; [`VmmError`] if the driver refuses.
    pub fn open_to(&mut self, end: u64) -> Result<(), VmmError> {
        if end > self.length {
            return Err(VmmError::Range { start: 0, end });
        }
        let wanted = usize::try_from(end.div_ceil(self.chunk)).unwrap_or(usize::MAX);
        if wanted <= self.open {
            return Ok(());
        }
        let device = Arc::clone(&self.device);
        device.within(|driver| {
            let new = self.open..wanted;
            let opened = self.bring_in(driver, new.clone());
            if opened.is_ok() {
                self.open = wanted;
            } else {
                self.put_away(driver, new);
            }
            opened
        })
    }

    /// Has memory behind all of it.
    ///
    /// # Errors
    ///
    /// As [`Self::open_to`].
    pub fn open(&mut self) -> Result<(), VmmError> {
        self.open_to(self.length)
    }

    /// Waits for the device and gives all memory back; the addresses stay. On an error it is as before,
    /// with every byte.
    ///
    /// Should the driver refuse to release memory once all of it is unmapped, the arena is closed, and
    /// [`Self::held_bytes`] tells; it is used again by the next open, or released by the next close.
    ///
    /// # Errors
    ///
    /// [`VmmError::Refused`].
    pub fn close(&mut self) -> Result<(), VmmError> {
        let device = Arc::clone(&self.device);
        device.within(|driver| {
            driver.synchronize()?;
            let unmapped = self.unmap_all(driver);
            if unmapped.is_ok() {
                self.open = 0;
                self.release_all(driver);
            }
            unmapped
        })
    }

    /// Copies bytes from the device.
    ///
    /// # Errors
    ///
    /// [`VmmError::Range`] where nothing is open; [`VmmError::Refused`].
    pub fn copy_out(&self, offset: u64, bytes: &mut [u8]) -> Result<(), VmmError> {
        let start = self.check(offset, bytes.len())?;
        self.device.within(|driver| driver.copy_out(start, bytes))
    }

    /// Copies bytes to the device.
    ///
    /// # Errors
    ///
    /// As [`Self::copy_out`].
    pub fn copy_in(&mut self, offset: u64, bytes: &[u8]) -> Result<(), VmmError> {
        let start = self.check(offset, bytes.len())?;
        self.device.within(|driver| driver.copy_in(start, bytes))
    }

    /// The address of a range that is open.
    fn check(&self, offset: u64, length: usize) -> Result<u64, VmmError> {
        let end = offset.saturating_add(length as u64);
        if end > self.open_bytes() {
            return Err(VmmError::Range { start: offset, end });
        }
        Ok(self.start + offset)
    }

    /// Address and length of a chunk; the last may be shorter.
    fn place(&self, number: usize) -> (u64, u64) {
        let offset = number as u64 * self.chunk;
        (self.start + offset, self.chunk.min(self.length - offset))
    }

    /// Takes and maps what is missing of these chunks, and makes them accessible.
    fn bring_in(&mut self, driver: &Driver, numbers: Range<usize>) -> Result<(), VmmError> {
        let (first, _) = self.place(numbers.start);
        let mut end = first;
        for number in numbers.clone() {
            let (start, length) = self.place(number);
            end = start + length;
            let handle = match self.chunks[number] {
                Chunk::Mapped(_) => continue,
                Chunk::Held(handle) => handle,
                Chunk::Absent => {
                    let created = driver.create(self.device.ordinal(), length)?;
                    let missing = || self.missing(numbers.clone());
                    let handle = created.ok_or_else(|| self.device.no_room(missing()))?;
                    held::taken(self.device.number(), length);
                    handle
                }
            };
            self.chunks[number] = Chunk::Held(handle);
            driver.map(start, length, handle)?;
            self.chunks[number] = Chunk::Mapped(handle);
        }
        driver.allow(self.device.ordinal(), first, end - first)
    }

    /// Bytes of these chunks that are absent.
    fn missing(&self, numbers: Range<usize>) -> u64 {
        let absent = numbers.filter(|&number| self.chunks[number] == Chunk::Absent);
        absent.map(|number| self.place(number).1).sum()
    }

    /// Unmaps and releases these chunks, the last first, as far as the driver lets it.
    fn put_away(&mut self, driver: &Driver, numbers: Range<usize>) {
        for number in numbers.rev() {
            let (start, length) = self.place(number);
            if let Chunk::Mapped(handle) = self.chunks[number]
                && driver.unmap(start, length).is_ok()
            {
                self.chunks[number] = Chunk::Held(handle);
            }
            self.release(driver, number);
        }
    }

    /// Unmaps every chunk; if one cannot be, those before it are mapped again, with their bytes.
    fn unmap_all(&mut self, driver: &Driver) -> Result<(), VmmError> {
        for number in 0..self.chunks.len() {
            let Chunk::Mapped(handle) = self.chunks[number] else {
                continue;
            };
            let (start, length) = self.place(number);
            if let Err(error) = driver.unmap(start, length) {
                self.map_again(driver, number);
                return Err(error);
            }
            self.chunks[number] = Chunk::Held(handle);
        }
        Ok(())
    }

    /// Maps what was open before `end` and is held now; what cannot be is open no more.
    fn map_again(&mut self, driver: &Driver, end: usize) {
        let open = self.open;
        let again = end.min(open);
        if self.bring_in(driver, 0..again).is_err() {
            self.open = 0;
        }
    }

    /// Gives memory and addresses back, and says whether all of it went.
    fn give_back(&mut self) -> bool {
        let device = Arc::clone(&self.device);
        let given_back = device.within(|driver| {
            // A kernel may still be at work on what is dropped.
            driver.synchronize()?;
            self.put_away(driver, 0..self.chunks.len());
            if self.held_bytes() > 0 {
                return Ok(false);
            }
            driver.unreserve(self.start, self.length).map(|()| true)
        });
        given_back.unwrap_or(false)
    }

    fn release_all(&mut self, driver: &Driver) {
        for number in (0..self.chunks.len()).rev() {
            self.release(driver, number);
        }
    }

    fn release(&mut self, driver: &Driver, number: usize) {
        if let Chunk::Held(handle) = self.chunks[number]
            && driver.release(handle).is_ok()
        {
            self.chunks[number] = Chunk::Absent;
            held::given_back(self.device.number(), self.place(number).1);
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // Once more if it is refused; for good it is when the process ends and the driver has gone before,
        // with all that it held.
        let _done = self.give_back() || self.give_back();
    }
}
