//! One message, from its words to its numbers.
//!
//! Responsible for every wording of torch 1.0 to 2.15, in order and word for word: a number is only read where its words
//! stand. Not responsible for finding messages in a log, nor for what the numbers mean. Texts are compared without white
//! space ([`super::log`]).

use super::amount::Amount;
use super::document::{Kind, OtherProcess};
use crate::bytes::Bytes;

/// A message as read. A number that it does not have, or that it says is unknown, is `None`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) device: Option<u32>,
    pub(super) requested: Option<Amount>,
    pub(super) total: Option<Amount>,
    pub(super) free: Option<Amount>,
    /// In blocks that tensors hold, and, as printed, free blocks of private pools.
    pub(super) allocated: Option<Amount>,
    pub(super) private_free: Option<Amount>,
    pub(super) unallocated: Option<Amount>,
    pub(super) reserved: Option<Amount>,
    pub(super) allowed: Option<Amount>,
    pub(super) this_process: Option<Amount>,
    pub(super) other_processes: Vec<OtherProcess>,
    pub(super) is_expandable: bool,
    pub(super) expandable_reserve: Option<Amount>,
    /// It ends before its last number.
    pub(super) is_cut: bool,
}

/// Processes read of one message; a device runs far fewer.
const MAX_PROCESSES: usize = 1000;

impl Message {
    fn new(kind: Kind) -> Self {
        Self {
            kind,
            device: None,
            requested: None,
            total: None,
            free: None,
            allocated: None,
            private_free: None,
            unallocated: None,
            reserved: None,
            allowed: None,
            this_process: None,
            other_processes: Vec::new(),
            is_expandable: false,
            expandable_reserve: None,
            is_cut: false,
        }
    }

    /// Reads the message whose words `out of memory` come next; `before` stands in front of them.
    pub(super) fn out_of_memory(before: &str, text: &str) -> Option<Self> {
        let mut rest = Rest(text);
        rest.skip("outofmemory").ok()?;
        if before.ends_with("wouldexceedallowedmemory.(") {
            return Some(Self::of_driver_pool(rest));
        }
        let is_named = ["CUDA", "HIP", "XPU"].iter().any(|it| before.ends_with(it));
        if is_named && rest.skip(".Triedtoallocate").is_ok() {
            return Self::of_allocator(rest);
        }
        if is_named
            && rest
                .skip(".Allocationwaspreemptivelyrejectedbecauseitwouldexceedper_process_memory_fractionlimit.")
                .is_ok()
        {
            let mut message = Self::new(Kind::Rejected);
            message.requested = rest.skip("Requestedsize:").and_then(|()| rest.amount()).ok().flatten();
            message.is_cut = message.requested.is_none();
            return Some(message);
        }
        let is_drivers = ["CUDAerror:", "HIPerror:", "cudaruntimeerror(2):", "CUDAran"]
            .iter()
            .any(|it| before.ends_with(it));
        is_drivers.then(|| Self::new(Kind::Driver))
    }

    /// Reads the message whose words `Tried to allocate` come next, quoted without those before them.
    pub(super) fn headless(text: &str) -> Option<Self> {
        let mut rest = Rest(text);
        rest.skip("Triedtoallocate").ok()?;
        // Without the words before it, only the device's name tells that it is a message at all.
        let mut ahead = Rest(rest.0);
        ahead.amount().ok()?;
        let is_message = ahead.0.starts_with("(GPU") || ahead.0.starts_with(".GPU");
        is_message.then(|| Self::of_allocator(rest)).flatten()
    }

    /// Reads the message of the CPU's allocator, after its name.
    pub(super) fn of_host(text: &str) -> Option<Self> {
        const ASKED: &str = "youtriedtoallocate";
        let ahead = text.get(..text.len().min(80)).unwrap_or_default();
        let mut rest = Rest(&text[ahead.find(ASKED)? + ASKED.len()..]);
        let mut message = Self::new(Kind::Host);
        message.requested = rest.amount().ok()?;
        Some(message)
    }

    /// What follows `Tried to allocate`.
    fn of_allocator(mut rest: Rest<'_>) -> Option<Self> {
        let mut message = Self::new(Kind::Allocator);
        if rest.skip("morethan1EBmemory").is_ok() {
            message.requested = Some(Amount {
                low_bytes: Bytes(1 << 60),
                high_bytes: Bytes(u64::MAX),
            });
            return Some(message);
        }
        message.requested = rest.amount().ok()?;
        let read = if rest.skip("(GPU").is_ok() {
            message.first_wording(&mut rest)
        } else if rest.skip(".GPU").is_ok() {
            message.second_wording(&mut rest)
        } else {
            Err(Cut)
        };
        message.is_cut = read.is_err();
        Some(message)
    }

    /// Torch 1: `(GPU 0; 7.79 GiB total capacity; ...)`.
    fn first_wording(&mut self, rest: &mut Rest<'_>) -> Result<(), Cut> {
        self.device = rest.device()?;
        rest.skip(";")?;
        self.total = rest.amount_before("totalcapacity;")?;
        self.allocated = rest.amount_before("alreadyallocated;")?;
        self.free = rest.amount_before("free;")?;
        if let Ok(allowed) = rest.amount_before("allowed;") {
            self.allowed = allowed;
        }
        if let Ok(reserved) = rest.amount_before("reservedintotalbyPyTorch)") {
            self.reserved = reserved;
            self.unallocated = reserved
                .zip(self.allocated)
                .map(|(all, used)| all.minus(used));
        } else {
            // Up to torch 1.3 `cached` is what is reserved beyond the allocated.
            self.unallocated = rest.amount_before("cached)")?;
            self.add_up();
        }
        Ok(())
    }

    /// Torch 2: `GPU 0 has a total capacity of ...`.
    fn second_wording(&mut self, rest: &mut Rest<'_>) -> Result<(), Cut> {
        self.device = rest.device()?;
        // Torch 2.0 and 2.1 have the typing error.
        rest.skip("hasatotalcapacityof")
            .or_else(|_| rest.skip("hasatotalcapactyof"))?;
        self.total = rest.amount()?;
        if rest.skip("ofwhich").is_ok() {
            self.free = rest.amount_before("isfree.")?;
        } else {
            // Of an XPU the free bytes are not told.
            rest.skip(".")?;
        }
        while rest.skip("Process").is_ok() {
            let pid = rest.number()?;
            rest.skip("has")?;
            let bytes = rest.amount_before("memoryinuse.")?;
            if self.other_processes.len() < MAX_PROCESSES {
                self.other_processes.push(OtherProcess { pid, bytes });
            }
        }
        if rest
            .skip("Includingnon-PyTorchmemory,thisprocesshas")
            .is_ok()
        {
            self.this_process = rest.amount_before("memoryinuse.")?;
        }
        if let Ok(allowed) = rest.amount_before("allowed;") {
            self.allowed = allowed;
        }
        rest.skip("Oftheallocatedmemory")?;
        self.allocated = rest.amount_before("isallocatedbyPyTorch,")?;
        if rest.skip("with").is_ok() {
            self.private_free = rest.amount_before("allocatedinprivatepools(e.g.,CUDAGraphs),")?;
        }
        rest.skip("and")?;
        self.unallocated = rest.amount_before("isreservedbyPyTorchbutunallocated.")?;
        self.add_up();
        if rest
            .skip("Thisallocationexceedstheexpandable-segmentreserveof")
            .is_ok()
        {
            self.is_expandable = true;
            self.expandable_reserve = rest.amount()?;
        }
        self.is_expandable |= rest.skip("expandable_segmentsisenabled").is_ok();
        Ok(())
    }

    /// `backend:cudaMallocAsync`: `Currently allocated : ...`, one line each.
    fn of_driver_pool(mut rest: Rest<'_>) -> Self {
        let mut message = Self::new(Kind::DriverPool);
        let mut read = || -> Result<(), Cut> {
            rest.skip(")")?;
            rest.skip("Currentlyallocated:")?;
            message.allocated = rest.amount()?;
            rest.skip("Requested:")?;
            message.requested = rest.amount()?;
            rest.skip("Devicelimit:")?;
            message.total = rest.amount()?;
            rest.skip("Free(accordingtoCUDA):")?;
            message.free = rest.amount()?;
            rest.skip("PyTorchlimit(setbyuser-suppliedmemoryfraction):")?;
            message.allowed = rest.amount()?;
            Ok(())
        };
        message.is_cut = read().is_err();
        message
    }

    fn add_up(&mut self) {
        self.reserved = self
            .allocated
            .zip(self.unallocated)
            .map(|(used, unused)| used.plus(unused));
    }
}

/// Other words come next than those looked for, or the text ends.
struct Cut;

/// What is still to be read.
struct Rest<'a>(&'a str);

impl Rest<'_> {
    /// Goes past these words, if they come next.
    fn skip(&mut self, words: &str) -> Result<(), Cut> {
        self.0 = self.0.strip_prefix(words).ok_or(Cut)?;
        Ok(())
    }

    /// An amount and the words behind it, or nothing at all.
    fn amount_before(&mut self, words: &str) -> Result<Option<Amount>, Cut> {
        let before = self.0;
        let read = self.amount();
        if read.is_ok() && self.skip(words).is_ok() {
            return read;
        }
        self.0 = before;
        Err(Cut)
    }

    /// A number with its unit; `None` where the number means "unknown".
    fn amount(&mut self) -> Result<Option<Amount>, Cut> {
        const UNITS: [(&str, u64); 5] = [
            ("bytes", 1),
            ("KiB", 1 << 10),
            ("MiB", 1 << 20),
            ("GiB", 1 << 30),
            ("TiB", 1 << 40),
        ];
        let is_part = |byte: u8| byte.is_ascii_digit() || byte == b'.';
        let end = self.0.bytes().position(|byte| !is_part(byte)).ok_or(Cut)?;
        let (number, rest) = self.0.split_at(end);
        let (rest, unit) = UNITS
            .iter()
            .find_map(|&(name, unit)| Some((rest.strip_prefix(name)?, unit)))
            .ok_or(Cut)?;
        // A number of a form that torch never prints is no number, and the message ends there.
        let is_number = number.bytes().filter(|&byte| byte == b'.').count() <= 1
            && number.starts_with(|first: char| first.is_ascii_digit());
        if !is_number {
            return Err(Cut);
        }
        self.0 = rest;
        Ok(Amount::parse(number, unit))
    }

    fn number(&mut self) -> Result<u64, Cut> {
        let end = self
            .0
            .bytes()
            .position(|byte| !byte.is_ascii_digit())
            .ok_or(Cut)?;
        let (number, rest) = self.0.split_at(end);
        let number = number.parse().map_err(|_| Cut)?;
        self.0 = rest;
        Ok(number)
    }

    /// The index of a device; `None` for one that no machine has (torch prints -1 for none).
    fn device(&mut self) -> Result<Option<u32>, Cut> {
        let is_negative = self.skip("-").is_ok();
        let index = self.number()?;
        Ok(u32::try_from(index).ok().filter(|_| !is_negative))
    }
}
