//! The opcodes of a pickle, as far as data needs them.
//!
//! Responsible for the stack machine of protocols 2 to 5 (`Lib/pickletools.py` lists the opcodes) and for
//! refusing, by name, whatever would import or call something. Not responsible for what the containers
//! become (`collect.rs`).
//!
//! Invariants: nothing is ever executed; memory is bounded by what was read ([`Bound`]), not by lengths that
//! the file declares; each opcode takes time in proportion to its bytes.

use std::io::Read;
use std::ops::ControlFlow;

use super::collect;
use super::containers::{Containers, Refusal};
use super::error::SnapshotError;
use super::recognise;
use super::value::{Memo, Other, Value};
use super::window::{WINDOW_BYTES, Window};

/// Longer strings are in no snapshot.
const LONGEST_TEXT_BYTES: usize = 16 << 20;
/// Elements between a mark and its `APPENDS` beyond this are appended early. Python writes 1,000 at a time;
/// torch's own pickler (`torch/csrc/jit/serialization/pickler.cpp`) writes all at once.
const EARLY: usize = 1024;

/// What the reader may hold: `least` bytes, or `per_byte` for each byte read so far, but never above `most`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bound {
    pub(super) least: u64,
    pub(super) per_byte: u64,
    pub(super) most: u64,
}

struct Mark {
    /// The stack's height where it was set.
    height: usize,
    /// Elements above it were appended early already.
    is_drained: bool,
}

pub(super) struct Machine<'a, 'w> {
    window: Window<'a>,
    watch: &'w mut dyn FnMut(u64) -> ControlFlow<()>,
    bound: Bound,
    stack: Vec<Value>,
    marks: Vec<Mark>,
    /// Height of the last mark: nothing below it may be popped.
    floor: usize,
    memo: Memo,
    containers: Containers,
    bytes: Vec<u8>,
    /// Where the opcode in hand starts.
    at: u64,
    /// The refill at which the bound was checked last.
    checked: u64,
}

impl<'a, 'w> Machine<'a, 'w> {
    pub(super) fn new(
        source: Box<dyn Read + 'a>,
        bound: Bound,
        watch: &'w mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Self {
        Self {
            window: Window::new(source),
            watch,
            bound,
            stack: Vec::with_capacity(4 * EARLY),
            marks: Vec::new(),
            floor: 0,
            memo: Memo::default(),
            containers: Containers::new(),
            bytes: Vec::new(),
            at: 0,
            checked: 0,
        }
    }

    /// Runs to the last opcode; what the pickle holds, and its containers.
    pub(super) fn run(mut self) -> Result<(Value, Containers), SnapshotError> {
        let ready = self.window.peek(recognise::HEAD_BYTES)?;
        let head = &self.window.ready()[..ready.min(recognise::HEAD_BYTES)];
        if let Some(error) = recognise::something_else(head) {
            return Err(error);
        }
        loop {
            if self.window.refills() != self.checked {
                self.check()?;
            }
            self.at = self.window.position();
            let opcode = self.window.byte()?;
            if opcode == b'.' {
                let value = self.pop()?;
                return Ok((value, self.containers));
            }
            self.step(opcode)?;
        }
    }

    fn step(&mut self, opcode: u8) -> Result<(), SnapshotError> {
        match opcode {
            b'h' | b'j' => self.get(opcode)?,
            b'K' => {
                let [value] = self.window.array()?;
                self.push(Value::Int(value.into()));
            }
            b'M' => {
                let value = u16::from_le_bytes(self.window.array()?);
                self.push(Value::Int(value.into()));
            }
            b'J' => {
                let value = i32::from_le_bytes(self.window.array()?);
                self.push(Value::Int(value.into()));
            }
            0x8a => {
                let [length] = self.window.array()?;
                self.long(length.into())?;
            }
            0x8b => {
                let length = i32::from_le_bytes(self.window.array()?);
                let length = u64::try_from(length);
                self.long(length.map_err(|_| self.damaged("an integer of negative length"))?)?;
            }
            0x94 => self.put(self.memo.next())?,
            b'q' => {
                let [at] = self.window.array()?;
                self.put(at.into())?;
            }
            b'r' => {
                let at = u32::from_le_bytes(self.window.array()?);
                self.put(at as usize)?;
            }
            b'(' => {
                self.floor = self.stack.len();
                self.marks.push(Mark {
                    height: self.floor,
                    is_drained: false,
                });
            }
            b'}' => {
                self.append_early()?;
                let dict = self.containers.new_dict();
                self.push_numbered(dict)?;
            }
            b']' => {
                self.append_early()?;
                let list = self.containers.new_list();
                self.push_numbered(list)?;
            }
            b'u' => {
                let height = self.drop_mark(false)?;
                self.set_above(height)?;
            }
            b'e' => {
                let height = self.drop_mark(true)?;
                self.append_above(height)?;
            }
            b's' => self.set_above(self.below(2)?)?,
            b'a' => self.append_above(self.below(1)?)?,
            0x8c => {
                let [length] = self.window.array()?;
                self.text(length.into())?;
            }
            b'X' => {
                let length = u32::from_le_bytes(self.window.array()?);
                self.text(length.into())?;
            }
            0x8d => {
                let length = u64::from_le_bytes(self.window.array()?);
                self.text(length)?;
            }
            b'G' => {
                let value = f64::from_be_bytes(self.window.array()?);
                self.push(Value::Float(value));
            }
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            0x95 => drop(self.window.array::<8>()?),
            0x80 => self.proto()?,
            _ => self.step_rarely(opcode)?,
        }
        Ok(())
    }

    /// Data that snapshots hold seldom or never.
    fn step_rarely(&mut self, opcode: u8) -> Result<(), SnapshotError> {
        match opcode {
            b')' => self.push(Value::Other(Other::Tuple)),
            0x85 => self.tuple(1)?,
            0x86 => self.tuple(2)?,
            0x87 => self.tuple(3)?,
            b't' => {
                let height = self.drop_mark(false)?;
                self.tuple(self.stack.len() - height)?;
            }
            b'l' => {
                let height = self.drop_mark(false)?;
                let list = self.containers.new_list();
                self.collect(height, list, collect::append)?;
            }
            b'd' => {
                let height = self.drop_mark(false)?;
                let dict = self.containers.new_dict();
                self.collect(height, dict, collect::set)?;
            }
            b'2' => {
                let top = *self
                    .stack
                    .last()
                    .ok_or_else(|| self.damaged("nothing to copy"))?;
                self.push(top);
            }
            b'0' => drop(self.pop()?),
            b'1' => {
                let height = self.drop_mark(false)?;
                self.stack.truncate(height);
            }
            b'C' => {
                let [length] = self.window.array()?;
                self.bytes(length.into())?;
            }
            b'B' => {
                let length = u32::from_le_bytes(self.window.array()?);
                self.bytes(length.into())?;
            }
            0x8e | 0x96 => {
                let length = u64::from_le_bytes(self.window.array()?);
                self.bytes(length)?;
            }
            0x8f => self.push(Value::Other(Other::Set)),
            0x90 => {
                let height = self.drop_mark(false)?;
                self.stack.truncate(height);
                if self.stack.last() != Some(&Value::Other(Other::Set)) {
                    return Err(self.damaged("elements are added to what is no set"));
                }
            }
            0x91 => {
                let height = self.drop_mark(false)?;
                self.stack.truncate(height);
                self.push(Value::Other(Other::Set));
            }
            _ => return Err(self.refuse(opcode)),
        }
        Ok(())
    }

    /// A run of `BINGET` and `LONG_BINGET`: three quarters of all opcodes of a snapshot.
    #[inline]
    fn get(&mut self, opcode: u8) -> Result<(), SnapshotError> {
        let at = if opcode == b'h' {
            usize::from(self.window.byte()?)
        } else {
            u32::from_le_bytes(self.window.array()?) as usize
        };
        let value = self.memo.get(at);
        let value = value.ok_or_else(|| self.damaged("nothing was put aside under this number"))?;
        self.push(value);
        loop {
            let (at, bytes) = match *self.window.ready() {
                [b'h', at, ..] => (usize::from(at), 2),
                [b'j', a, b, c, d, ..] => (u32::from_le_bytes([a, b, c, d]) as usize, 5),
                _ => return Ok(()),
            };
            // A number that is not set is left to the way above, which knows its position.
            let Some(value) = self.memo.get(at) else {
                return Ok(());
            };
            self.push(value);
            self.window.step(bytes);
        }
    }

    fn put(&mut self, at: usize) -> Result<(), SnapshotError> {
        let top = self.stack.last().copied();
        let top = top.ok_or_else(|| self.damaged("nothing to put aside"))?;
        // Picklers count up, so a number cannot be larger than the bytes that came before it.
        if at as u64 > self.at {
            return Err(self.damaged("a number to put aside under that nothing counted up to"));
        }
        self.memo.put(at, top);
        Ok(())
    }

    fn long(&mut self, length: u64) -> Result<(), SnapshotError> {
        let Some(count) = usize::try_from(length).ok().filter(|&count| count <= 16) else {
            self.window.skip(length)?;
            self.push(Value::Other(Other::HugeInt));
            return Ok(());
        };
        let bytes = self.window.slice(count)?;
        let fill = if bytes.last().is_some_and(|&last| last & 0x80 != 0) {
            0xff
        } else {
            0
        };
        let mut wide = [fill; 16];
        wide[..count].copy_from_slice(bytes);
        let value = i128::from_le_bytes(wide);
        let value = i64::try_from(value)
            .map(Value::Int)
            .or_else(|_| u64::try_from(value).map(Value::Unsigned));
        self.push(value.unwrap_or(Value::Other(Other::HugeInt)));
        Ok(())
    }

    fn text(&mut self, length: u64) -> Result<(), SnapshotError> {
        let count = usize::try_from(length).ok();
        let Some(count) = count.filter(|&count| count <= LONGEST_TEXT_BYTES) else {
            return Err(SnapshotError::TooLarge {
                position: self.at,
                what: format!(
                    "a string of {length} bytes; the longest read has {LONGEST_TEXT_BYTES}"
                ),
            });
        };
        let number = if count <= WINDOW_BYTES {
            let bytes = self.window.slice(count)?;
            self.containers.number_of_text(bytes)
        } else {
            self.bytes.clear();
            self.window.copy(length, &mut self.bytes)?;
            self.containers.number_of_text(&self.bytes)
        };
        self.push_numbered(number.map(Value::Text))
    }

    fn bytes(&mut self, length: u64) -> Result<(), SnapshotError> {
        self.window.skip(length)?;
        self.push(Value::Other(Other::Bytes));
        Ok(())
    }

    fn tuple(&mut self, count: usize) -> Result<(), SnapshotError> {
        let height = self.below(count)?;
        let pair = match self.stack[height..] {
            [first, second] => first.unsigned().zip(second.unsigned()),
            _ => None,
        };
        self.stack.truncate(height);
        if let Some((first, second)) = pair {
            let pair = self.containers.pair(first, second);
            return self.push_numbered(pair);
        }
        self.push(Value::Other(Other::Tuple));
        Ok(())
    }

    fn proto(&mut self) -> Result<(), SnapshotError> {
        match self.window.byte()? {
            0..=5 => Ok(()),
            found => Err(SnapshotError::NewProtocol { found }),
        }
    }

    #[inline]
    fn push(&mut self, value: Value) {
        self.stack.push(value);
    }

    fn push_numbered(&mut self, value: Option<Value>) -> Result<(), SnapshotError> {
        self.push(value.ok_or_else(|| self.refused(Refusal::Full))?);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, SnapshotError> {
        let height = self.below(1)?;
        let value = self.stack[height];
        self.stack.truncate(height);
        Ok(value)
    }

    /// Height of the stack below its top `count` values, which stand above the last mark.
    fn below(&self, count: usize) -> Result<usize, SnapshotError> {
        let height = self
            .stack
            .len()
            .checked_sub(count)
            .filter(|&height| height >= self.floor);
        height.ok_or_else(|| self.damaged("the stack is too short"))
    }

    /// Takes the last mark off; the stack's height where it was set.
    fn drop_mark(&mut self, drains: bool) -> Result<usize, SnapshotError> {
        let mark = self
            .marks
            .pop()
            .ok_or_else(|| self.damaged("no mark was set"))?;
        if mark.is_drained && !drains {
            return Err(self.damaged("a mark is used for two things"));
        }
        self.floor = self.marks.last().map_or(0, |mark| mark.height);
        Ok(mark.height)
    }

    /// Appends what waits above a mark already when it is much.
    #[inline]
    fn append_early(&mut self) -> Result<(), SnapshotError> {
        if self.stack.len() - self.floor < EARLY {
            return Ok(());
        }
        let (floor, Some(mark)) = (self.floor, self.marks.last_mut()) else {
            return Ok(());
        };
        let is_list = floor > 0 && self.containers.is_list(self.stack[floor - 1]);
        if !is_list {
            return Ok(());
        }
        mark.is_drained = true;
        self.collect_above(floor, collect::append)
    }

    fn append_above(&mut self, height: usize) -> Result<(), SnapshotError> {
        if height <= self.floor {
            return Err(self.damaged("the stack is too short"));
        }
        self.collect_above(height, collect::append)
    }

    fn set_above(&mut self, height: usize) -> Result<(), SnapshotError> {
        if height <= self.floor {
            return Err(self.damaged("the stack is too short"));
        }
        if (self.stack.len() - height) % 2 == 1 {
            return Err(self.damaged("a key without a value"));
        }
        self.collect_above(height, collect::set)
    }

    /// Gives what stands above a height to the container below it.
    fn collect_above(
        &mut self,
        height: usize,
        take: fn(&mut Containers, Value, &[Value]) -> Result<(), Refusal>,
    ) -> Result<(), SnapshotError> {
        let taken = take(
            &mut self.containers,
            self.stack[height - 1],
            &self.stack[height..],
        );
        self.stack.truncate(height);
        taken.map_err(|refusal| self.refused(refusal))
    }

    /// Gives what stands above a height to a new container, which then stands there.
    fn collect(
        &mut self,
        height: usize,
        container: Option<Value>,
        take: fn(&mut Containers, Value, &[Value]) -> Result<(), Refusal>,
    ) -> Result<(), SnapshotError> {
        let container = container.ok_or_else(|| self.refused(Refusal::Full))?;
        let taken = take(&mut self.containers, container, &self.stack[height..]);
        self.stack.truncate(height);
        self.push(container);
        taken.map_err(|refusal| self.refused(refusal))
    }

    /// Once for every window: the watcher, and the bound on memory.
    #[cold]
    fn check(&mut self) -> Result<(), SnapshotError> {
        self.checked = self.window.refills();
        let position = self.window.position();
        if (self.watch)(position).is_break() {
            return Err(SnapshotError::Stopped { position });
        }
        let stack = self.stack.capacity() * size_of::<Value>();
        let own = stack + self.marks.capacity() * size_of::<Mark>() + self.bytes.capacity();
        let held = own as u64 + self.memo.held_bytes() + self.containers.held_bytes();
        let grown = position.saturating_mul(self.bound.per_byte);
        let limit = self.bound.least.saturating_add(grown).min(self.bound.most);
        if held > limit {
            let what = format!(
                "reading it took {held} bytes of memory by there; the limit there is {limit} bytes"
            );
            return Err(SnapshotError::TooLarge { position, what });
        }
        Ok(())
    }

    fn damaged(&self, what: &'static str) -> SnapshotError {
        SnapshotError::Damaged {
            position: self.at,
            what,
        }
    }

    fn refused(&self, refusal: Refusal) -> SnapshotError {
        let what = match refusal {
            Refusal::NotAList => "something is appended to what is no list",
            Refusal::NotADict => "a key is set in what is no dict",
            Refusal::Changed => "a dict or list changes after another one took it in",
            Refusal::Full => {
                let what = "more than 4,294,967,295 things of one kind".to_owned();
                return SnapshotError::TooLarge {
                    position: self.at,
                    what,
                };
            }
        };
        self.damaged(what)
    }

    /// The error for an opcode that is no data.
    fn refuse(&mut self, opcode: u8) -> SnapshotError {
        let position = self.at;
        let name = match opcode {
            b'c' | b'i' => self.module_and_name(),
            0x93 => match self.stack[..] {
                [.., Value::Text(module), Value::Text(name)] => {
                    let texts = &self.containers.texts;
                    Some(format!("{}.{}", texts.get(module), texts.get(name)))
                }
                _ => None,
            },
            _ => None,
        };
        if let Some(evidence) = name.as_deref().and_then(checkpoint_evidence) {
            return SnapshotError::Checkpoint { evidence };
        }
        let opcode_name = |table: &[(u8, &'static str)]| {
            table
                .iter()
                .find(|(code, _)| *code == opcode)
                .map(|&(_, name)| name)
        };
        if let Some(opcode) = opcode_name(RUNS_CODE) {
            let name: String = name.unwrap_or_default().chars().take(200).collect();
            let name = if name.is_empty() {
                name
            } else {
                format!(" of `{}`", name.escape_debug())
            };
            return SnapshotError::Refused {
                opcode,
                name,
                position,
            };
        }
        if let Some(opcode) = opcode_name(OLD) {
            return SnapshotError::OldProtocol { opcode, position };
        }
        if position == 0 {
            return SnapshotError::SomethingElse {
                what: "no pickle",
                advice: "a snapshot is the file that `torch.cuda.memory._dump_snapshot` writes",
            };
        }
        self.damaged("there is no such opcode")
    }

    /// The two lines behind `GLOBAL` and `INST`.
    fn module_and_name(&mut self) -> Option<String> {
        let module = self.window.line(200).ok()?;
        let name = self.window.line(200).ok()?;
        Some(format!("{module}.{name}"))
    }
}

/// How a name that a pickle wants to import tells a checkpoint: its tensors, or the dict of its weights.
fn checkpoint_evidence(name: &str) -> Option<String> {
    let is_model = name == "collections.OrderedDict"
        || ["torch.", "transformers."]
            .iter()
            .any(|start| name.starts_with(start));
    let name = name.escape_debug();
    is_model.then(|| format!("it wants to import `{name}`, as saved models do"))
}

/// Opcodes that import, call or reach outside the pickle.
const RUNS_CODE: &[(u8, &str)] = &[
    (b'c', "GLOBAL"),
    (0x93, "STACK_GLOBAL"),
    (b'R', "REDUCE"),
    (b'b', "BUILD"),
    (b'i', "INST"),
    (b'o', "OBJ"),
    (0x81, "NEWOBJ"),
    (0x92, "NEWOBJ_EX"),
    (0x82, "EXT1"),
    (0x83, "EXT2"),
    (0x84, "EXT4"),
    (b'P', "PERSID"),
    (b'Q', "BINPERSID"),
    (0x97, "NEXT_BUFFER"),
    (0x98, "READONLY_BUFFER"),
];

/// Opcodes of protocols 0 and 1 that later ones replaced.
const OLD: &[(u8, &str)] = &[
    (b'I', "INT"),
    (b'L', "LONG"),
    (b'F', "FLOAT"),
    (b'S', "STRING"),
    (b'T', "BINSTRING"),
    (b'U', "SHORT_BINSTRING"),
    (b'V', "UNICODE"),
    (b'g', "GET"),
    (b'p', "PUT"),
];
